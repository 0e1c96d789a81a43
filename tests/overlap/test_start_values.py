"""start and done: trees, constants, groups of one rank, derivatives, loops, and the calls in the program."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import LAX, assert_same, on_ranks, run
from jax import lax

import jaxcomm

# Keywords on a block of shape BLOCK.
ARGUMENTS = {
    "psum": {},
    "all_gather": {"axis": 1},
    "psum_scatter": {"scatter_dimension": 1, "tiled": True},
    "all_to_all": {"split_axis": 0, "concat_axis": 1, "tiled": True},
}
BLOCK = (8, 16)


def _started(op, x, axes, *args, start_after=(), done_after=(), **kwargs):
    pending = getattr(jaxcomm, f"{op}_start")(x, axes, *args, after=start_after, **kwargs)
    return pending.done(after=done_after)


STARTED = types.SimpleNamespace(**{op: functools.partial(_started, op) for op in (*ARGUMENTS, "ppermute")})


def call(library, op, x, axes="gpu", **more):
    return getattr(library, op)(x, axes, **ARGUMENTS[op], **more)


CALL = re.compile(r"stablehlo\.custom_call @jaxcomm_(\w+)\((.*?)\)(.*)")


def calls(f, mesh, *xs, platform="cpu"):
    """Custom calls of the lowered program: name, number of operands, whether asynchronous."""
    text = jax.jit(on_ranks(f, mesh)).trace(*xs).lower(lowering_platforms=(platform,)).as_text()
    return [(name, len(xs.split(",")), "asynchronous = 1" in rest) for name, xs, rest in CALL.findall(text)]


def test_trees_empty_arrays_constants_and_groups_of_one(mesh, rng):
    x = rng.integers(-9, 9, (8, *BLOCK)).astype(np.int32)

    def body(library, x):
        tree = {"a": x, "b": (x[:0], jnp.sin(1.0))}
        more = tree | {"c": x.astype(jnp.int4)}
        return library.psum(tree, "gpu"), library.psum(2, "gpu"), library.ppermute(more, "node", [(0, 1)])

    def alone(library, x):
        return [call(library, op, x, "one") for op in ARGUMENTS]

    assert_same(*run(lambda x: [body(library, x) for library in (STARTED, LAX)], mesh, x))
    one = jax.make_mesh((1, 8), ("one", "gpu"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    assert_same(*run(lambda x: [alone(library, x) for library in (STARTED, LAX)], one, x))
    assert calls(lambda x: alone(STARTED, x), one, x) == []
    derivative = jax.grad(lambda x: jnp.sum(call(STARTED, "all_gather", x, "one") ** 2))
    assert calls(derivative, one, x.astype(np.float32)) == []


def waiting(x):
    pending = jaxcomm.all_gather_start(x, "gpu", after=(x + 1, x + 2))
    return pending.done(after=x + 3)


def gradient(x):
    """The transposed transfer is asynchronous too. Nothing waits for the values of the forward pass: they would be
    saved until then."""

    def loss(x):
        return jnp.sum(call(STARTED, "all_gather", x, start_after=jnp.sin(x), done_after=[jnp.cos(x)]) ** 2)

    return jax.grad(loss)(x)


def tangent(x):
    """The operand of a tangent is kept until its done, as that of the call: XLA:CPU must not reuse its memory. It does
    not wait for the values of the call."""
    return jax.jvp(lambda x: call(STARTED, "all_gather", x, start_after=jnp.sin(x)), (x,), (x + 1,))


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        (lambda x: jaxcomm.all_gather(x, "gpu"), [("all_gather", 2, False)]),
        (waiting, [("all_gather", 4, True), ("done", 5, False)]),
        (tangent, [("all_gather", 2, True), ("all_gather", 3, True), ("done", 2, False), ("done", 3, False)]),
        (gradient, [
            ("all_gather", 3, True), ("done", 2, False), ("done", 4, False), ("reduce_scatter", 2, True),
        ]),
    ],
)  # fmt: skip
def test_program_has_the_calls(mesh, program, wanted):
    """An asynchronous call with the values to wait for, and a done with result, operand and values."""
    assert sorted(calls(program, mesh, np.zeros((8, *BLOCK), np.float32))) == wanted


def test_done_copies_nothing(mesh):
    compiled = jax.jit(on_ranks(waiting, mesh)).lower(np.zeros((8, *BLOCK), np.float32)).compile().as_text()
    (done,) = re.findall(r".*jaxcomm_done.*", compiled)
    assert "output_to_operand_aliasing={{}: (0, {})}" in done
    assert not re.search(r"= \S+ copy\(", compiled)


@pytest.mark.parametrize(("platform", "algorithm"), [("tpu", None), ("cuda", "xla")])
def test_xla_runs_its_own_collective(mesh, platform, algorithm):
    """After a barrier with the values to wait for. There is no call of jaxcomm's, which may not be installed there."""
    x = np.zeros((8, *BLOCK), np.float32)

    def body(x):
        return jaxcomm.psum_start(x, "gpu", after=jnp.sin(x), algorithm=algorithm).done(after=x + 1)

    text = jax.jit(on_ranks(body, mesh)).trace(x).lower(lowering_platforms=(platform,)).as_text()
    (barrier,) = re.findall(r"optimization_barrier (\S+), (\S+) :", text)
    assert re.search(rf"{barrier[1]} = stablehlo.sine", text)
    result = re.search(r"(%\S+?):2 = stablehlo.optimization_barrier", text)[1]
    assert re.search(rf'"stablehlo.all_reduce"\({result}#0', text), text
    assert "jaxcomm_" not in text.replace("jit_jaxcomm", "")
    assert calls(lambda x: lax.psum(x, "gpu"), mesh, x) == []


def test_no_derivative_through_integers_and_values_to_wait_for(mesh, rng):
    x = rng.standard_normal((8, *BLOCK), np.float32)

    def body(x):
        def f(x, y):
            whole = jaxcomm.psum_start(x.astype(jnp.int32), "gpu", after=x).done(after=x)
            return jnp.sum(jaxcomm.psum_start(x, "gpu", after=y).done(after=(y, whole)))

        return jax.grad(f, (0, 1))(x, x)

    of_x, of_y = run(body, mesh, x, check_vma=False)
    np.testing.assert_array_equal(of_x, np.full_like(x, 4))  # psum is its own transpose
    np.testing.assert_array_equal(of_y, np.zeros_like(x))


def test_pending_in_the_carry_of_a_loop(mesh, rng):
    """A gather of the next layer's weights is started in one iteration and used in the next."""
    weights = rng.standard_normal((8, 5, 2, 4)).astype(np.float32)  # layers; a row of each for each pair of columns
    x = rng.standard_normal((8, 8)).astype(np.float32)

    def body(weights, x):
        def step(carry, following):
            x, pending = carry
            coming = jaxcomm.all_gather_start(following, "gpu", tiled=True, after=x)
            return (jnp.tanh(pending.done(after=x) @ x[:4]).repeat(1), coming), x

        first = jaxcomm.all_gather_start(weights[0], "gpu", tiled=True)
        (x, last), _ = lax.scan(step, (x, first), weights[1:])
        return x, last.done()

    def expected(weights, x):
        whole = lax.all_gather(weights, "gpu", axis=1, tiled=True)
        for layer in range(4):
            x = jnp.tanh(whole[layer] @ x[:4])
        return x, whole[-1]

    assert_same(*run(lambda *xs: [body(*xs), expected(*xs)], mesh, weights, x, check_vma=False), rtol=1e-5)
