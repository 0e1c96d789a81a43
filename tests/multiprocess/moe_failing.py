"""Layers of a mixture of experts for failing.py, with a row of 8 elements per rank."""

import dataclasses

import jax
import jax.numpy as jnp

import jaxcomm


def one_shot(x):
    """Twice the block: its row goes to the experts of this rank and of the next one, and comes home."""
    n, own = jax.lax.axis_size("i"), jax.lax.axis_index("i")
    ids = jnp.stack([own, (own + 1) % n])[None].astype(jnp.int32)
    rows, routing = jaxcomm.moe.route_and_dispatch(x, ids, "i", num_experts=n, algorithm="one_shot")
    return jaxcomm.moe.combine(rows, routing)


# A routing is plain data, which a program may change: field and new value, at the last `ranks` ranks, for dispatch or
# combine. dispatch computes its list of rows from slots and experts, and drops wrong ones.
TAMPERED = [
    {"change": change, "ranks": ranks, "combines": combines}
    for change, ranks, combines in [
        (lambda r: {"table": r.table.at[0, 0].add(1)}, 1, False),
        (lambda r: {"table": r.table.at[0, 0].add(1)}, 1, True),
        (lambda r: {"table": r.table.at[0, 0].set(-3)}, 1, False),
        (lambda r: {"table": r.table.at[0].set(r.table[0, ::-1])}, 2, False),  # all ranks of a process agree
        (lambda r: {"table": r.table.at[0, 0].set(-3)}, 2, False),
        (lambda r: {"expert": r.expert + 100}, 1, True),
        (lambda r: {"expert": r.expert - 100}, 1, True),
        (lambda r: {"slot": r.slot + 1000000}, 1, True),
        (lambda r: {"slot": r.slot ^ 1}, 1, True),  # of another rank
    ]
]


def tampered(x, *, change, ranks, combines):
    n, own = jax.lax.axis_size("i"), jax.lax.axis_index("i")
    ids = jnp.array([[0, 1], [2, 0]], jnp.int32)  # all ranks have rows for each expert but the last one
    routing = jaxcomm.moe.route(ids, "i", num_experts=n)
    rows = jaxcomm.moe.dispatch(x.reshape(2, 4), routing)
    fields = {
        field: jnp.where(own >= n - ranks, value, getattr(routing, field)) for field, value in change(routing).items()
    }
    changed = dataclasses.replace(routing, **fields)
    if not combines:
        rows = jaxcomm.moe.dispatch(x.reshape(2, 4), changed)
    return jaxcomm.moe.combine(rows, changed if combines else routing).reshape(1, 8)


def layer(x, *, tokens, choices, experts_per_rank, dtype, capacity, algorithm, combine=None):
    n = jax.lax.axis_size("i")
    ids = jnp.arange(tokens * choices, dtype=jnp.int32).reshape(tokens, choices) % n
    rows, routing = jaxcomm.moe.route_and_dispatch(
        jnp.ones((tokens, 4), dtype), ids, "i", num_experts=experts_per_rank * n, capacity=capacity, algorithm=algorithm
    )
    return x + jaxcomm.moe.combine(rows, routing, algorithm=combine).astype(x.dtype).sum()
