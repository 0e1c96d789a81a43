import os
import sys

from jaxcomm.recorder import _cli

if __name__ == "__main__":
    try:
        status = _cli.main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
