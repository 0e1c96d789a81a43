"""Computations run beside a transfer: at the top level, in loops and in branches."""

import handshake as shake
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcomm

SIZE = 1 << 15  # XLA:CPU 0.12 runs the body of a loop over arrays of 64 KiB or less in order


def exchange(handshake, x):
    """Rank 1 is late. No computation uses the operand in the end, so XLA would reuse its memory."""
    operand = shake.callback(handshake.hold_back, jnp.sin(x))
    pending = jaxcomm.ppermute_start(operand, "i", [(0, 1), (1, 0)])
    y = shake.work(handshake, operand / 2)
    received = pending.done(after=y)
    return shake.callback(handshake.receive, received), y


def at_top(handshake, x):
    return exchange(handshake, x)


def started_after(handshake, x):
    """No computation uses the array that the transfer waits for in the end."""
    before = shake.callback(lambda rank, x: x, x)
    operand = shake.callback(handshake.hold_back, jnp.sin(x))
    pending = jaxcomm.ppermute_start(operand, "i", [(0, 1), (1, 0)], after=before)
    y = shake.work(handshake, before / 2)
    return shake.callback(handshake.receive, pending.done(after=y)), y


def in_scan(handshake, x):
    def step(carry, _):
        received, y = exchange(handshake, carry)
        return received + y, received

    _, received = lax.scan(step, x, length=3)
    return received, x


def in_cond(handshake, x):
    return lax.cond(jnp.abs(x).max() >= 0, lambda: exchange(handshake, x), lambda: (x, x))


@pytest.mark.parametrize("program", [at_top, started_after, in_scan, in_cond])
def test_computation_runs_beside_the_transfer(program, rng):
    x = rng.standard_normal((2, SIZE), np.float32)
    received, _ = shake.run(program, x)
    expected = np.sin(x[::-1])
    if program is in_scan:
        own, expected = x, []
        for _ in range(3):
            y = np.sin(own) / 2
            for _ in range(10):
                y = np.sin(y)
            expected.append(np.sin(own[::-1]))
            own = expected[-1] + y
        expected = np.stack(expected, 1)
    np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)
