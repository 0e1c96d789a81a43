"""The measured collectives: programs of one op or of a chain, with sizes, data and a NumPy oracle."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm._core import plan

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "int8", "uint8")

# Largest prime below 256: values fit in a byte and are exact in bfloat16.
_MAX_VALUES = 251


@dataclasses.dataclass(frozen=True)
class Group:
    """The devices of a measurement.

    Attributes:
      mesh: all devices.
      axis: name of the axis, or tuple of names, outermost first. Other axes of the mesh separate groups.
    """

    mesh: Mesh
    axis: Any

    @property
    def size(self) -> int:
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def spec(self) -> P:
        """Splits the first dimension over all devices."""
        return P(self.mesh.axis_names)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective, as nccl-tests describes them: sizes, data, bandwidth, run.

    Attributes:
      name: public name.
      native: name in the plan layer.
      baseline: name of the baseline of jax.lax; "" if it is `name`, None if jax.lax has none.
      input_parts: n -> divisor: the operand is 1 / input_parts of "size".
      count_parts: n -> divisor: nccl-tests' "count" is 1 / count_parts of the elements of "size".
      bus_factor: n -> busbw / algbw; None if the op has no bandwidth.
      run: (module, x, axis, n, options) -> result on this rank; options are keywords of jaxcomm.
      restore: (result, operand, axis, n) -> operand of the next op of a chain; None uses the result itself.
      expect: (xs, k) -> results of all ranks after k ops of a chain; xs is (ranks, elements of the operand).
      growth: (n, k) -> factors by which k chained ops multiply significand and magnitude of the largest operand.
      sized: whether the op has data.
    """

    name: str
    native: str
    run: Callable[..., Any]
    expect: Callable[[np.ndarray, int], Any]
    baseline: str | None = ""
    input_parts: Callable[[int], int] = lambda n: 1
    count_parts: Callable[[int], int] = lambda n: 1
    bus_factor: Callable[[int], float] | None = lambda n: 1.0
    restore: Callable[..., Any] | None = None
    growth: Callable[[int, int], tuple[int, int]] = lambda n, k: (1, 1)
    sized: bool = True


def _shift(result: Any, operand: Any, axis: Any, n: int) -> Any:
    # The next operand is the block of the next rank, so that each op moves other data. This copies 1 / n of "size", in
    # both libraries.
    start = (lax.axis_index(axis) + 1) % n * operand.shape[0]
    return lax.dynamic_slice_in_dim(result, start, operand.shape[0])


def _update(result: Any, operand: Any, axis: Any, n: int) -> Any:
    # The result replaces the rank's own block of the operand: sums grow by the same amount in every op. XLA updates in
    # place, so this copies 1 / n of "size" (and the whole operand once per chain), in both libraries.
    return lax.dynamic_update_slice_in_dim(operand, result, lax.axis_index(axis) * result.shape[0], 0)


def _wide(xs: np.ndarray) -> np.ndarray:
    kinds = ((jnp.floating, np.float64), (jnp.complexfloating, np.complex128))
    return xs.astype(next((wide for kind, wide in kinds if jnp.issubdtype(xs.dtype, kind)), np.int64))


def _sum(xs: np.ndarray) -> np.ndarray:
    total = _wide(xs[0])
    for x in xs[1:]:
        total += x.astype(total.dtype)
    return total


def _expect_psum(xs: np.ndarray, k: int) -> np.ndarray:
    # From the second op on, all ranks have the same operand. Integers wrap around, as on the devices.
    total = _sum(xs)
    with np.errstate(over="ignore"):
        for _ in range(k - 1):
            total *= len(xs)
    return np.broadcast_to(total.astype(xs.dtype), xs.shape)


def _expect_psum_scatter(xs: np.ndarray, k: int) -> list[np.ndarray]:
    n = len(xs)
    blocks = xs.reshape(n, n, -1)
    results = []
    for rank in range(n):
        own = _wide(blocks[rank, rank])
        others = _sum(blocks[:, rank]) - own
        results.append((own + k * others).astype(xs.dtype))
    return results


