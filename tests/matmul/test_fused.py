"""Algorithm "fused": the custom call for GPUs, the cases that run as "direct", and refusals.

Results are computed on CPUs: the custom call is replaced by the computation that it stands for, with jax.lax, and with
NaN in the memory that it does not write. tests/cuda/test_fused_matmul.cc tests the handler.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_same, on_ranks, run
from jax import lax
from products import gathers, lax_gathers, lax_scatters, line_of, normal, scatters, square_loss

import jaxcomm
from jaxcomm import _compat, _config, _lowering
from jaxcomm._processes import bootstrap
from jaxcomm.matmul import fused

N, M, K, F = 4, 6, 5, 3
TYPES = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f32": jnp.float32}


def lowered(f, *xs, n=N):
    """Text of the program for GPUs."""
    lowering = jax.jit(on_ranks(f, line_of(n))).trace(*xs).lower(lowering_platforms=("cuda",))
    return lowering.as_text()


def calls(text):
    """Number of fused calls and of transfers of one block to one rank."""
    transfers = re.findall(r"custom_call @jaxcomm_permute\(|stablehlo\.collective_permute", text)
    others = re.findall(r"custom_call @jaxcomm_all|stablehlo\.(?:all_gather|reduce_scatter)\b", text)
    assert not others
    return text.count("custom_call @jaxcomm_fused_matmul("), len(transfers)


def attribute(text, name):
    return {int(value) for value in re.findall(rf"\b{name} = (\d+) : i64", text)}


def stand_in(ctx, *operands, platform, spec, num_weights, scatters, keeps, results):
    """The computation of the custom call."""

    def body(x, *ws):
        n, axes, groups = spec.group_size, spec.call.axes, spec.call.groups
        me = lax.axis_index(axes)
        if groups is not None:
            me = jnp.asarray(np.argsort(np.concatenate(groups)) % n)[me]
        precision = lax.Precision.HIGHEST
        used = jnp.full((1, fused._WORKSPACE_BYTES), 7, jnp.uint8)
        if scatters:
            parts = lax.dot(x, ws[0], precision=precision, preferred_element_type=results[0])
            received = lax.all_to_all(parts, axes, 0, 0, tiled=True, axis_index_groups=groups)
            mine = jnp.arange(x.shape[0])[:, None] // (x.shape[0] // n) == me
            return [jnp.where(mine, jnp.nan, parts).astype(results[0]), received, used]
        whole = lax.all_gather(x, axes, tiled=True, axis_index_groups=groups)
        lefts = [whole] * num_weights + [whole.T] * (len(ws) - num_weights)
        products = [
            lax.dot(left, w, precision=precision, preferred_element_type=dtype)
            for left, w, dtype in zip(lefts, ws, results, strict=True)
        ]
        mine = jnp.arange(whole.shape[0])[:, None] // x.shape[0] == me
        received = whole if keeps else jnp.where(mine, jnp.nan, whole).astype(x.dtype)
        return [*products, received, used]

    assert spec.num_batch == 0
    assert len({aval.dtype for aval in ctx.avals_in}) == 1
    assert all(len(aval.shape) == 2 for aval in ctx.avals_in)
    return _compat.mlir.lower_fun(body, multiple_results=True)(ctx, *operands)


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs fused calls on CPUs. A list of the number of operands of each."""
    made = []

    def lower(ctx, *operands, platform, **params):
        if platform != "cpu":
            return original(ctx, *operands, platform=platform, **params)
        made.append(len(operands))
        return stand_in(ctx, *operands, platform=platform, **params)

    original = fused._lower
    _lowering.register_rule(fused.fused_p, lower)
    monkeypatch.setattr(fused, "PLATFORMS", frozenset({"cpu", "cuda"}))
    jax.clear_caches()
    yield made
    _lowering.register_rule(fused.fused_p, original)
    jax.clear_caches()


def both(program, *xs, rtol=2e-5, **options):
    """Runs program(gather, scatter, *xs) with "fused" and with jax.lax."""

    def body(*xs):
        options["algorithm"] = "fused"
        ours = program(gathers(**options), scatters(**options), *xs)
        return program(lax_gathers, lax_scatters, *xs), ours

    want, got = run(body, line_of(N), *xs)
    assert_same(got, want, rtol=rtol)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("chunks", [1, 3])
def test_rows_along_any_dimension(on_cpu, rng, axis, chunks):
    x = np.moveaxis(normal(rng, N, M, 2, 3, K), 1, 1 + axis)
    y = np.moveaxis(normal(rng, N, N * M, 2, 3, K), 1, 1 + axis)
    w = normal(rng, N, K, F)

    def program(gather, scatter, x, y, w):
        return gather(x, w, axis=axis), scatter(y, w, scatter_dimension=axis)

    both(program, x, y, w, chunks=chunks)
    assert on_cpu == [2, 2]


