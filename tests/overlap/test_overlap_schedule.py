"""Which programs XLA:CPU runs in order, so that nothing runs beside a transfer: the table of docs/internals/overlap.md.

tests/overlap/test_beside.py has programs in which computations run beside one.
"""

import handshake as shake
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomm

KIB = 1 << 8  # float32 elements
NEW = jax.__version_info__ >= (0, 12)


def exchange(handshake, x, steps=10):
    pending = jaxcomm.ppermute_start(shake.callback(handshake.hold_back, x), "i", [(0, 1), (1, 0)])
    y = shake.work(handshake, x, steps)
    return shake.callback(handshake.receive, pending.done(after=y)), y


def at_top(handshake, x):
    return exchange(handshake, x)


def few_steps(handshake, x):
    return exchange(handshake, x, steps=1)


def in_scan(handshake, x):
    def step(carry, _):
        received, y = exchange(handshake, carry)
        return received + y, None

    return lax.scan(step, x, length=2)[0]


def in_while(handshake, x):
    def step(carry):
        received, y = exchange(handshake, carry[1])
        return carry[0] + 1, received + y

    return lax.while_loop(lambda carry: carry[0] < 2, step, (0, x))[1]


def in_cond(handshake, x):
    return lax.cond(jnp.abs(x).max() >= 0, lambda: exchange(handshake, x), lambda: (x, x))


@pytest.mark.parametrize(
    ("program", "size", "overlaps"),
    [
        (at_top, 64 * KIB, True),
        (at_top, 128, False),  # 512 bytes
        (few_steps, 128 * KIB, False),
        (in_cond, 64 * KIB, True),
        (in_scan, 64 * KIB, not NEW),
        (in_scan, 128 * KIB, True),
        (in_while, 64 * KIB, not NEW),
        (in_while, 128 * KIB, True),
    ],
)
@pytest.mark.full
def test_programs_that_run_in_order(program, size, overlaps, rng, monkeypatch):
    monkeypatch.setattr(shake, "PATIENCE_S", 10 if overlaps else 2)
    x = rng.standard_normal((2, size), np.float32)
    if overlaps:
        shake.run(program, x)
        return
    with pytest.raises(AssertionError, match=r"the transfer (did not end during|ended)"):
        shake.run(program, x)
