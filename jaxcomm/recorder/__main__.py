import sys

from jaxcomm.recorder import _cli

if __name__ == "__main__":
    sys.exit(_cli.main())
