"""The programs of the self-test: functions of a library, an operand of one rank and the names of two axes.

`lib` is jaxcomm, or `Lax` for the expected result.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jaxcomm
from jaxcomm._selftest_record import GRAPHS, PROGRAMS, SLICES, STARTS

BETWEEN_NODES = "hierarchical"  # algorithm of dispatch and combine
STAGING = "staging"  # of plan.FEATURES
STAGED_BYTES = 2 << 20  # an operand that does not fit into the ring of one thread block (ffi/plan/staging.h)


class Lax:
    """jax.lax, with the operations that it lacks on some platforms."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lax, name)

    @staticmethod
    def pbroadcast(x: Any, axis_name: Any, source: int) -> Any:
        return lax.all_gather(x, axis_name)[source]


def _in_loop(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    """Several collectives per step of a loop, one of them XLA's own."""

    def step(x: Any, _: Any) -> tuple[Any, None]:
        y = lib.psum_scatter(x, axes, tiled=True) - lib.pmax(x[:8], axes)[0]
        return lib.all_gather(y, axes, tiled=True) + lax.psum(x[0], axes) % 7, None

    return lax.scan(step, x % 3, length=3)[0] % 251


def _gradient(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    return jax.grad(lambda x: jnp.sum(lib.all_to_all(lib.psum(x, axes[0]), axes, 0, 0, tiled=True) * x))(x)


def _in_graph(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    """Several collectives without control flow, which would divide a CUDA graph."""
    y = lib.all_to_all(lib.psum(x, axes[1]), axes, 0, 0, tiled=True)
    return lib.all_gather(lib.psum_scatter(y, axes[0], tiled=True), axes[0], tiled=True) + lib.pmax(x, axes)


def ragged(lib: Any, x: Any, axes: tuple[str, str], algorithm: str | None = None) -> Any:
    """Slices of two sizes. jax.lax sends the largest size, because XLA lacks ragged_all_to_all on CPUs."""
    n = lax.axis_size(axes)
    rank, peers, rows = lax.axis_index(axes), jnp.arange(n), x.shape[0] // n
    sizes = rows - (rank + peers) % 2  # of both directions
    if lib is not jaxcomm:
        y = lax.all_to_all(x, axes, 0, 0, tiled=True)
        return jnp.where(jnp.arange(x.shape[0]) % rows < jnp.repeat(sizes, rows), y, 0)
    places = jnp.full(n, rank * rows)
    return jaxcomm.ragged_all_to_all(
        x, jnp.zeros_like(x), peers * rows, sizes, places, sizes, axis_name=axes, algorithm=algorithm
    )


def _ragged_to_fewer(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    """One row of every slice, to an output of fewer rows than the operand: GPUs then put instead of reading."""
    n = lax.axis_size(axes)
    rank, peers, rows = lax.axis_index(axes), jnp.arange(n), x.shape[0] // n
    if lib is not jaxcomm:
        return lax.all_to_all(x[::rows], axes, 0, 0, tiled=True)
    ones = jnp.ones_like(peers)
    return jaxcomm.ragged_all_to_all(
        x, jnp.zeros(n, x.dtype), peers * rows, ones, jnp.full(n, rank), ones, axis_name=axes
    )


def _start(lib: Any, name: str, x: Any, *arguments: Any, **options: Any) -> Callable[..., Any]:
    """Starts a collective. The function that it returns ends it. jax.lax has no started collectives."""
    if lib is jaxcomm:
        done: Callable[..., Any] = getattr(jaxcomm, f"{name}_start")(x, *arguments, **options).done
        return done
    y = getattr(lib, name)(x, *arguments, **options)
    return lambda after: y


def _starts(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    """All started collectives, and a synchronous one beside them."""
    size = lax.axis_size(axes[0])
    started = [
        _start(lib, "psum", x, axes),
        _start(lib, "all_gather", x, axes, tiled=True),
        _start(lib, "psum_scatter", x, axes, tiled=True),
        _start(lib, "all_to_all", x, axes, 0, 0, tiled=True),
        _start(lib, "ppermute", x, axes[0], [(rank, (rank + 1) % size) for rank in range(size)]),
        _start(lib, "pbroadcast", x, axes[0], 0),
    ]
    y = lib.pmax(x, axes)
    return jnp.concatenate([y, *(done(after=y) for done in started)])


def _starts_in_loop(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    def step(x: Any, _: Any) -> tuple[Any, None]:
        done = _start(lib, "psum", x, axes)
        y = lib.all_gather(x[: x.shape[0] // lax.axis_size(axes)] * 2, axes, tiled=True)
        return (done(after=y) + y) % 251, None

    return lax.scan(step, x, length=3)[0]


# Collectives in programs: name -> (feature, (lib, x, names of two axes) -> y).
ALL_PROGRAMS: dict[str, tuple[str, Callable[[Any, Any, tuple[str, str]], Any]]] = {
    "two axes": (PROGRAMS, lambda lib, x, axes: lib.all_to_all(lib.psum(x, axes[1]), axes, 0, 0, tiled=True)),
    "one axis": (PROGRAMS, lambda lib, x, axes: lib.all_gather(lib.pmin(x, axes[0]), axes[1]).sum(0)),
    "loop": (PROGRAMS, _in_loop),
    "gradient": (PROGRAMS, _gradient),
    "in CUDA graphs": (GRAPHS, _in_graph),
    "ragged_all_to_all": (SLICES, ragged),
    "ragged to fewer": (SLICES, _ragged_to_fewer),
    "start and done": (STARTS, _starts),
    "starts in loop": (STARTS, _starts_in_loop),
}


def by_feature(lib: Any, x: Any, axes: tuple[str, str], feature: str) -> Any:
    """Collectives that kernels run in the same way: one of plan.FEATURES."""
    algorithm = feature if feature in jaxcomm.algorithms("psum") else "direct"
    options: dict[str, Any] = {"algorithm": algorithm} if lib is jaxcomm else {}
    if feature == STAGING and options:
        options["max_sms"] = 1
    found = [lib.psum(x, axes, **options)]
    for name, arguments in (("all_gather", ()), ("psum_scatter", ()), ("all_to_all", (0, 0))):
        if algorithm in jaxcomm.algorithms(name):
            found.append(getattr(lib, name)(x, axes, *arguments, tiled=True, **options))
    return jnp.concatenate(found)


CHOICES = 3  # experts of a token


def experts(
    lib: Any, x: Any, axes: tuple[str, str], width: int = 8, reduce: str = "node", algorithm: str | None = None
) -> Any:
    """A layer of experts and its gradient. The experts of rank r multiply rows by r + 1.

    In bfloat16, by one of three factors: all results are whole numbers below 256.
    """
    n, rank, choices = lax.axis_size(axes), lax.axis_index(axes), CHOICES
    x = x.reshape(-1, 8)
    small = x.dtype == jnp.bfloat16
    factors = 3 if small else n
    tokens = jnp.tile(x % 5 if small else x, (1, width // 8))
    places = jnp.arange(len(tokens))[:, None] * 5 + jnp.arange(choices) * 3 + rank  # experts, before the remainder
    weights = (places % 4).astype(x.dtype)
    if lib is not jaxcomm:
        scales = weights * (places % (2 * n) // 2 % factors + 1).astype(x.dtype)
        return 3 * tokens * scales.sum(1, keepdims=True)
    capacity = 2 * choices * len(tokens)  # each expert gets at most one row of a choice from the n ranks

    def layer(tokens: Any) -> Any:
        routing = jaxcomm.moe.route(
            places % (2 * n), axes, num_experts=2 * n, capacity=capacity, on_overflow="drop", reduce=reduce
        )
        rows = jaxcomm.moe.dispatch(tokens, routing, algorithm=algorithm)
        rows = rows * (rank % factors + 1).astype(x.dtype)
        return jaxcomm.moe.combine(rows, routing, weights, algorithm=algorithm)

    return layer(tokens) + jax.grad(lambda tokens: jnp.sum(layer(tokens) * tokens))(tokens)


def sum_by_node(lib: Any, x: Any, axes: tuple[str, str]) -> Any:
    """256 + 1 + 1 in bfloat16; the last row comes from the last rank, the others from the first one.

    258 in one node. Between nodes, the sum of the first node is rounded to 256, and so is 256 + 1.
    """
    n = lax.axis_size(axes)
    ids = jnp.tile(jnp.array([0, 1, 2 * n - 1]), (x.size // 8, 1))
    routing = jaxcomm.moe.route(ids, axes, num_experts=2 * n, on_overflow="drop")
    rows = jaxcomm.moe.dispatch(jnp.ones_like(x).reshape(-1, 8), routing, algorithm=BETWEEN_NODES)
    weights = jnp.tile(jnp.array([256, 1, 1], x.dtype), (len(ids), 1))
    return jaxcomm.moe.combine(rows, routing, weights, algorithm=BETWEEN_NODES)


def one_exchange(lib: Any, x: Any, axes: tuple[str, str], two_calls: bool = False) -> Any:
    """The tokens of a rank go to three experts each and come back. `two_calls`: by route and XLA's dispatch."""
    n, rank, choices = lax.axis_size(axes), lax.axis_index(axes), CHOICES
    tokens = x.reshape(-1, 8)
    if lib is not jaxcomm:
        return choices * tokens
    ids = (jnp.arange(len(tokens))[:, None] * 5 + jnp.arange(choices) * 3 + rank) % (2 * n)
    options: dict[str, Any] = {"num_experts": 2 * n, "capacity": 2 * choices * len(tokens)}
    if two_calls:
        routing = jaxcomm.moe.route(ids, axes, on_overflow="drop", **options)
        rows = jaxcomm.moe.dispatch(tokens, routing, algorithm="xla")
    else:
        rows, routing = jaxcomm.moe.route_and_dispatch(tokens, ids, axes, algorithm="one_shot", **options)
    return jaxcomm.moe.combine(rows, routing, jnp.ones(ids.shape, x.dtype), algorithm="xla" if two_calls else None)
