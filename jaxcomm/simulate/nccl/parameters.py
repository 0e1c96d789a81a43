"""Fitted parameters of NCCL on each device, which `python -m tools.simulator fit --package` wrote."""

import functools
import importlib.resources
import json

from jaxcomm.simulate.nccl.intervals import Intervals


@functools.cache
def shipped() -> tuple[dict[str, dict[str, tuple[str, dict[str, float]]]], Intervals]:
    """Evidence and parameters by form and device, and the intervals of predictions."""
    file = importlib.resources.files("jaxcomm.simulate.nccl") / "data" / "parameters.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    return data["parameters"], Intervals(data["intervals"])
