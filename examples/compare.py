"""Compares the kernel of an example with plain JAX on all available GPUs, after CMake has built it:

    python compare.py fused_rmsnorm fused_rmsnorm/build/libfused_rmsnorm.so

`python -m jaxcomm.run -n 4 compare.py ...` runs it in several processes.
"""

import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.distributed import initialize

AXIS = "rank"
CALLS = 3  # per program, in sequence: later ones use the memory that earlier ones have used


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The operands of an example, in several sizes.

    Attributes:
      sizes: of the operands.
      draw: (random, number of ranks, *sizes) -> operands.
      split: of each operand, whether its first dimension is divided over the ranks; otherwise all ranks have it.
      following: (operands, results) -> operands of the next call.
      tolerance: by element type, relative to 1 + the expected magnitude.
      same: whether the results are the same bits on all ranks.
    """

    sizes: list[tuple[int, ...]]
    draw: Callable[..., tuple[np.ndarray, ...]]
    split: tuple[bool, ...]
    following: Callable[[Any, Any], tuple[Any, ...]]
    tolerance: dict[str, float]
    same: bool = False


COMPARISONS = {
    "fused_rmsnorm": Comparison(
        [(1, 128), (33, 1000), (256, 4096), (5, 7)],  # tokens, hidden
        lambda random, n, tokens, hidden: (
            random.uniform(-2, 2, (n * tokens, hidden)),
            random.uniform(-2, 2, (tokens, hidden)),
            random.uniform(0.5, 2, hidden),
        ),
        (True, False, False),
        lambda operands, results: (*results, operands[2]),
        {"float32": 1e-4, "bfloat16": 0.05},
        same=True,
    ),
    "all_gather_matmul": Comparison(
        [(1, 64, 33), (16, 128, 256), (100, 1000, 64), (2048, 512, 512)],  # tokens, hidden, columns
        lambda random, n, tokens, hidden, columns: (
            random.uniform(-1, 1, (n * tokens, hidden)),
            random.uniform(-1, 1, (n * hidden, columns)) / hidden**0.5,
        ),
        (True, True),
        lambda operands, results: (-operands[0], operands[1]),
        {"float32": 1e-5, "bfloat16": 0.01},
    ),
}


def worst_error(name: str, function: Any, reference: Any, mesh: jax.sharding.Mesh, sizes: Any, dtype: str) -> float:
    """The largest difference in units of the tolerance; infinite if it is NaN, or if the tolerance is 0."""
    case = COMPARISONS[name]
    specs = tuple(P(AXIS) if split else P() for split in case.split)
    drawn = case.draw(np.random.default_rng(sizes[0]), mesh.size, *sizes)
    values = [array.astype(dtype) if array.dtype == np.float64 else array for array in drawn]
    placed = [
        jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index, array=array: array[index])
        for array, spec in zip(values, specs, strict=True)
    ]

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    def program(*operands):
        worst = jnp.float32(0)
        for _ in range(CALLS):
            results, expected = function(*operands, AXIS), reference(*operands, AXIS)
            for pair in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
                ours, theirs = (array.astype(jnp.float32) for array in pair)
                error = jnp.abs(ours - theirs) / (case.tolerance[dtype] * (1 + jnp.abs(theirs)))
                error = jnp.where(ours == theirs, 0, jnp.where(jnp.isnan(error), jnp.inf, error))
                if case.same:
                    error = jnp.where(lax.pmax(ours, AXIS) == lax.pmin(ours, AXIS), error, jnp.inf)
                worst = jnp.maximum(worst, jnp.max(error, initial=0))
            operands = case.following(operands, results)
        return lax.pmax(worst, AXIS)

    return float(program(*placed))


def main() -> None:
    name, library = sys.argv[1:]
    sys.path.insert(0, str(pathlib.Path(__file__).parent / name))
    example = importlib.import_module(name)
    initialize()  # when started by jaxcomm.run
    example.register(library)
    mesh = jax.make_mesh((len(jax.devices()),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    for sizes in COMPARISONS[name].sizes:
        for dtype in COMPARISONS[name].tolerance:
            error = worst_error(name, getattr(example, name), example.reference, mesh, sizes, dtype)
            print(f"{dtype} {' x '.join(map(str, sizes))} on {mesh.size} GPUs: {error:.3f} of the tolerance")
            if not error <= 1:
                sys.exit("the kernel and JAX differ")


if __name__ == "__main__":
    main()
