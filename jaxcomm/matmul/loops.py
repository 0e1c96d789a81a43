"""The loops of collective matmul over the blocks of a group. They run inside the lowering of the two primitives.

Three products take part in a transfer. x_j is the block of rows of rank j:
- rows of a gather: block j of the result is x_j @ w, own block first.
- sums over a gather: the sum over j of x_j^T @ y_j, where y_j is block j of the rows of y.
- rows of a scatter: rank j gets the sum over ranks of their parts of block j.

All arrays have `num_batch` batch dimensions, then any number of row dimensions, then one dimension of columns. Weights
have two dimensions after the batch dimensions.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _check, _compat
from jaxcomm._dtypes import accumulator_type
from jaxcomm._lowering import Call
from jaxcomm._primitive import rank_in_group
from jaxcomm.ops.all_gather import all_gather_p
from jaxcomm.ops.ppermute import permute_p
from jaxcomm.ops.psum_scatter import reduce_scatter_p

# Names that the keyword `algorithm` accepts, besides "xla".
ALGORITHMS = ("unfused", "ring")


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static arguments that both primitives share.

    Attributes:
      call: op, axes, groups, algorithm (unfused, ring, xla or None), max_sms and call site.
      axis: row dimension that is split into blocks.
      num_batch: number of leading batch dimensions.
      precision: precision of the products, as in jax.lax.dot_general.
    """

    call: Call
    axis: int
    num_batch: int
    precision: Any

    def with_row_dimension(self) -> "Spec":
        """With one more row dimension, before the others."""
        return dataclasses.replace(self, axis=self.axis + 1)

    def with_batch_dimension(self) -> "Spec":
        return dataclasses.replace(self, axis=self.axis + 1, num_batch=self.num_batch + 1)

    def with_algorithm(self, algorithm: str) -> "Spec":
        return dataclasses.replace(self, call=dataclasses.replace(self.call, algorithm=algorithm))

    @property
    def group_size(self) -> int:
        return _check.group_size(self.call.axes, self.call.groups)

    @property
    def transfer(self) -> Call:
        """The arguments of the collectives inside."""
        return dataclasses.replace(self.call, algorithm="xla" if self.call.algorithm == "xla" else None)


def _product(a: Any, b: Any, contract: tuple, spec: Spec, dtype: Any) -> Any:
    if a.dtype != b.dtype:  # a cotangent of the type preferred_element_type
        with jax.numpy_dtype_promotion("standard"):
            common = jnp.promote_types(a.dtype, b.dtype)
        a, b = a.astype(common), b.astype(common)
    batch = tuple(range(spec.num_batch))
    y = lax.dot_general(a, b, (contract, (batch, batch)), precision=spec.precision, preferred_element_type=dtype)
    return y.astype(dtype)


def rows_product(x: Any, w: Any, spec: Spec, dtype: Any) -> Any:
    """x @ w: (batch, rows, k), (batch, k, f) -> (batch, rows, f)."""
    return _product(x, w, ((x.ndim - 1,), (spec.num_batch,)), spec, dtype)


def columns_product(x: Any, y: Any, spec: Spec, dtype: Any) -> Any:
    """x^T @ y over all rows: (batch, rows, k), (batch, rows, f) -> (batch, k, f)."""
    rows = tuple(range(spec.num_batch, x.ndim - 1))
    return _product(x, y, (rows, rows), spec, dtype)


def _send(x: Any, spec: Spec) -> Any:
    """Sends x to the next rank in the group; returns the array of the one before."""
    call = spec.transfer
    groups = call.groups or (tuple(range(spec.group_size)),)
    pairs = tuple((group[i], group[(i + 1) % len(group)]) for group in groups for i in range(len(group)))
    return permute_p.bind(x, call=dataclasses.replace(call, groups=None), perm=pairs)


def _arrivals(x: Any, spec: Spec) -> Iterator[Any]:
    """The blocks of ranks r, r - 1, r - 2, ...

    A block is forwarded before it is returned, so that the transfer may run beside the product.
    """
    n = spec.group_size
    for step in range(n):
        block, x = x, _send(x, spec) if step + 1 < n else None
        yield block


def _zeros(like: Any, spec: Spec, size: int, columns: int, dtype: Any) -> Any:
    """Zeros of the shape of `like` with other numbers of rows and columns."""
    shape = list(like.shape)
    shape[spec.axis], shape[-1] = size, columns
    return _compat.make_varying(jnp.zeros(shape, dtype), tuple(_compat.varying_axes(like)))


def gather(x: Any, ys: Sequence[Any], *, spec: Spec, num_weights: int, dtypes: Sequence[Any]) -> list:
    """Products with the rows of all ranks.

    Args:
      x: rows of this rank.
      ys: weights, then arrays with the rows of all ranks.
      spec: static arguments.
      num_weights: number of weights in ys.
      dtypes: element types of the products.

    Returns:
      gathered x @ w for each weight; gathered x^T @ y for each other array.
    """
    if spec.call.algorithm in ("unfused", "xla"):
        gathered: Any = all_gather_p.bind(x, call=spec.transfer, axis=spec.axis)
        of = [rows_product] * num_weights + [columns_product] * (len(ys) - num_weights)
        return [f(gathered, y, spec, dtype) for f, y, dtype in zip(of, ys, dtypes, strict=True)]
    axis, n, me = spec.axis, spec.group_size, rank_in_group(spec.call)
    size = x.shape[axis]
    weights, others = list(zip(ys, dtypes, strict=True))[:num_weights], ys[num_weights:]
    rows = [_zeros(x, spec, n * size, w.shape[-1], dtype) for w, dtype in weights]
    sums: list[Any] = [None] * len(others)
    for step, block in enumerate(_arrivals(x, spec)):
        start = (me + (n - step)) % n * size
        for i, (w, dtype) in enumerate(weights):
            product = rows_product(block, w, spec, dtype)
            rows[i] = lax.dynamic_update_slice_in_dim(rows[i], product, start, axis)
        for i, y in enumerate(others):
            part = lax.dynamic_slice_in_dim(y, start, size, axis)
            product = columns_product(block, part, spec, accumulator_type(dtypes[num_weights + i]))
            sums[i] = product if sums[i] is None else sums[i] + product
    return rows + [total.astype(dtype) for total, dtype in zip(sums, dtypes[num_weights:], strict=True)]


def scatter(xs: Sequence[Any], ws: Sequence[Any], *, spec: Spec, dtype: Any) -> Any:
    """This rank's block of the sum over ranks and terms of x @ w.

    Args:
      xs: rows of all ranks, one array per term.
      ws: weights, one per term.
      spec: static arguments.
      dtype: element type of the result, and of the parts that ranks send.
    """
    accumulator = accumulator_type(dtype)

    def part(xs):
        products = [rows_product(x, w, spec, accumulator) for x, w in zip(xs, ws, strict=True)]
        return sum(products[1:], products[0])

    if spec.call.algorithm in ("unfused", "xla"):
        return reduce_scatter_p.bind(part(xs).astype(dtype), call=spec.transfer, axis=spec.axis)
    axis, n, me = spec.axis, spec.group_size, rank_in_group(spec.call)
    block = xs[0].shape[axis] // n

    def part_of(rank):
        return part([lax.dynamic_slice_in_dim(x, rank * block, block, axis) for x in xs])

    # A partial sum of block j goes from rank j + 1 around the ring to rank j.
    total = part_of((me + (n - 1)) % n)
    for step in range(1, n):
        arrived = _send(total.astype(dtype), spec)
        own = part_of((me + (n - 1 - step)) % n)
        total = arrived.astype(own.dtype) + own
    return total.astype(dtype)
