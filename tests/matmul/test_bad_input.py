"""Bad arguments of collective matmul end in errors that name op, argument, value and what is expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import on_ranks
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from products import gathers, line_of, scatters

import jaxcomm

X, W = jnp.ones((8, 3)), jnp.ones((3, 5))


def outcome(f):
    jax.eval_shape(on_ranks(lambda _: f(), line_of(4)), np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gathers()(X, jnp.ones((4, 5))), ValueError, r"all_gather_matmul: w .*k = 3.*\(8, 3\).*\(4, 5\)"),
        (lambda: gathers()(X, jnp.ones(3)), ValueError, r"all_gather_matmul: w must have the shape \(k, f\).*\(3,\)"),
        (lambda: gathers()(X, (W, W[None])), ValueError, r"w must have the shape \(k, f\).*\(1, 3, 5\)"),
        (lambda: gathers()(X, ()), ValueError, "at least one array"),
        (lambda: gathers()(X[0], W), ValueError, r"x must have rows and columns, got shape \(3,\)"),
        (lambda: gathers(axis=2)(X, W), ValueError, "axis=2 is out of range for an array of 2 dimensions"),
        (lambda: gathers(axis=-1)(X, W), ValueError, "axis=-1 is the last dimension of x"),
        (lambda: gathers(axis=1.0)(X, W), TypeError, "axis must be an integer"),
        (lambda: gathers(axis=lax.axis_index("i"))(X, W), TypeError, "_matmul: axis must be known when tracing"),
        (lambda: scatters(scatter_dimension=1)(X, W), ValueError, "scatter_dimension=1 is the last dimension of x"),
        (lambda: scatters()(X[:6], W), ValueError, r"scatter_dimension=0 .*\(6, 3\) .*cannot be split into 4"),
        (lambda: scatters()(X, (W, W)), TypeError, "w must be one array, got 2; only all_gather_matmul"),
        (lambda: gathers(algorithm="flags")(X, W), ValueError, "'flags'; pass one of unfused, ring, xla"),
        (lambda: gathers(max_sms=0)(X, W), ValueError, "max_sms must be a positive integer"),
        (lambda: gathers()(X > 0, W > 0), TypeError, "element type bool"),
        (lambda: scatters(axis_index_groups=[[0, 1], [2]])(X, W), ValueError, "axis_index_groups must have each index"),
        (lambda: jaxcomm.all_gather_matmul(X, W, "j"), NameError, "axis_name 'j' is not bound here"),
        (lambda: jaxcomm.all_gather_matmul(X, W, ()), ValueError, "at least one mesh axis"),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=message):
        outcome(call)


def test_explicit_sharding_is_refused():
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Explicit,) * 2)

    def body(x, w):
        return jaxcomm.all_gather_matmul(x, w, "i")

    f = jax.shard_map(body, mesh=mesh, in_specs=(P("i"), P()), out_specs=P(), axis_names={"i"}, check_vma=False)
    with jax.set_mesh(mesh):
        x = jax.device_put(np.zeros((4, 4), np.float32), jax.NamedSharding(mesh, P("i", "j")))
        w = jax.device_put(np.zeros((4, 4), np.float32), jax.NamedSharding(mesh, P()))
        with pytest.raises(ValueError, match=r"all_gather_matmul: an operand .* is sharded over explicit mesh axes"):
            jax.jit(f)(x, w)
