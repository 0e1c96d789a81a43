"""JAX's own profile shows calls under the names of their functions."""

import gzip
import json
import re

import jax
import jax.numpy as jnp

import jaxcomm


def test_names_of_calls(tmp_path):
    """Calls in a loop, started calls, functions of several calls, and two calls of one function."""

    def body(x):
        x = jax.lax.fori_loop(0, 2, lambda _, y: jaxcomm.pmax(y, "i"), x)
        pending = jaxcomm.psum_start(x, "i")
        ids = jnp.zeros((1, 1), jnp.int32)
        routing = jaxcomm.moe.route(ids, "i", num_experts=2)
        rows = jaxcomm.moe.dispatch(x, routing)
        return jaxcomm.psum(jaxcomm.psum(x, "i"), "i") + pending.done() + jaxcomm.moe.combine(rows, routing)

    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"), check_vma=False))
    x = jnp.ones((2, 8))
    f(x).block_until_ready()
    with jax.profiler.trace(tmp_path):
        f(x).block_until_ready()
    (file,) = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    found = [event["name"] for event in events if "hlo_op" in event.get("args", {})]
    expected = {"pmax", "psum_start", "psum_done", "psum", "moe_route", "moe_dispatch", "moe_combine"}
    assert {re.sub(r"\.\d+$", "", name) for name in found} & {*expected, "ffi_call"} == expected
    assert len({name for name in found if re.fullmatch(r"psum\.\d+", name)}) == 2


def test_names_beside_axes_that_are_not_manual():
    """The call is in a shard_map of its own."""
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    f = jax.shard_map(lambda x: jaxcomm.psum(x, "i"), mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P(),
                      axis_names={"i"}, check_vma=False)  # fmt: skip
    program = jax.jit(f).lower(jnp.ones((2, 8))).compile().as_text()
    assert re.findall(r"%(\S+?)\.\d+ = .* custom-call\(", program) == ["psum"]