def _odd_part(n: int) -> int:
    """The factor by which multiplication by n changes a significand. A power of two changes only the exponent."""
    return n // (n & -n)


def _psum_like(name: str) -> Callable[..., Any]:
    return lambda lib, x, axis, n, options: getattr(lib, name)(x, axis, **options)


def _ring(n: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % n) for rank in range(n)]


def _run_barrier(lib: Any, x: Any, axis: Any, n: int, options: dict) -> Any:
    # jax.lax has no barrier; a reduction of one element takes its place.
    return lax.pmax(x, axis) if lib is lax else lib.barrier(x, axis, **options)


def _from_row(op: str, row: Any) -> Collective:
    """The case of a collective that moves blocks: its row of traits says where to."""

    def run(lib: Any, x: Any, axis: Any, n: int, options: dict) -> Any:
        values: list[Any] = [_ring(n)] if "source_of" in row.attributes else [0] * ("root" in row.attributes)
        joined = [name for name in row.attributes if name.endswith("_contiguous_count")]
        if len(joined) == 2:  # the axis that is split, and the axis that is joined
            values = [0, 0]
        return getattr(lib, op)(x, axis, *values, **({"tiled": True} if joined else {}), **options)

    def expect(xs: np.ndarray, k: int) -> np.ndarray:
        n = len(xs)
        inputs, outputs = (n if blocks == "per_rank" else 1 for blocks in (row.input, row.output))
        own = np.arange(n)
        ys = xs = xs.reshape(n, inputs, -1)
        for step in range(k):
            if step > 0:  # as `restore` makes it
                if inputs == outputs:
                    xs = ys
                elif inputs > outputs:
                    xs = xs.copy()
                    xs[own, own] = ys[:, 0]
                else:
                    xs = ys[own, (own + 1) % n][:, None]
            parts = [xs[row.expected(rank, block, 0, (rank - 1) % n)] for rank in range(n) for block in range(outputs)]
            ys = np.stack(parts).reshape(n, outputs, -1)
        return ys.reshape(n, -1)

    spread = "per_rank" in (row.input, row.output)
    blocks_of = row.blocks_into
    return Collective(
        op,
        row.name,
        run,
        expect,
        baseline="" if hasattr(lax, op) else None,
        input_parts=lambda n: n if spread and row.input == "one" else 1,
        count_parts=lambda n: n if spread else 1,
        bus_factor=lambda n: 1.0 if blocks_of(n, 1) is None else blocks_of(n, 1) / (n if spread else 1),
        restore={("one", "per_rank"): _shift, ("per_rank", "one"): _update}.get((row.input, row.output)),
    )


# The cases that need more than their row says: sums, the bandwidth of a broadcast, and no data.
_OWN = {
    c.name: c
    for c in (
        Collective(
            "psum",
            "all_reduce",
            _psum_like("psum"),
            _expect_psum,
            bus_factor=lambda n: 2 * (n - 1) / n,
            growth=lambda n, k: (n * _odd_part(n) ** (k - 1), n**k),
        ),
        Collective(
            "pmax",
            "all_reduce",
            _psum_like("pmax"),
            lambda xs, k: np.broadcast_to(xs.max(axis=0), xs.shape),
            bus_factor=lambda n: 2 * (n - 1) / n,
        ),
        Collective(
            "psum_scatter",
            "reduce_scatter",
            lambda lib, x, axis, n, options: lib.psum_scatter(x, axis, tiled=True, **options),
            _expect_psum_scatter,
            count_parts=lambda n: n,
            bus_factor=lambda n: (n - 1) / n,
            restore=_update,
            growth=lambda n, k: (1 + k * (n - 1), 1 + k * (n - 1)),
        ),
        Collective(
            "pbroadcast",
            "broadcast",
            lambda lib, x, axis, n, options: lib.pbroadcast(x, axis, 0, **options),
            lambda xs, k: np.broadcast_to(xs[0], xs.shape),
            baseline=None,
        ),
        Collective(
            "barrier",
            "barrier",
            _run_barrier,
            lambda xs, k: xs,
            baseline="lax.pmax of one element",
            bus_factor=None,
            sized=False,
        ),
    )
}
COLLECTIVES = {
    op: _OWN[op] if op in _OWN else _from_row(op, row)
    for row in plan.collectives()
    if row.elements == "array"
    for op in row.functions
    if op in _OWN or (op == row.functions[0] and not row.reduces)
}


