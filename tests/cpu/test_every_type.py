"""Sums, maxima and minima of every element type, against NumPy. test_reduce.cc has the patterns of small floats."""

import jax
import jax.numpy as jnp
import numpy as np
from harness import OURS, assert_same, run

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
SMALL = [f"float8_{name}" for name in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")]
FLOATS = [*SMALL, "bfloat16", "float16", "float32", "float64"]


def test_sum_maximum_and_minimum_of_every_type(line, rng):
    """Integers from -2 to 2, whose sums all types hold; unsigned types take them modulo 2^bits, as large numbers."""
    numbers = rng.integers(-2, 3, (8, 40))
    numbers[:, np.abs(np.cumsum(numbers, 0)).max(0) > 4] = 1
    xs = {name: numbers.astype(jnp.dtype(name)) for name in [*INTEGERS, *FLOATS]}
    xs["bool"] = numbers > 0
    xs |= {name: (numbers * (1 + 10j)).astype(name) for name in ("complex64", "complex128")}
    # Every pattern of 8 bits, and another one: formats differ in their ranges, zeros, NaN and infinities.
    patterns = np.concatenate([np.arange(256), 7 * np.arange(256) % 256]).reshape(2, 256).astype(np.uint8)
    whole = {name: np.concatenate([patterns.view(name), np.zeros((6, 256), name)]) for name in SMALL}
    calls = [("psum", name) for name in xs if name != "bool"]
    calls += [(op, name) for op in ("pmax", "pmin") for name in xs if "complex" not in name]

    def body(xs, whole):
        return [getattr(OURS, op)(xs[name], "gpu") for op, name in calls], {
            n: OURS.psum(x, "gpu") for n, x in whole.items()
        }

    with jax.enable_x64(True):
        found, sums = run(body, line, xs, whole)
    for (op, name), got in zip(calls, found, strict=True):
        x = xs[name]
        wide = x.astype(np.float64) if name in FLOATS else x
        want = {"psum": np.sum, "pmax": np.max, "pmin": np.min}[op](wide, 0).astype(x.dtype)
        assert_same({(op, name): got}, {(op, name): np.stack([want] * 8)}, bits=True)
    for name, x in whole.items():
        want = x.astype(np.float32).sum(0).astype(name).astype(np.float32)
        assert_same({name: sums[name].astype(np.float32)}, {name: np.stack([want] * 8)})