def test_weights_that_share_a_gather(on_cpu, rng):
    def program(gather, scatter, x, *ws):
        return gather(x, ws)

    both(program, normal(rng, N, M, K), *(normal(rng, N, K, f) for f in (3, 1, 4)))
    assert on_cpu == [4]


@pytest.mark.parametrize("axis", [0, 1])
def test_the_gathered_rows_are_kept(on_cpu, rng, axis):
    """With save_gathered, the derivative for w needs all of them, also the own."""

    def program(gather, scatter, x, w):
        options = {} if gather is lax_gathers else {"save_gathered": True}
        return jax.grad(square_loss(lambda w: gather(x, w, axis=axis, **options)))(w)

    both(program, normal(rng, N, M, 2, K), normal(rng, N, K, F))
    assert on_cpu == [2]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("preferred", [None, jnp.float32])
def test_types(on_cpu, rng, name, preferred):
    """Integers are exact in every type."""
    x, y, w = (jnp.asarray(rng.integers(-2, 3, shape), TYPES[name]) for shape in ((N, M, K), (N, N * M, K), (N, K, F)))

    def program(gather, scatter, x, y, w):
        options = {} if gather is lax_gathers else {"preferred_element_type": preferred}
        z, s = gather(x, w, **options), scatter(y, w, **options)
        assert preferred is None or gather is lax_gathers or z.dtype == s.dtype == preferred
        return z.astype(jnp.float32), s.astype(jnp.float32)

    both(program, x, y, w, rtol=0)
    assert on_cpu == [2, 2]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("chunks", [1, 3])
def test_derivatives(on_cpu, rng, axis, chunks):
    """Two calls forward. For x and w of the gather a call each; for both operands of the scatter one."""

    def program(gather, scatter, x, w, y, u):
        z = square_loss(lambda x, w, y, u: (gather(x, w, axis=axis), scatter(y, u, scatter_dimension=axis)))
        return jax.grad(z, argnums=(0, 1, 2, 3))(x, w, y, u)

    x, y = (np.moveaxis(normal(rng, N, rows, 2, K), 1, 1 + axis) for rows in (M, N * M))
    both(program, x, normal(rng, N, K, F), y, normal(rng, N, K, F), chunks=chunks)
    assert sorted(on_cpu) == [2, 2, 2, 2, 3]


def test_derivatives_of_several_weights(on_cpu, rng):
    """One call for x, whose parts are sums of products, and one for all weights."""

    def program(gather, scatter, x, *ws):
        return jax.grad(square_loss(lambda x, *ws: gather(x, ws)), argnums=(0, 1, 2))(x, *ws)

    both(program, normal(rng, N, M, K), normal(rng, N, K, F), normal(rng, N, K, 1))
    assert sorted(on_cpu) == [2, 3, 3]


def test_second_derivatives(on_cpu, rng):
    def program(gather, scatter, x, w):
        loss = square_loss(lambda x, w: gather(jnp.sin(x), w))
        return jax.grad(lambda x, w: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss, (0, 1))(x, w)), (0, 1))(x, w)

    both(program, normal(rng, N, M, K), normal(rng, N, K, F), rtol=1e-4)


def test_derivatives_with_a_wider_result(on_cpu, rng):
    """The cotangent is in float32, the operands in bfloat16: both run as "direct", which sends bfloat16."""
    x, w = (jnp.asarray(normal(rng, *shape), jnp.bfloat16) for shape in ((N, M, K), (N, K, F)))

    def program(gather, scatter, x, w):
        if gather is lax_gathers:
            return jax.grad(square_loss(lambda x, w: gather(x.astype(jnp.float32), w.astype(jnp.float32))), (0, 1))(
                x, w
            )
        return jax.grad(square_loss(lambda x, w: gather(x, w, preferred_element_type=jnp.float32)), (0, 1))(x, w)

    both(program, x, w, rtol=2e-2)
    assert on_cpu == [2]


def test_vmap(on_cpu, rng):
    """A batch of rows is more rows. A batch of both operands is no matrix, and runs as "direct"."""
    x, w = normal(rng, N, 2, M, K), normal(rng, N, 2, K, F)
    both(lambda gather, scatter, x, w: jax.vmap(lambda x: gather(x, w[0]))(x), x, w)
    assert on_cpu == [2]
    both(lambda gather, scatter, x, w: jax.vmap(lambda w: gather(x[0], w))(w), x, w)
    assert on_cpu == [2, 2]
    both(lambda gather, scatter, x, w: jax.vmap(gather)(x, w), x, w)
    assert on_cpu == [2, 2]


