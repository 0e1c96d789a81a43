"""Fitted parameters. The package ships one file, which `python -m tools.simulator fit --package` wrote."""

import dataclasses
import functools
import importlib.resources
import json
from typing import Any

from jaxcomm.simulate.nccl.intervals import Intervals
from jaxcomm.simulate.nccl.systems import Prior, System, Systems


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The parameters of measured systems and the intervals of predictions."""

    systems: Systems
    intervals: Intervals


@functools.cache
def shipped() -> Fitted:
    """The parameters of the package."""
    file = importlib.resources.files("jaxcomm.simulate.nccl") / "data" / "parameters.json"
    return from_data(json.loads(file.read_text(encoding="utf-8")))


def from_data(data: dict[str, Any]) -> Fitted:
    """The parameters in the content of a file."""
    priors = {form: {name: Prior(*pair) for name, pair in prior.items()} for form, prior in data["priors"].items()}
    fitted = {
        tuple(entry["key"]): System(entry["parameters"], entry["identified"], entry["device"], entry["rows"])
        for entry in data["systems"]
    }
    intervals = Intervals({name: [(low, high) for low, high in pairs] for name, pairs in data["intervals"].items()})
    return Fitted(Systems(fitted, priors), intervals)
