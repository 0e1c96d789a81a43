"""Times of collectives on machines that are not at hand.

``collective()`` simulates the plan that jaxcomm would execute on a ``Cluster``; ``step()`` a whole program. The command
is `python -m jaxcomm.simulate`.

- `cluster`: clusters as TOML, their faults, and the part of a cluster that a group sees.
- `step`: programs as tasks, from their jaxpr or HLO, and the order in which the tasks run.
- `nccl`: NCCL, from statistics of published measurements.
- `export`: plots, timelines and schedules.
"""

from jaxcomm.simulate.cluster.levels import Compute, Level
from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.cluster.toml_table import ClusterError
from jaxcomm.simulate.collectives import Simulated, collective
from jaxcomm.simulate.goodput import Goodput, goodput
from jaxcomm.simulate.step.hlo import of_text as step_of_hlo
from jaxcomm.simulate.step.predict import step
from jaxcomm.simulate.step.result import Collective, Step
from jaxcomm.simulate.step.tasks import StepError

__all__ = [
    "Cluster",
    "ClusterError",
    "Collective",
    "Compute",
    "Goodput",
    "Level",
    "Simulated",
    "Step",
    "StepError",
    "collective",
    "goodput",
    "step",
    "step_of_hlo",
]