def test_groups(on_cpu, rng):
    """The attributes name the groups: see test_one_call."""
    text = lowered(
        gathers(algorithm="fused", axis_index_groups=[[0, 2], [3, 1]]), np.ones((N, M, K)), np.ones((N, K, F))
    )
    assert re.search(r"groups = (dense<|array<i64: ?)\[?0, 2, 3, 1\]?", text)
    assert attribute(text, "group_size") == {2}


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_values_of_groups(on_cpu, rng, op):
    groups = [[0, 2], [3, 1]]
    x, w = normal(rng, N, M, K), normal(rng, N, K, F)
    want = [np.empty(0)] * N
    for group in groups:
        parts = [np.float64(x[r]) @ w[r] for r in group]
        for position, rank in enumerate(group):
            if op == "gather":
                want[rank] = np.concatenate([np.float64(x[r]) for r in group]) @ w[rank]
            else:
                want[rank] = np.split(sum(parts), 2)[position]
    f = (gathers if op == "gather" else scatters)(algorithm="fused", axis_index_groups=groups)
    np.testing.assert_allclose(run(f, line_of(N), x, w), np.stack(want), rtol=1e-5, atol=1e-5)
    assert on_cpu == [2]


@pytest.mark.parametrize("preferred", [None, np.float64])
def test_float64(on_cpu, rng, preferred):
    with jax.enable_x64(True):
        x, y, w = (rng.standard_normal(shape) for shape in ((N, M, K), (N, N * M, K), (N, K, F)))

        def program(gather, scatter, x, y, w):
            options = {} if gather is lax_gathers else {"preferred_element_type": preferred}
            results = gather(x, w, **options), scatter(y, w, **options)
            assert all(result.dtype == np.float64 for result in results)
            return results

        both(program, x, y, w, rtol=1e-12)
    assert on_cpu == [2, 2]


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_one_call(op):
    """Operands are the rank, rows and weights; results the products, the received rows and a workspace."""
    w = np.ones((N, K, F), np.float32)
    if op == "gather":
        f, x = gathers(algorithm="fused", chunks=2, max_sms=3), np.ones((N, M, K), np.float32)
        shapes = "(tensor<i32>, tensor<6x5xf32>, tensor<5x3xf32>) -> (tensor<24x3xf32>, tensor<24x5xf32>"
    else:
        f, x = scatters(algorithm="fused", chunks=2, max_sms=3), np.ones((N, N * M, K), np.float32)
        shapes = "(tensor<i32>, tensor<24x5xf32>, tensor<5x3xf32>) -> (tensor<24x3xf32>, tensor<24x3xf32>"
    text = lowered(f, x, w)
    assert calls(text) == (1, 0)
    assert shapes + ", tensor<1x33554688xui8>)" in text
    assert 'algorithm = ""' in text
    assert "has_side_effect = true" in text
    want = {"weights": 1, "chunks": 2, "keeps": 0, "scatters": int(op == "scatter"), "tf32": 1, "max_sms": 3}
    want["group_size"] = N
    found = {name: attribute(text, name) for name in want}
    assert found == {name: {value} for name, value in want.items()}


@pytest.mark.parametrize(
    ("precision", "tf32"),
    [
        (None, 1),
        ("high", 1),
        (lax.Precision.HIGHEST, 0),
        ("float32", 0),
        (("default", "highest"), 0),
        (("default", "high"), 1),
    ],
)
def test_tf32_as_in_xla(precision, tf32):
    text = lowered(
        gathers(algorithm="fused", precision=precision), np.ones((N, M, K), np.float32), np.ones((N, K, F), np.float32)
    )
    assert attribute(text, "tf32") == {tf32}


def test_calls_of_derivatives():
    """Each transpose is one call: also sums over rows, and sums of several products."""
    x, w = np.ones((N, M, K), np.float32), np.ones((N, K, F), np.float32)
    y = np.ones((N, N * M, K), np.float32)

    def of(f, argnums):
        return calls(lowered(jax.grad(square_loss(f), argnums), *((y, w) if f is scatter else (x, w))))

    gather, scatter = gathers(algorithm="fused"), scatters(algorithm="fused")
    for op in (gather, scatter, lambda x, w: gather(x, (w, 2 * w))):
        for argnums in (0, 1):
            assert of(op, argnums) == (2, 0)
    assert of(gather, (0, 1)) == (3, 0)
    assert of(scatter, (0, 1)) == (2, 0)


