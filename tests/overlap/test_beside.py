"""Computations run beside a transfer: at the top level, in loops, in branches, and between processes.

The programs end only then. The computation of rank 0 tells rank 1 that it has begun. Only then does rank 1 start its
part of the transfer. The computation goes on when rank 1 has the result.
"""

import functools
import os
import pathlib
import subprocess
import sys
import threading

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import jaxcomm

PATIENCE_S = 60
SIZE = 1 << 15  # XLA:CPU 0.12 runs the body of a loop over arrays of 64 KiB or less in order


class Handshake:
    """Events of one execution. Callbacks wait for them with a deadline."""

    def __init__(self):
        self.began, self.arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.missed = []

    def _take(self, event, name):
        if not event.acquire(timeout=PATIENCE_S):
            self.missed.append(name)

    def hold_back(self, rank, x):
        """Rank 1 waits until the computation of rank 0 has begun."""
        if rank == 1:
            self._take(self.began, "the computation did not begin before the transfer ended")
        return x

    def compute(self, rank, x):
        """Rank 0 waits until rank 1 has received."""
        if rank == 0:
            self.began.release()
            self._take(self.arrived, "the transfer did not end during the computation")
        return np.sin(x)

    def receive(self, rank, x):
        if rank == 1:
            self.arrived.release()
        return x


def callback(f, x):
    return jax.pure_callback(f, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.axis_index("i"), x)


def work(handshake, x, steps=10):
    """Computations that depend on each other. Each result has the size of x. The one in the middle is the handshake."""
    for step in range(steps):
        f = handshake.compute if step == steps // 2 else lambda rank, x: np.sin(x)
        x = callback(f, x)
    return x


def exchange(handshake, x):
    """Rank 1 is late. No computation uses the operand in the end, so XLA would reuse its memory."""
    operand = callback(handshake.hold_back, jnp.sin(x))
    pending = jaxcomm.ppermute_start(operand, "i", [(0, 1), (1, 0)])
    y = work(handshake, operand / 2)
    received = pending.done(after=y)
    return callback(handshake.receive, received), y


def started_after(handshake, x):
    """No computation uses the array that the transfer waits for in the end."""
    before = callback(lambda rank, x: x, x)
    operand = callback(handshake.hold_back, jnp.sin(x))
    pending = jaxcomm.ppermute_start(operand, "i", [(0, 1), (1, 0)], after=before)
    y = work(handshake, before / 2)
    return callback(handshake.receive, pending.done(after=y)), y


def in_scan(handshake, x):
    def step(carry, _):
        received, y = exchange(handshake, carry)
        return received + y, received

    _, received = lax.scan(step, x, length=3)
    return received, x


def in_cond(handshake, x):
    return lax.cond(jnp.abs(x).max() >= 0, lambda: exchange(handshake, x), lambda: (x, x))


@pytest.mark.parametrize("program", [exchange, started_after, in_scan, in_cond])
def test_computation_runs_beside_the_transfer(program, rng):
    x = rng.standard_normal((2, SIZE), np.float32)
    handshake = Handshake()
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    received, _ = harness.run(functools.partial(program, handshake), mesh, x, check_vma=False)
    assert not handshake.missed, handshake.missed
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


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_computation_runs_beside_the_transfer_between_processes(tmp_path, nodes):
    """Of one node, and of two nodes."""
    folder = pathlib.Path(__file__).parent
    launcher = ("-m", "jaxcomm.run", "--processes", "2", "--devices", "1", "--nodes", str(nodes))
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    done = subprocess.run(
        [sys.executable, *launcher, str(folder / "between_processes.py"), str(tmp_path)],
        env=environment | {"JAXCOMM_CALIBRATION": "", "PYTHONPATH": str(folder.parent)},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] done", "[1] done"], done.stdout + done.stderr
