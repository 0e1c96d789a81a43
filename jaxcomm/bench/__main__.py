"""``python -m jaxcomm.bench``."""

import sys

from jaxcomm.bench.cli import main

sys.exit(main())
