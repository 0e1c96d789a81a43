"""Raises an ImportError with the remedy if this folder has no compiled module, such as that of a checkout.

Python searches the working directory first. In a checkout it finds these sources instead of the installed package,
unless the installation is editable. `jaxcomm/__init__.py` imports this file before all others.
"""

import importlib.util
import pathlib

_spec = importlib.util.find_spec("jaxcomm._core")

# Without a location it is the folder of the module's type stubs, which `make` puts beside the sources.
if _spec is None or not _spec.has_location:
    raise ImportError(
        f"jaxcomm: {pathlib.Path(__file__).parent} has no compiled module _core. In a checkout, run Python from "
        "another folder after `pip install .`, or install with `pip install -e .`"
    )
