"""Times of collectives on machines that are not at hand.

``collective()`` simulates the plan that jaxcomm would execute on a ``Cluster``; ``step()`` a whole program: `program`
and `kernels` read its jaxpr, `groups` finds the part of the cluster that a group sees, `schedule` orders the work.
Predictions of NCCL and RCCL come from measurements: `table` reads them, `plans` holds the formulas, `systems` fits
their parameters, `residual` interpolates their errors, `bands` holds the quantiles of these errors, `validate` reports
them. The command is `python -m jaxcomm.simulate`.
"""

from jaxcomm.simulate.calls import Simulated, collective
from jaxcomm.simulate.cluster import Cluster, ClusterError, Compute, Level
from jaxcomm.simulate.failures import Goodput, goodput
from jaxcomm.simulate.hlo import of_text as step_of_hlo
from jaxcomm.simulate.predictions import Collective, Step
from jaxcomm.simulate.steps import step
from jaxcomm.simulate.tasks import StepError

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
