"""Times of collectives on machines that are not at hand.

``collective()`` simulates the plan that jaxcomm would execute on a ``Cluster``. Predictions of NCCL and RCCL come from
measurements: `table` reads them, `plans` holds the formulas, `systems` fits their parameters, `residual` interpolates
their errors, `bands` holds the quantiles of these errors, `validate` reports them.
The command is `python -m jaxcomm.simulate`.
"""

from jaxcomm.simulate.calls import Simulated, collective
from jaxcomm.simulate.cluster import Cluster, ClusterError, Level

__all__ = ["Cluster", "ClusterError", "Level", "Simulated", "collective"]