def baseline_name(collective: Collective) -> str | None:
    return f"lax.{collective.name}" if collective.baseline == "" else collective.baseline


@dataclasses.dataclass(frozen=True)
class Size:
    """Elements of one measurement on n ranks.

    Attributes:
      total: elements of nccl-tests' "size", a multiple of n.
      operand: elements of one rank's operand.
      count: nccl-tests' "count".
    """

    total: int
    operand: int
    count: int


def make_size(collective: Collective, size_bytes: int, itemsize: int, n: int) -> Size:
    """The largest size up to `size_bytes` that divides into n blocks of at least one element."""
    if not collective.sized:
        return Size(0, 1, 0)
    total = max(size_bytes // itemsize // n, 1) * n
    return Size(total, total // collective.input_parts(n), total // collective.count_parts(n))


def num_values(collective: Collective, dtype: Any, n: int, k: int) -> int:
    """Number of values 0, 1, 2, ... that operands may hold so that k chained ops are exact; below 2 if none are."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return 2
    if jnp.issubdtype(dtype, jnp.integer):  # sums wrap around, which is exact
        return min(int(jnp.iinfo(dtype).max), _MAX_VALUES)
    info = jnp.finfo(dtype)
    significand, magnitude = collective.growth(n, k)
    return min(2 ** (info.nmant + 1) // significand, int(float(info.max)) // magnitude, _MAX_VALUES - 1) + 1


def longest_exact_chain(collective: Collective, dtype: Any, n: int, chain: int) -> int:
    """The longest chain up to `chain` whose results are exact in `dtype`."""
    for k in range(chain, 0, -1):
        if num_values(collective, dtype, n, k) >= 2:
            return k
    raise ValueError(
        f"{collective.name}: sums over {n} ranks are not exact in {jnp.dtype(dtype).name}; use fewer ranks or another "
        "--dtype"
    )


def make_operands(collective: Collective, size: Size, dtype: Any, n: int, k: int) -> np.ndarray:
    """Random integers, (ranks, elements of the operand), so that a misplaced block gives wrong elements."""
    if not collective.sized:
        return np.zeros(
            (n, size.operand), dtype
        )  # the maximum of zeros is zero, so the baseline of the barrier returns its operand too
    values = num_values(collective, dtype, n, k)
    random = np.random.default_rng(0)
    return np.stack([random.integers(values, size=size.operand, dtype=np.uint8).astype(dtype) for _ in range(n)])


def place(xs: np.ndarray, group: Group) -> jax.Array:
    flat = xs.reshape(-1)
    return jax.make_array_from_callback(flat.shape, NamedSharding(group.mesh, group.spec), lambda index: flat[index])


def program(
    collective: Collective, lib: Any, group: Group, chain: int, options: dict, isolate: bool = False
) -> Callable[[jax.Array], jax.Array]:
    """Returns a jitted chain of dependent ops of `lib`. `isolate` keeps XLA from simplifying across ops."""
    n = group.size

    def body(x):
        for step in range(chain):
            y = collective.run(lib, x, group.axis, n, options)
            if isolate:
                y = lax.optimization_barrier(y)
            if step + 1 < chain:
                x = y if collective.restore is None else collective.restore(y, x, group.axis, n)
        return y

    mapped = jax.shard_map(body, mesh=group.mesh, in_specs=group.spec, out_specs=group.spec, check_vma=False)
    return jax.jit(mapped)


def count_wrong(y: jax.Array, expected: Any) -> int:
    """Number of elements of this process's ranks that differ from the oracle."""
    wrong = 0
    for shard in y.addressable_shards:
        (index,) = shard.index
        rank = (index.start or 0) // shard.data.shape[0]
        wrong += int(np.count_nonzero(np.asarray(shard.data) != expected[rank]))
    return wrong
