"""Part of the contract: the op under vmap, grad, jvp, checkpoint, loops and conditions."""

import functools
import inspect

import collective
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective import BLOCK, VMA
from harness import LAX, OURS, assert_same, compare, lax_or_none, on_ranks, run, value
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def loss(f):
    return lambda x: jnp.sum(jnp.sin(f(jnp.cos(x))))


def stack(x, axis):
    return jnp.stack([x, 2 * x, 3 * x], axis)


def carry(f):
    """A step of a loop: the next carry has the type of x and depends on all of f(x)."""

    def step(x, scale):
        y = f(x * scale)
        return jnp.sin(x + 0.1 * jnp.mean(y)), y

    return step


SCALES = np.array([0.5, 1, 2], np.float32)


def while_loop(f, x):
    step = carry(f)
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, step(s[1], 0.5 + s[0])[0]), (0, x))[1]


def cond(f, x, axes=("node", "gpu")):
    everywhere = lax.psum(jnp.sum(x), axes)  # equal on all ranks, as conditions must be
    return [lax.cond(pick, lambda x: f(2 * x), lambda x: f(x + 1), x) for pick in (everywhere > 1e9, everywhere < 1e9)]


def nested_jit(f, x):
    g = jax.jit(f)
    return g(x), g(2 * x), jax.jit(lambda x: g(3 * x))(x)


# Each has two arguments: the op as a function of one array, and the array.
DERIVATIVES = {
    "grad": lambda f, x: jax.value_and_grad(loss(f))(x),
    "jvp": lambda f, x: jax.jvp(lambda x: f(jnp.sin(x)), (x,), (jnp.cos(x),)),
    "grad of checkpoint": lambda f, x: jax.grad(loss(jax.checkpoint(lambda x: jnp.sin(f(jnp.sin(x))))))(x),
    "grad of vmap": lambda f, x: jax.grad(loss(jax.vmap(f)))(stack(x, 0)),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(loss(f)), 2, 1)(stack(x, 2)),
    "grad of scan": lambda f, x: jax.grad(loss(lambda x: lax.scan(jax.checkpoint(carry(f)), x, SCALES)[0]))(x),
}
MORE_DERIVATIVES = {
    "linearize": lambda f, x: (lambda y, df: (y, df(jnp.cos(x)), df(2 * x)))(*jax.linearize(f, x)),
    "vjp": lambda f, x: (lambda y, pull: (y, pull(jnp.cos(y))))(*jax.vjp(f, x)),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(loss(f)), (x,), (jnp.cos(x),)),
}
TRANSFORMATIONS = {
    "jit": lambda f, x: f(x),
    "vmap 0": lambda f, x: jax.vmap(f)(stack(x, 0)),
    "vmap 1 to -1": lambda f, x: jax.vmap(f, 1, -1)(stack(x, 1)),
    "vmap 2 to 1": lambda f, x: jax.vmap(f, 2, 1)(stack(x, 2)),
    "vmap of vmap": lambda f, x: jax.vmap(jax.vmap(f, 2), 0)(stack(stack(x, 2), 0)),
    "vmap of a constant": lambda f, x: jax.vmap(lambda s: f(x) * s)(jnp.asarray(SCALES)),
    "scan": lambda f, x: lax.scan(carry(f), x, SCALES),
    "while": while_loop,
    "cond": cond,
    "nested jit": nested_jit,
}
MORE_TRANSFORMATIONS = {
    "checkpoint": lambda f, x: jax.checkpoint(lambda x: jnp.sin(f(jnp.sin(x))))(x),
    "scan unrolled": lambda f, x: lax.scan(carry(f), x, SCALES, unroll=True),
}
TRANSFORMATION_TABLES = [
    pytest.param(TRANSFORMATIONS, id="each rule"),
    pytest.param(MORE_TRANSFORMATIONS, id="more", marks=pytest.mark.full),
]
DERIVATIVE_TABLES = [
    pytest.param(DERIVATIVES, id="each rule"),
    pytest.param(MORE_DERIVATIVES, id="more", marks=pytest.mark.full),
]


SETTINGS = [("gpu", True), (("node", "gpu"), False)]
NAMED = ["i", ("i", "gpu"), ("gpu", "i"), ("node", "i", "gpu")]
# Axes of the gradient tests.
DIRECTIONS = ["gpu", ("node", "gpu"), ("gpu", "node")]


