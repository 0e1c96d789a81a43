"""A Pending that is used in another way than started once and done once: stated, harmless behaviour, or a clear error.

And late ranks: the error names the start.
"""

import re

import jax
import jax.numpy as jnp
import late
import numpy as np
import pytest
from harness import assert_same, on_ranks, run, value
from jax import lax

import jaxcomm

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def numbers(rng):
    return rng.integers(-9, 9, (8, 16)).astype(np.float32)


def never_done(x):
    """JAX removes a transfer that nothing uses, on all ranks. The next calls match."""

    @jax.jit
    def forgets(x):
        jaxcomm.psum_start(x, "gpu")
        return x + 1

    kept = lax.fori_loop(0, 3, lambda i, y: forgets(y), x)
    return [kept, jaxcomm.psum(x, "gpu")], [x + 3, lax.psum(x, "gpu")]


def never_done_but_returned_from_a_loop(x):
    """The transfer runs, and is complete at the end of the program."""
    _, pending = lax.scan(lambda x, _: (x + 1, jaxcomm.psum_start(x, "gpu")), x, length=3)
    return jax.tree.leaves(pending)[0], lax.psum(jnp.stack([x, x + 1, x + 2]), "gpu")


def done_twice_and_results_changed_in_between(x):
    """Each done gives the result, even if XLA changes one of them in place."""
    pending = jaxcomm.ppermute_start(x, "gpu", RING)
    first = pending.done().at[0].set(7)
    second = pending.done(after=first)
    third = pending.done(after=second).at[1].add(second[0])
    want = lax.ppermute(x, "gpu", RING)
    return [first, second, third], [want.at[0].set(7), want, want.at[1].add(want[0])]


def read_before_done(x):
    """The leaves of a Pending are results and operands; XLA waits for a result that is read."""
    pending = jaxcomm.psum_start(x, "gpu")
    total = lax.psum(x, "gpu")
    return [*jax.tree.leaves(pending), pending.done()], [total, x, total]


def start_and_done_in_different_branches(x):
    """Done in one of two branches; and started in either of two branches."""
    half = lax.axis_index("node") == 0
    pending = jaxcomm.psum_start(x, "gpu")
    first = lax.cond(half, lambda p: p.done(), lambda p: 3 * x, pending)
    pending = lax.cond(half, lambda: jaxcomm.psum_start(x, "gpu"), lambda: jaxcomm.psum_start(2 * x, "gpu"))
    total = lax.psum(x, "gpu")
    return [first, pending.done()], [jnp.where(half, total, 3 * x), jnp.where(half, total, 2 * total)]


USES = (
    never_done, never_done_but_returned_from_a_loop, done_twice_and_results_changed_in_between, read_before_done,
    start_and_done_in_different_branches,
)  # fmt: skip


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_unusual_but_right(mesh, rng, use):
    assert_same(*run(use, mesh, numbers(rng), check_vma=False))


@pytest.mark.parametrize(
    ("other", "message"),
    [(lambda x: x, "Pending"), (lambda x: jaxcomm.pbroadcast_start(x, "gpu", 0), r"(?s)psum_start.*pbroadcast_start")],
)
def test_branches_of_which_one_has_no_pending_or_another_one(mesh, rng, other, message):
    def body(x):
        return lax.cond(x[0] > 0, lambda: jaxcomm.psum_start(x, "gpu"), lambda: other(x)).done()

    with pytest.raises(TypeError, match=message):
        run(body, mesh, numbers(rng), check_vma=False)


def test_done_in_another_program_and_outside_of_shard_map(mesh, rng):
    x = numbers(rng)

    def start(x):
        return jaxcomm.psum_start(x, "gpu"), lax.psum(x, "gpu")

    pending, expected = jax.jit(on_ranks(start, mesh, check_vma=False))(x)
    assert_same(value([pending.done(), jax.jit(lambda p: p.done(after=x))(pending)]), value([expected, expected]))

    def later(pending):
        return pending.done(after=lax.axis_index("gpu"))

    assert_same(value(jax.jit(on_ranks(later, mesh, check_vma=False))(pending)), value(expected))


@pytest.mark.parametrize("where", ["psum_start", r"psum_start\(\.\.\.\)\.done"])
@pytest.mark.parametrize(
    ("wrong", "message"), [("text", "after must be a pytree of arrays, got 'text'"), ("key", "after has element type")]
)
def test_values_to_wait_for_must_be_arrays(mesh, rng, where, wrong, message):
    def body(x):
        after = [x, jax.random.key(0) if wrong == "key" else wrong]
        if where == "psum_start":
            return jaxcomm.psum_start(x, "gpu", after=after).done()
        return jaxcomm.psum_start(x, "gpu").done(after=after)

    with pytest.raises(TypeError, match=f"^{where}: {message}"):
        run(body, mesh, numbers(rng))


def test_late_device():
    done = late.outcome("all_gather_start", JAXCOMM_TIMEOUT_S="1", LATE_S="3")
    error = r"late: error: .*jaxcomm: all_gather_start at late\.py:\d+ \(body\): ranks \[1\] did not arrive within 1 s"
    assert re.search(error, done.stdout), done.stdout + done.stderr
    assert done.stdout.endswith("in time: [[1.0, 5.0], [1.0, 5.0]]\n"), done.stdout + done.stderr
