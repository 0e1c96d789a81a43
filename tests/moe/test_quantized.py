"""quantize, dequantize and dispatch_quantized against NumPy and the conversions of ml_dtypes."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from harness import OURS, assert_same, run
from oracle import ids_of

moe = OURS.moe
TYPES = [(v, s) for v in ("float8_e4m3fn", "float8_e5m2") for s in ("float32", "float8_e8m0fnu")]


def rounded(x, dtype, block, scale):
    """The definition, block by block, for (rows, d)."""
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    values = np.zeros(x.shape, dtype)
    scales = np.zeros((len(x), -(-x.shape[1] // block)), scale)
    for r in range(len(x)):
        for b in range(scales.shape[1]):
            own = x[r, b * block : (b + 1) * block].astype(np.float32)
            amax = np.abs(own[np.isfinite(own)]).max(initial=0)
            factor = np.float32(1) if amax == 0 else np.maximum(amax * (1 / largest), np.float32(2.0**-126))
            if scale != "float32":
                factor = np.float32(2.0 ** np.ceil(np.log2(np.float64(factor))))
            scales[r, b] = factor
            values[r, b * block : (b + 1) * block] = (own / factor).astype(dtype)
    return values, scales


def some(rng, rows, d):
    """Blocks of very different sizes."""
    return (rng.standard_normal((rows, d)) * 2.0 ** rng.integers(-60, 60, (rows, d))).astype(np.float32)


@pytest.mark.parametrize(("dtype", "scale"), TYPES)
def test_values_and_scales(rng, dtype, scale):
    for block, d in ((32, 64), (128, 300), (32, 7), (5, 11), (1, 3), (4, 0)):
        x = some(rng, 9, d)
        x[0, d // 2 :] = 0
        for source in ("float32", "bfloat16"):
            given = x.astype(jnp.dtype(source))
            with np.errstate(over="ignore"):
                want = rounded(given, jnp.dtype(dtype), block, jnp.dtype(scale))
            got = jax.jit(lambda x, b=block: moe.quantize(x, dtype=dtype, block=b, scale=scale))(given)
            assert_same(got, want, bits=True)
            whole = np.repeat(want[1].astype(np.float32), block, 1)[:, :d]
            back = jax.jit(lambda v, s, t=source, b=block: moe.dequantize(v, s, t, block=b))(*got)
            assert_same(back, (want[0].astype(np.float32) * whole).astype(given.dtype), bits=True)


def test_zero_infinite_and_tiny_elements():
    x = np.full((1, 12), 3, np.float32)
    x[0, 1], x[0, 2], x[0, 5], x[0, 8:] = np.inf, -np.inf, np.nan, 1e-37
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        values, scales = map(np.asarray, moe.quantize(x, dtype=dtype, block=4))
        largest = float(ml_dtypes.finfo(dtype).max)
        np.testing.assert_allclose(scales[0, :2], 3 / largest, rtol=1e-6)
        found = values.astype(np.float32)[0]
        np.testing.assert_array_equal(found[[0, 3, 4, 6, 7]], largest)
        assert np.isnan(found[5]) and scales[0, 2] == np.float32(2.0**-126)
        np.testing.assert_allclose(found[8:].astype(np.float64) * scales[0, 2], 1e-37, rtol=0.13)
        if dtype == "float8_e5m2":
            assert found[1] == np.inf and found[2] == -np.inf
        else:
            assert np.isnan(found[1:3]).all()
    values, scales = map(np.asarray, moe.quantize(np.zeros((2, 4), np.float32)))
    assert (values == 0).all() and (scales == 1).all()


@pytest.mark.parametrize(("dtype", "scale"), TYPES)
def test_scales_travel_with_their_rows(line, rng, dtype, scale):
    ids = ids_of("holes", rng, 8, 5, 2, 16)
    x = some(rng, 40, 20).reshape(8, 5, 20)
    slot, _, capacity = oracle.route(ids, 16)
    options = {"dtype": dtype, "block": 8, "scale": scale}

    def body(ids, x):
        r = moe.route(ids, "gpu", num_experts=16)
        return moe.dispatch(moe.quantize(x, **options), r), moe.dispatch_quantized(x, r, **options)

    sent, whole = run(body, line, ids, x)
    values, scales = rounded(x.reshape(40, 20), jnp.dtype(dtype), 8, jnp.dtype(scale))
    want = [oracle.dispatch(a.reshape(8, 5, -1), ids, slot, capacity, 16) for a in (values, scales)]
    assert_same(sent, tuple(want), bits=True)
    home = values.astype(np.float32) * np.repeat(scales.astype(np.float32), 8, 1)[:, :20]
    assert_same(whole, oracle.dispatch(home.reshape(8, 5, 20), ids, slot, capacity, 16))


def test_derivatives_are_those_of_dispatch(line, rng):
    """Also where the values round to zero, and under jit, checkpoint and vmap of the payload."""
    ids = ids_of("holes", rng, 8, 4, 2, 8)
    x = some(rng, 32, 6).reshape(8, 4, 6)
    capacity = oracle.route(ids, 8)[2]
    ct = rng.integers(-9, 9, (8, capacity, 6)).astype(np.float32)
    slot = oracle.route(ids, 8)[0]

    def body(ids, x, ct):
        r = moe.route(ids, "gpu", num_experts=8)
        send = jax.checkpoint(lambda x: moe.dispatch_quantized(x, r, block=4))
        loss = lambda x: jnp.sum(send(x) * ct)  # noqa: E731
        wide = jnp.stack([x, x], 1)
        both = jax.vmap(jax.grad(loss), 1, 1)(wide)
        small = jax.grad(lambda x: jnp.sum(send(x.astype(jnp.bfloat16)).astype(jnp.float32) * ct))(x)
        return jax.grad(loss)(x), both[:, 1], jax.jvp(send, (x,), (x,))[1], small

    grad, of_vmap, tangent, small = run(body, line, ids, x, ct)
    want = oracle.combine(ct, ids, slot, 8)
    assert_same((grad, of_vmap, small), (want, want, want))
    assert_same(tangent, oracle.dispatch(x, ids, slot, capacity, 8))


def test_gradients_of_small_floats_are_refused(line):
    ids, x = np.zeros((8, 2, 1), np.int32), np.ones((8, 2, 4), np.float32)

    def loss(x, ids):
        r = moe.route(ids, "gpu", num_experts=8)
        return moe.dequantize(*moe.dispatch(moe.quantize(x), r), jnp.float32).sum()

    with pytest.raises(TypeError, match=r"moe.quantize: a derivative of float8_e4m3fn .*moe.dispatch_quantized"):
        run(lambda i, x: jax.grad(loss)(x, i), line, ids, x)
    constant = lambda x, ids: loss(jax.lax.stop_gradient(x), ids) + x.sum()  # noqa: E731
    assert (run(lambda i, x: jax.grad(constant)(x, i), line, ids, x) == 1).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: moe.quantize(np.zeros((2, 4), int)), TypeError, "quantize: x must have floats of 16 or 32 bits, got"),
        (lambda: moe.quantize(jnp.zeros(())), ValueError, "quantize: x must have at least one dimension, got ()"),
        (lambda: moe.quantize(jnp.zeros(4), block=0), ValueError, "quantize: block must be positive, got 0"),
        (lambda: moe.quantize(jnp.zeros(4), dtype="int8"),
         ValueError, "quantize: dtype must be one of float8_e4m3fn, float8_e5m2, got int8"),
        (lambda: moe.quantize(jnp.zeros(4), scale="bfloat16"),
         ValueError, "quantize: scale must be one of float32, float8_e8m0fnu, got bfloat16"),
        (lambda: moe.dequantize(jnp.zeros((2, 129)), jnp.zeros((2, 1)), jnp.float32),
         ValueError, "dequantize: values of shape (2, 129) in blocks of 128 need scales of shape (2, 2), got (2, 1)"),
    ],
)  # fmt: skip
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
