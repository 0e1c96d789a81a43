"""Types that several modules share."""

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import jax

# Nested containers of arrays. JAX registers containers at run time, so no type describes them all.
PyTree: TypeAlias = Any
# One mesh axis or several, outermost first. JAX takes any hashable name; a tuple or list is several.
AxisName: TypeAlias = Hashable | Sequence[Hashable]
# The same, checked: always a tuple.
AxisNames: TypeAlias = tuple[Hashable, ...]
# Ranks that form each group, as jax.lax takes them.
AxisIndexGroups: TypeAlias = Sequence[Sequence[int]]
# The same, checked and hashable; None is one group of all.
Groups: TypeAlias = tuple[tuple[int, ...], ...] | None
AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh
