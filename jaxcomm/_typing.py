"""Types of arguments that several modules share."""

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import jax

# One mesh axis or several, outermost first. JAX takes any hashable name.
AxisName: TypeAlias = Hashable | tuple[Hashable, ...]
# The same, checked: always a tuple.
AxisNames: TypeAlias = tuple[Hashable, ...]
# Ranks that form each group, as jax.lax takes them.
AxisIndexGroups: TypeAlias = Sequence[Sequence[int]] | None
# The same, checked and hashable.
Groups: TypeAlias = tuple[tuple[int, ...], ...] | None
AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh
