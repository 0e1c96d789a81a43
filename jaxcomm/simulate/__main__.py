"""python -m jaxcomm.simulate"""

import sys

from jaxcomm.simulate.cli import main

sys.exit(main())
