"""Types that several modules share."""

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import jax

# Nested containers of arrays. Programs register further containers at run time, so no static type covers them all.
PyTree: TypeAlias = Any
# One mesh axis or several, outermost first. Any hashable object can be a name; a tuple or list holds several names.
AxisName: TypeAlias = Hashable | Sequence[Hashable]
# Checked axis names: always a tuple.
AxisNames: TypeAlias = tuple[Hashable, ...]
# Ranks that form each group, as in jax.lax.
AxisIndexGroups: TypeAlias = Sequence[Sequence[int]]
# Checked, hashable groups; None means one group of all ranks.
Groups: TypeAlias = tuple[tuple[int, ...], ...] | None
AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh
