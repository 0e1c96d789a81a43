"""Makes the example models importable, which are not part of the installed package."""

import pathlib
import sys

# Appended, so that an installed jaxcomm comes before its sources in the repository.
sys.path.append(str(pathlib.Path(__file__).parents[2]))
