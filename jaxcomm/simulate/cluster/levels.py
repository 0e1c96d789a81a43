"""A level of links, and the computation of a device."""

import dataclasses
import math
from collections.abc import Mapping

KINDS = ("switch", "rails", "fat_tree")


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of links.

    Attributes:
      name: of the level.
      kind: "switch", "rails" or "fat_tree" (docs/internals/simulate.md).
      ranks: of one group of this level.
      bytes_per_s: usable bandwidth of one rank and direction: into the domain (first level), of its adapters (second).
      flow_bytes_per_s: limit of one transfer of a rank.
      latency_s: added by this level.
      overhead_s: time that a step occupies the sender, in addition to its bytes.
      planes: networks of the second level.
      hashed_planes: networks of which a thread block uses one at a time; 1 where transfers use all of them.
      taper: bandwidth of the adapters below a group, divided by that of its uplinks.
      paths: equal links of the uplinks of a group, of which each transfer of a thread block takes one (ECMP); 0 if
        transfers are spread over all of them.
      sharing: ranks that share these uplinks, as ``spread`` counts them.
      sharers: groups of ranks that communicate over these uplinks at once; ``spread`` counts the ranks of one.
    """

    name: str
    kind: str
    ranks: int
    bytes_per_s: float = math.inf
    flow_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    overhead_s: float = 0.0
    planes: int = 1
    hashed_planes: int = 1
    taper: float = 1.0
    paths: int = 0
    sharing: int = 0
    sharers: int = 1


@dataclasses.dataclass(frozen=True)
class Compute:
    """Computation of one device, for ``step``.

    Attributes:
      flops_per_s: peak of products of bfloat16. Other types have a peak in inverse proportion to their size.
      efficiency: share of the peak that products reach.
      memory_efficiency: share of the memory bandwidth that kernels reach.
      kernel_s: start of a kernel.
      origins: origin of each figure, by "device.key".
    """

    flops_per_s: float
    efficiency: float
    memory_efficiency: float
    kernel_s: float
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
