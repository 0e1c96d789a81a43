"""Fitted parameters. The package ships one file, which `python -m tools.simulator fit` wrote."""

import dataclasses
import functools
import importlib.resources
import json
from typing import Any

from jaxcomm.simulate.nccl import model, systems
from jaxcomm.simulate.nccl.intervals import Intervals
from jaxcomm.simulate.nccl.residual import Residual


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The model and the intervals of its predictions."""

    model: model.Model
    intervals: Intervals
    origin: str


@functools.cache
def shipped() -> Fitted:
    """The parameters of the package."""
    file = importlib.resources.files("jaxcomm.simulate.nccl") / "data" / "parameters.json"
    return from_data(json.loads(file.read_text(encoding="utf-8")))


def from_data(data: dict[str, Any]) -> Fitted:
    """The parameters in the content of a file."""
    priors = {
        form: {name: systems.Prior(*pair) for name, pair in prior.items()} for form, prior in data["priors"].items()
    }
    fitted = {
        tuple(entry["key"]): systems.System(entry["parameters"], entry["identified"], entry["device"], entry["rows"])
        for entry in data["systems"]
    }
    intervals = Intervals({name: [(low, high) for low, high in pairs] for name, pairs in data["intervals"].items()})
    found = model.Model(systems.Systems(fitted, priors), Residual.from_data(data["residual"]))
    return Fitted(found, intervals, data["origin"])