class Transformations(collective.Collective):
    def applied(self, library, x, table, axes, check_vma):
        call = functools.partial(self.call, library, axes=axes, **({} if check_vma else self.variant))
        return {name: transformation(call, x) for name, transformation in table.items()}

    @pytest.mark.parametrize(("axes", "check_vma"), SETTINGS, ids=["vma", "no_vma"])
    @pytest.mark.parametrize("table", TRANSFORMATION_TABLES)
    def test_transformations(self, mesh, rng, table, axes, check_vma):
        x = rng.standard_normal((8, *BLOCK), np.float32)
        program = functools.partial(self.applied, table=table, axes=axes, check_vma=check_vma)
        compare(program, mesh, x, rtol=1e-5, check_vma=check_vma)

    @pytest.mark.parametrize(("axes", "check_vma"), SETTINGS, ids=["vma", "no_vma"])
    @pytest.mark.parametrize("table", DERIVATIVE_TABLES)
    def test_derivatives(self, mesh, rng, table, axes, check_vma):
        x = rng.standard_normal((8, *BLOCK), np.float32)
        if self.differentiable:
            program = functools.partial(self.applied, table=table, axes=axes, check_vma=check_vma)
            compare(program, mesh, x, rtol=1e-4, check_vma=check_vma)
            return
        for name, derivative in table.items():
            program = functools.partial(self.applied, OURS, table={name: derivative}, axes=axes, check_vma=check_vma)
            with pytest.raises(NotImplementedError, match=f"{self.op} at collective.py:.* has no derivative"):
                jax.eval_shape(on_ranks(program, mesh, check_vma=check_vma), x)

    @VMA
    def test_gradient_is_the_transpose(self, mesh, rng, check_vma):
        """All ops are linear: <f(x), w> = <x, gradient of <f, w>>, where f is the oracle. Integers, so exact.

        jax.lax has no axis_index_groups under check_vma=True, so it can't be the reference there.
        """
        if not self.differentiable:
            return
        cases = [(axes, None) for axes in DIRECTIONS]
        if "axis_index_groups" in inspect.signature(getattr(OURS, self.op)).parameters:
            cases += [("gpu", [[3, 0], [1, 2]]), (("gpu", "node"), [[6, 1, 0, 3], [7, 4, 2, 5]])]
        xs = [self.integers(rng) for _ in range(3)]
        wants = [[self.oracle(x, mesh.shape, *case) for x in xs] for case in cases]
        ws = [rng.integers(-8, 8, want[0].shape).astype(np.float32) for want in wants]

        def gradients(x, ws):
            rows = []
            for (axes, groups), w in zip(cases, ws, strict=True):
                f = on_ranks(functools.partial(self.call, OURS, axes=axes, groups=groups), mesh, check_vma=check_vma)
                rows.append(jax.grad(lambda x, f=f, w=w: jnp.sum(f(x) * w))(x))
            return rows

        for want, w, gradient in zip(wants, ws, value(jax.jit(gradients)(xs[0], ws)), strict=True):
            for x, y in zip(xs, want, strict=True):
                assert np.vdot(y.astype(np.float64), w) == np.vdot(x.astype(np.float64), gradient)

    @VMA
    def test_grad_of_shard_map(self, mesh, rng, check_vma):
        if not self.differentiable:
            return
        x = rng.standard_normal((8, *BLOCK), np.float32)

        def gradient(library, x):
            f = on_ranks(functools.partial(self.call, library, axes=("node", "gpu")), mesh, check_vma=check_vma)
            return jax.grad(loss(f))(x)

        ours, lax = value(jax.jit(lambda x: (gradient(OURS, x), gradient(LAX, x)))(x))
        assert_same(ours, lax, rtol=1e-4)

    @pytest.mark.parametrize(("manual", "spmd"), [({"gpu"}, None), ({"node", "gpu"}, "node")], ids=["partial", "spmd"])
    def test_vmap_of_shard_map(self, mesh, rng, manual, spmd):
        x = rng.standard_normal((4, 2, *BLOCK), np.float32)
        batched = jax.device_put(x, NamedSharding(mesh, P("gpu", "node")))

        def outcome(library, x):
            f = jax.shard_map(
                lambda x: self.call(library, x[0], "gpu")[None], mesh=mesh, in_specs=P("gpu"), out_specs=P("gpu"),
                axis_names=manual,
            )  # fmt: skip
            return jax.vmap(f, 1, 1, spmd_axis_name=spmd)(x)

        ours, lax = value(jax.jit(lambda x: (outcome(OURS, x), outcome(LAX, x)))(batched))
        assert_same(ours, lax, rtol=1e-6)

    @VMA
    def test_vmap_over_a_named_axis(self, mesh, rng, check_vma):
        """Mapped operands and constants, of f32 and of 8 bits. A sum over the axis must not widen the type."""
        x = rng.integers(-64, 64, (8, 2, *BLOCK)).astype(np.float32)
        same = self.integers(rng).astype(np.int8)
        virtual = {**mesh.shape, "i": 2}

        def program(library, x, axes):
            return jax.vmap(functools.partial(self.call, library, axes=axes), axis_name="i")(x)

        def constant(x, axes):
            return jax.vmap(lambda _: self.call(OURS, x, axes), axis_name="i", axis_size=2)(jnp.arange(2))

        def body(x, small, same):
            results = {}
            for axes in NAMED:
                try:
                    results[str(axes)] = program(OURS, x, axes), program(OURS, small, axes), constant(same, axes)
                except NotImplementedError as error:
                    assert self.op in str(error)
            return results

        operands = x, x.astype(np.int8), np.repeat(same[:, None], 2, 1)
        got = run(body, mesh, *operands[:2], same, check_vma=check_vma)
        for axes in NAMED:
            if str(axes) not in got:
                assert lax_or_none(functools.partial(program, axes=axes), mesh, x, check_vma=check_vma) is None
                continue
            for operand, result in zip(operands, got[str(axes)], strict=True):
                want = self.oracle(operand.reshape(16, *BLOCK), virtual, axes)
                assert_same(result, want.reshape(8, 2, *want.shape[1:]))
