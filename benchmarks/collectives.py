"""Runs ``python -m jaxcomm.bench``."""

import sys

from jaxcomm.bench import main

if __name__ == "__main__":
    sys.exit(main())
