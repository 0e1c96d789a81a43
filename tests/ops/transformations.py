"""Part of the contract: the op under vmap, grad, jvp, checkpoint, loops and conditions."""

import functools

import collective
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective import BLOCK
from harness import LAX, OURS, assert_same, compare, on_ranks, value
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


# Each has two arguments: the op as a function of one array, and the array. test_options_of_ops.py has the others.
TRANSFORMATIONS = {
    "vmap 2 to 1": lambda f, x: jax.vmap(f, 2, 1)(stack(x, 2)),
    "vmap of vmap": lambda f, x: jax.vmap(jax.vmap(f, 2), 0)(stack(stack(x, 2), 0)),
    "while": while_loop,
}
DERIVATIVES = {
    "grad of checkpoint": lambda f, x: jax.grad(loss(jax.checkpoint(lambda x: jnp.sin(f(jnp.sin(x))))))(x),
    "grad of vmap": lambda f, x: jax.grad(loss(jax.vmap(f)))(stack(x, 0)),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(loss(f)), 2, 1)(stack(x, 2)),
    "grad of scan": lambda f, x: jax.grad(loss(lambda x: lax.scan(jax.checkpoint(carry(f)), x, SCALES)[0]))(x),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(loss(f)), (x,), (jnp.cos(x),)),
}


SETTINGS = [("gpu", True), (("node", "gpu"), False)]


class Transformations(collective.Collective):
    def applied(self, library, x, table, axes, check_vma):
        call = functools.partial(self.call, library, axes=axes, **({} if check_vma else self.variant))
        return {name: transformation(call, x) for name, transformation in table.items()}

    @pytest.mark.parametrize(("axes", "check_vma"), SETTINGS, ids=["vma", "no_vma"])
    @pytest.mark.parametrize("table", [TRANSFORMATIONS, DERIVATIVES], ids=["transformations", "derivatives"])
    def test_transformations(self, mesh, rng, table, axes, check_vma):
        # In one program of both tables, XLA:CPU aborts (docs/internals/cpu.md, XLA's own collectives beside jaxcomm's).
        x = rng.standard_normal((8, *BLOCK), np.float32)
        if self.differentiable or table is TRANSFORMATIONS:
            program = functools.partial(self.applied, table=table, axes=axes, check_vma=check_vma)
            compare(program, mesh, x, rtol=1e-4, check_vma=check_vma)
        else:
            f = on_ranks(lambda x: jax.grad(loss(functools.partial(self.call, OURS, axes=axes)))(x), mesh)
            with pytest.raises(NotImplementedError, match=f"{self.op} at collective.py:.* has no derivative"):
                jax.eval_shape(f, x)

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
