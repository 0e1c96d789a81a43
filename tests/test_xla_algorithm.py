"""algorithm="xla": XLA's own collectives, per call, for a whole program, or on platforms without handlers."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import OURS, on_ranks, run

from jaxcomm import _config, _lowering

# Arguments of each op on a block of (8, 8) in groups of 8, and what XLA calls it; a broadcast is a sum of bits.
OPS = {
    "psum": ({}, "all_reduce"),
    "pmean": ({}, "all_reduce"),
    "pmax": ({}, "all_reduce"),
    "pmin": ({}, "all_reduce"),
    "psum_scatter": ({"scatter_dimension": 1, "tiled": True}, "reduce_scatter"),
    "all_gather": ({"axis": 1}, "all_gather"),
    "all_to_all": ({"split_axis": 1, "concat_axis": 0, "tiled": True}, "all_to_all"),
    "ppermute": ({"perm": [(0, 3), (3, 5), (2, 0)]}, "collective_permute"),
    "pbroadcast": ({"source": 3}, "all_reduce"),
    "barrier": ({}, "all_reduce"),
}
NODES = ("node", "gpu")


def lowered(mesh, op, platform, algorithm=None, axes=NODES):
    x = jax.ShapeDtypeStruct((8, 8, 8), "float32")
    f = jax.jit(on_ranks(lambda x: getattr(OURS, op)(x, axes, algorithm=algorithm, **OPS[op][0]), mesh))
    return f.trace(x).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
@pytest.mark.parametrize("op", OPS)
def test_other_platforms_get_xlas_collectives(mesh, op, platform):
    text = lowered(mesh, op, platform)
    assert f"stablehlo.{OPS[op][1]}" in text
    assert "jaxcomm_" not in re.sub(r"loc\(.*|module @\S+", "", text)


def test_other_platforms_are_logged_once(mesh, caplog):
    _lowering._log.cache_clear()
    with caplog.at_level(logging.WARNING, logger="jaxcomm"):
        for op in ("psum", "pmax"):
            lowered(mesh, op, "tpu")
    assert [record.getMessage() for record in caplog.records] == [
        "jaxcomm uses XLA's own collectives, because jaxcomm has no collectives for this platform"
    ]
    with pytest.raises(NotImplementedError, match=r"psum at .*algorithm 'ring' runs on CPU and CUDA only"):
        lowered(mesh, "psum", "tpu", "ring")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_selected_by_a_call_and_by_the_setting(mesh, monkeypatch, platform):
    """The setting applies to calls with another algorithm, too."""
    assert "stablehlo.all_reduce" in lowered(mesh, "psum", platform, "xla")
    assert "jaxcomm_all_reduce" in lowered(mesh, "psum", platform, "ring", axes="gpu")
    monkeypatch.setattr(_lowering, "config", lambda: _config.Config(algorithm="xla"))
    assert "jaxcomm_all_reduce" not in lowered(mesh, "psum", platform, "ring", axes="gpu")


def test_barrier_is_not_left_out(mesh):
    """No operation uses the data that the ranks exchange."""
    f = jax.jit(on_ranks(lambda x: OURS.barrier(x, "gpu", algorithm="xla"), mesh))
    assert "all-reduce" in f.lower(np.zeros(8)).compile().as_text()


def test_unequal_groups(mesh, rng):
    x = rng.integers(-9, 9, (8, 5)).astype(np.float32)
    groups = [[0, 2, 1], [3]]
    ops = [(getattr(OURS, op), numpy) for op, numpy in (("psum", np.sum), ("pmax", np.max), ("pmin", np.min))]
    ops.append((lambda x, axis, **groups: OURS.psum_start(x, axis, **groups).done(), np.sum))
    for op, numpy in ops:
        got = run(lambda x, op=op: op(x, "gpu", axis_index_groups=groups), mesh, x, check_vma=False)
        rows = x.reshape(2, 4, 5)
        want = np.concatenate([np.repeat(numpy(rows[:, :3], 1, keepdims=True), 3, 1), rows[:, 3:]], 1)
        np.testing.assert_array_equal(got, want.reshape(8, 5))
    for op in ("pmean", "all_gather", "barrier"):
        with pytest.raises(ValueError, match=r"axis_index_groups must have equal sizes, got sizes \[3, 1\]"):
            run(lambda x, op=op: getattr(OURS, op)(x, "gpu", axis_index_groups=groups), mesh, x, check_vma=False)


def test_pending_sums_are_scattered(rng):
    """Weights sharded over the ranks, gathered for use, with the gradient written by hand (FSDP)."""
    mesh = jax.make_mesh((8,), ("gpu",), axis_types=(jax.sharding.AxisType.Explicit,))
    w, x = rng.standard_normal((16, 3)), rng.standard_normal((8, 16))

    @jax.custom_vjp
    def gather(w):
        return OURS.all_gather(w, "gpu", tiled=True, to="reduced")

    gather.defvjp(lambda w: (gather(w), None), lambda _, ct: (OURS.psum_scatter(ct, "gpu", tiled=True),))

    def loss(w, x):
        return jnp.sum((x @ gather(w)) ** 2)[None]

    def columns(x):
        pending = jax.lax.pcast(x, "gpu", to="unreduced")
        kept = OURS.psum_scatter(pending, "gpu", scatter_dimension=1, tiled=True)
        return jnp.concatenate([kept, OURS.psum_scatter(pending[:, :8], "gpu", scatter_dimension=-1)[:, None]], 1)[None]

    P = jax.sharding.PartitionSpec
    with jax.set_mesh(mesh), jax.enable_x64(True):
        f = jax.shard_map(loss, in_specs=(P("gpu"), P("gpu")), out_specs=P("gpu"))
        got = jax.jit(jax.grad(lambda w, x: jnp.sum(f(w, x))))(jax.device_put(w, P("gpu")), jax.device_put(x, P("gpu")))
        blocks = rng.integers(-9, 9, (24, 16)).astype(np.float32)
        found = jax.jit(jax.shard_map(columns, in_specs=P("gpu"), out_specs=P("gpu")))(jax.device_put(blocks, P("gpu")))
    np.testing.assert_allclose(np.asarray(got), 2 * x.T @ (x @ w), rtol=1e-12)
    total = blocks.reshape(8, 3, 16).sum(0)
    want = [np.concatenate([total[:, 2 * r : 2 * r + 2], total[:, r : r + 1]], 1) for r in range(8)]
    np.testing.assert_array_equal(found, want)
