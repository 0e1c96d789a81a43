"""Tables of options in which any two values of two options meet, with few cases, and what their tests share."""

import contextlib
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

DRAWN = 3000


def cases(options, allowed, seed=0):
    """Cases, {option: value}. Every pair of values of two options that an allowed case has is in one of them.

    Args:
      options: {option: values}.
      allowed: case -> whether the functions under test take it.
      seed: other seeds give other cases.
    """
    rng = random.Random(seed)
    drawn = ({option: rng.choice(values) for option, values in options.items()} for _ in range(DRAWN))
    numbers: dict = {}  # of the pairs

    def pairs(case):
        """The pairs of a case, as the bits of a number."""
        found = itertools.combinations([(option, str(value)) for option, value in case.items()], 2)
        return sum(1 << numbers.setdefault(pair, len(numbers)) for pair in found)

    pool = [(pairs(case), case) for case in drawn if allowed(case)]
    chosen, met = [], 0
    while met != (1 << len(numbers)) - 1:
        new, case = max(pool, key=lambda each: (each[0] & ~met).bit_count())
        chosen.append(case)
        met |= new
    return chosen


def parametrize(metafunc, tables, allowed):
    """Parametrizes a test with `case` and its `number`; the full size has more cases."""
    seeds = 1 if metafunc.config.getoption("--size") == "default" else 3
    rows = []
    for options, seed in itertools.product(tables, range(seeds)):
        marks = [pytest.mark.full] if seed else []
        for i, case in enumerate(cases(options, allowed, seed)):
            rows.append(pytest.param(case, i, id=f"{next(iter(case.values()))}-{seed}-{i}", marks=marks))
    metafunc.parametrize(("case", "number"), rows)


WITHIN = {"call": [1], "jit": [2], "scan": [1, 2], "cond": [2]}


def within(kind, f, x, axes):
    """Results of a linear function, stacked: one for each factor of WITHIN.

    Args:
      kind: key of WITHIN.
      f: function of an array; its results are a pytree.
      x: array.
      axes: manual axes of the mesh.
    """
    if kind == "scan":
        return lax.scan(lambda c, s: (c + s, f(x * s)), jnp.zeros((), x.dtype), jnp.array([1, 2], x.dtype))[1]
    if kind == "jit":
        y = jax.checkpoint(jax.jit(lambda x: f(2 * x)))(x)
    elif kind == "cond":  # all ranks take the same branch
        everywhere = lax.psum(jnp.sum(jnp.abs(x)).astype(np.float32), axes)
        y = lax.cond(everywhere >= 0, lambda x: f(2 * x), f, x)
    else:
        y = f(x)
    return jax.tree.map(lambda leaf: leaf[None], y)


def elements(rng, shape, dtype):
    """Random elements of a type, and the same in float64 or complex128."""
    if dtype == "int8":
        x = rng.integers(-3, 4, shape)
    else:
        x = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype == "complex64" else 0)
    x = x.astype(jnp.dtype(dtype))
    return x, x.astype(np.complex128 if dtype == "complex64" else np.float64)


def environment(mesh, dtype):
    """Context for programs on a mesh with operands of this type."""
    stack = contextlib.ExitStack()
    stack.enter_context(jax.enable_x64(dtype == "float64"))
    if jax.sharding.AxisType.Explicit in mesh.axis_types:
        stack.enter_context(jax.set_mesh(mesh))
    return stack


def assert_close(got, want, bound, name):
    """Compares with float64. `bound` is that of the error of each element."""
    assert got.shape == want.shape, name
    error = np.abs(got.astype(want.dtype) - want)
    assert (error <= bound).all(), f"{name}: error {error.max()}, allowed {np.max(bound)}"