def test_sums_over_rows_are_in_float32():
    """They are added up chunk by chunk. bfloat16 would round each time."""
    x, w = jnp.ones((N, M, K), jnp.bfloat16), jnp.ones((N, K, F), jnp.bfloat16)
    text = lowered(jax.grad(square_loss(gathers(algorithm="fused")), 1), x, w)
    assert "(tensor<i32>, tensor<6x5xbf16>, tensor<24x3xbf16>) -> (tensor<5x3xf32>, tensor<24x5xbf16>" in text


def test_types_of_transfers():
    """They are those of "direct", also where a product has a wider result than its derivatives."""
    x, w = jnp.ones((N, M, K), jnp.bfloat16), jnp.ones((N, K, F), jnp.bfloat16)
    y = jnp.ones((N, N * M, K), jnp.bfloat16)

    def types(f, argnums, *xs):
        text = lowered(jax.grad(square_loss(f), argnums), *xs)
        assert "fused_matmul" in text or f.keywords["algorithm"] == "direct"
        fused_rows = r"custom_call @jaxcomm_fused_matmul\(.*-> \(.*, tensor<\w*x(\w+)>, tensor<\w+xui8>\)"
        permuted = r"custom_call @jaxcomm_permute\(.*-> tensor<\w*x(\w+)>"
        return sorted(set(re.findall(fused_rows, text)) | set(re.findall(permuted, text)))

    for op, xs in ((gathers, (x, w)), (scatters, (y, w))):
        for argnums in (0, 1):
            of = [
                types(op(algorithm=algorithm, preferred_element_type=jnp.float32), argnums, *xs)
                for algorithm in ("fused", "direct")
            ]
            assert of[0] == of[1] != []


def test_symmetric_buffers(monkeypatch):
    """No windows on XLA's buffers: the transfers begin and end inside of arrays."""
    jax.clear_caches()
    x, w = np.ones((N, M, K), np.float32), np.ones((N, K, F), np.float32)
    monkeypatch.setattr(bootstrap, "config", lambda: _config.Config(symmetric_buffers=True))
    monkeypatch.setattr(_compat.jaxlib, "__version__", "0.12.0.1")
    assert "memory_spaces" in lowered(lambda x, w: jaxcomm.psum(x, "i"), x, w)
    text = lowered(gathers(algorithm="fused"), x, w)
    assert calls(text) == (1, 0)
    assert "memory_spaces" not in text
    assert "symmetric_buffers" not in text
    jax.clear_caches()


def test_xla_for_all_collectives(monkeypatch):
    """JAXCOMM_ALGORITHM=xla selects XLA's collectives in place of jaxcomm's."""
    monkeypatch.setattr(_lowering, "selects_xla", lambda algorithm, platform: True)
    text = lowered(gathers(algorithm="fused"), np.ones((N, M, K), np.float32), np.ones((N, K, F), np.float32))
    assert "fused_matmul" not in text
    assert text.count('"stablehlo.all_gather"(') == 1


def test_no_other_platform():
    x, w = np.ones((N, M, K), np.float32), np.ones((N, K, F), np.float32)
    with pytest.raises(ValueError, match=r"all_gather_matmul at .*'fused' .* runs on CUDA only; pass 'direct' or"):
        jax.jit(on_ranks(gathers(algorithm="fused"), line_of(N))).lower(x, w)
    traced = jax.jit(on_ranks(gathers(algorithm="fused"), line_of(N))).trace(x, w)
    for platform in ("rocm", "tpu"):
        with pytest.raises(ValueError, match=r"all_gather_matmul at .*'fused' .* runs on CUDA only; pass 'direct' or"):
            traced.lower(lowering_platforms=(platform,))


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (np.int32, {}, "got int32 with result int32. Pass 'direct' or 'ring'"),
        (np.float32, {"preferred_element_type": jnp.bfloat16}, "got float32 with result bfloat16"),
        (jnp.float8_e5m2, {}, "got float8_e5m2"),
        (np.complex64, {}, "got complex64"),
        (np.float32, {"precision": lax.DotAlgorithmPreset.TF32_TF32_F32}, "takes a jax.lax.Precision .* got"),
    ],
)
@pytest.mark.parametrize("op", [gathers, scatters])
def test_refusals(op, dtype, options, message):
    x, w = jnp.ones((8, K), dtype), jnp.ones((K, F), dtype)
    body = on_ranks(lambda _: op(algorithm="fused", **options)(x, w), line_of(N))
    with pytest.raises(ValueError, match=f"algorithm 'fused' .*{message}"):
        jax.eval_shape(body, np.zeros(N, np.float32))
