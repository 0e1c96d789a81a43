"""jaxcomm.ffi_call: errors when tracing, and the ranks of a call."""

import ctypes
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import on_ranks
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import _compat, _config, _native
from jaxcomm._processes import bootstrap, placement

X = np.zeros((8, 4), np.float32)


def call(x, axis_name, **options):
    return jaxcomm.ffi_call("mine", jax.ShapeDtypeStruct(x.shape, x.dtype), axis_name, **options)(x, flag=np.int32(1))


def lowered(body, mesh):
    f = jax.jit(on_ranks(body, mesh, check_vma=False))
    return f.trace(X).lower(lowering_platforms=("cuda",)).as_text()


def groups(text):
    return [[int(i) for i in found.split(", ")] for found in re.findall(r"jaxcomm_groups = dense<\[(.*?)\]>", text)]


def test_ranks_in_the_order_of_the_axes(mesh):
    assert groups(lowered(lambda x: call(x, "node"), mesh)) == [[0, 4, 1, 5, 2, 6, 3, 7]]
    assert groups(lowered(lambda x: call(x, ("gpu", "node")), mesh)) == [[0, 4, 1, 5, 2, 6, 3, 7]]
    text = lowered(lambda x: call(x, "gpu", axis_index_groups=[[3, 0], [1, 2]], max_sms=5), mesh)
    assert groups(text) == [[3, 0, 1, 2, 7, 4, 5, 6]]
    assert "group_size = 2 : i64" in text
    assert "max_sms = 5 : i64" in text
    assert "flag = 1 : i32" in text


def test_processes_of_gpus_are_an_attribute_unless_other_gpus_may_run_the_program(mesh, monkeypatch):
    """Also of calls under vmap and in a branch. The lowering of jax.ffi.ffi_call alone does not know the devices."""
    monkeypatch.setattr(placement, "gpu_processes", lambda mesh, rows: rows.reshape(-1).astype(np.int32) // 4)
    attribute = "jaxcomm_processes = dense<[0, 1, 0, 1, 0, 1, 0, 1]> : tensor<8xi32>"
    bodies = [
        lambda x: call(x, "node"),
        lambda x: jax.lax.cond(x[0] > 0, lambda x: call(x, "node"), lambda x: -call(-x, "node"), x),
        *(
            lambda x, method=method: jax.vmap(lambda x: call(x, "node", vmap_method=method))(x)
            for method in ("sequential", "expand_dims", "broadcast_all")
        ),
    ]
    for number, body in zip((1, 2, 1, 1, 1), bodies, strict=True):
        assert lowered(body, mesh).count(attribute) == number
    f = jax.jit(on_ranks(bodies[0], mesh, check_vma=False))
    checks = [jax.export.DisabledSafetyCheck.custom_call("mine")]
    exported = jax.export.export(f, platforms=["cuda"], disabled_checks=checks)(X)
    assert "jaxcomm_groups" in exported.mlir_module() and "jaxcomm_processes" not in exported.mlir_module()
    monkeypatch.setattr(placement, "gpu_processes", lambda mesh, rows: None)
    assert "jaxcomm_processes" not in lowered(bodies[0], mesh)


WINDOWS = {"operand_windows": [1], "result_windows": [0]}


def with_windows(x, **options):
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype)] * 2
    return jaxcomm.ffi_call("mine", types, "gpu", **WINDOWS | options)(x, 2 * x)[0]


@pytest.fixture
def windows(monkeypatch):
    """XLA makes windows on its buffers. Returns a function that sets JAXCOMM_SYMMETRIC_BUFFERS."""
    jax.clear_caches()  # lowerings without the setting
    monkeypatch.setattr(_compat, "has_windows", lambda: True)

    def set_to(wanted):
        monkeypatch.setattr(bootstrap, "config", lambda: _config.Config(symmetric_buffers=wanted))

    set_to(True)
    yield set_to
    jax.clear_caches()


def test_windows_are_in_collective_memory(mesh, windows):
    """Only operands and results of the custom call itself, also under vmap."""
    both = 'mhlo.frontend_attributes = {operands_memory_spaces = "{1:1}", results_memory_spaces = "{0:1}"}'
    bodies = [
        with_windows,
        lambda x: jax.vmap(lambda x: with_windows(x, vmap_method="broadcast_all"))(x),
        lambda x: jax.lax.cond(x[0] > 0, with_windows, lambda x: x, x),
    ]
    for body in bodies:
        text = lowered(body, mesh)
        (line,) = [line for line in text.splitlines() if "custom_call @mine" in line]
        assert both in line
        assert text.count("memory_spaces") == 2
        assert "jaxcomm_operand_windows = dense<1> : tensor<1xi64>" in line
        assert "jaxcomm_result_windows = dense<0> : tensor<1xi64>" in line
        assert "jaxcomm_no_windows" not in line
    text = lowered(lambda x: with_windows(x, operand_windows=[1, 0], result_windows=[]), mesh)
    assert 'mhlo.frontend_attributes = {operands_memory_spaces = "{1:1,0:1}"}' in text
    assert "jaxcomm_operand_windows = dense<[1, 0]> : tensor<2xi64>" in text
    assert lowered(lambda x: with_windows(x, operand_windows=np.array([1, 0]), result_windows=()), mesh) == text
    assert "jaxcomm_result_windows" not in text
    assert "windows" not in lowered(lambda x: call(x, "gpu"), mesh)


def test_handlers_learn_why_there_are_no_windows(mesh, windows, monkeypatch):
    windows(False)
    text = lowered(with_windows, mesh)
    assert 'jaxcomm_no_windows = "JAXCOMM_SYMMETRIC_BUFFERS is not 1 in all processes"' in text
    assert "memory_spaces" not in text
    assert "jaxcomm_operand_windows" in text
    windows(True)
    monkeypatch.setattr(_compat, "has_windows", lambda: False)
    assert 'jaxcomm_no_windows = "XLA has windows on its buffers from jax 0.12 on"' in lowered(with_windows, mesh)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"operand_windows": [2]}, IndexError, "operand_windows has 2, but the call has 2 operands"),
        ({"operand_windows": range(7)}, IndexError, "operand_windows has 6, but the call has 2 operands"),
        ({"result_windows": [0, 2]}, IndexError, "result_windows has 2, but the call has 2 results"),
        ({"operand_windows": [-1]}, ValueError, r"operand_windows must be different numbers from 0 on, got [-1]"),
        ({"result_windows": [1, 1]}, ValueError, "result_windows must be different numbers from 0 on, got [1, 1]"),
        *(
            ({"operand_windows": wrong}, TypeError, f"operand_windows must be a sequence of integers, got {wrong!r}")
            for wrong in ([0.0], 0, "0", [True], [np.True_], [None])
        ),
        ({"operand_windows": range(8)}, ValueError, "a call can have 8 windows, got 9"),
    ],
)
def test_windows_that_do_not_exist(mesh, options, error, message):
    with pytest.raises(error, match=re.escape(f"mine: {message}")):
        lowered(lambda x: with_windows(x, **options), mesh)


def test_calls_are_like_those_of_jax(mesh):
    """Results, effects, batches and errors are those of jax.ffi.ffi_call."""

    def program(body):
        return jax.jit(on_ranks(body, mesh, check_vma=False))

    def many(x, **options):
        types = (jax.ShapeDtypeStruct((3,), jnp.int8), jax.ShapeDtypeStruct(x.shape, x.dtype))
        return jaxcomm.ffi_call("mine", types, "gpu", **options)(x, x)

    small, same = jax.eval_shape(program(many), X)
    assert (small.shape, small.dtype, same.shape, same.dtype) == ((8, 3), jnp.int8, X.shape, X.dtype)
    assert lowered(many, mesh).count("stablehlo.custom_call @mine") == 1
    unused = lowered(lambda x: (many(x), x)[1], mesh)
    assert unused.count("stablehlo.custom_call @mine") == 1  # because of its side effect
    free = lowered(lambda x: (many(x, has_side_effect=False), x)[1], mesh)
    assert free.count("stablehlo.custom_call @mine") == 0
    assert "output_operand_alias" in lowered(lambda x: call(x, "gpu", input_output_aliases={0: 0}), mesh)
    batched = jax.eval_shape(
        program(lambda x: jax.vmap(lambda x: many(x, vmap_method="broadcast_all"), in_axes=1)(x.reshape(2, 2))), X
    )
    assert [y.shape for y in batched] == [(8, 2, 3), (8, 2, 2)]
    with pytest.raises(NotImplementedError, match="vmap"):
        lowered(lambda x: jax.vmap(lambda x: call(x, "gpu"))(x), mesh)
    with pytest.raises(ValueError, match=r"mine.* cannot be differentiated"):
        lowered(jax.grad(lambda x: call(x, "gpu").sum()), mesh)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_derivative_with_a_constant_operand_is_the_error_of_jax(mesh, dtype, check_vma):
    def loss(x):
        return jaxcomm.ffi_call("mine", jax.ShapeDtypeStruct((), jnp.float32), "gpu")(x, np.ones(3, dtype))

    f = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=P("gpu"), out_specs=P("gpu"), check_vma=check_vma))
    with pytest.raises(ValueError, match=r"mine.* cannot be differentiated"):
        f.trace(X)


def test_operands_that_vary_over_different_axes(mesh):
    """Which a custom call alone does not take."""

    def body(x, same):
        return jaxcomm.ffi_call("mine", jax.ShapeDtypeStruct((), jnp.float32), "gpu")(x, same, 1.0)

    for in_specs in ((P("gpu"), P()), (P(), P("gpu")), (P("gpu"), P("node"))):
        f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P()))
        assert groups(f.trace(X, X).lower(lowering_platforms=("cuda",)).as_text()) == [list(range(8))]


def test_invalid_calls_are_refused(mesh):
    def fails(error, match, body):
        with pytest.raises(error, match=match):
            lowered(body, mesh)

    fails(NameError, "mine: axis_name 'model' is not bound here", lambda x: call(x, "model"))
    fails(ValueError, "mine: max_sms must be a positive integer, got 0", lambda x: call(x, "gpu", max_sms=0))
    fails(ValueError, "mine: axis_index_groups .* exactly once", lambda x: call(x, "gpu", axis_index_groups=[[0]]))
    mapped = jax.vmap(lambda x: call(x, "i"), axis_name="i")
    fails(NotImplementedError, "mine: 'i' is an axis of vmap, expected a mesh axis", mapped)
    spec = P("gpu")
    f = jax.shard_map(lambda x: call(x, "gpu"), mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"gpu"})
    with pytest.raises(ValueError, match="mine: the mesh axis 'node' must be manual: name it in axis_names"):
        jax.jit(f).lower(X)


class Library:
    """A ctypes.CDLL with handlers, compiled with the headers of a version of jaxcomm, or with none of them."""

    _name = "mine.so"

    def __init__(self, version=None, uses_host_api=True):
        if uses_host_api:
            self.jaxcomm_use_host_api = lambda api: version

    def __getitem__(self, symbol):
        if symbol not in ("Begin", "Run"):
            raise AttributeError(f"undefined symbol: {symbol}")
        return symbol


@pytest.fixture
def registered(monkeypatch):
    """Records the registrations of a target on a machine with GPUs; with `gpus` false, there are none."""
    found = types.SimpleNamespace(gpus=True, calls=[])
    module = types.SimpleNamespace(
        host_api=lambda: 1,
        set_user_initialize=lambda name, handler: found.calls.append(("initialize", name, handler)),
        user_stages=lambda: {"instantiate": "ours"},
    )
    monkeypatch.setattr(_native, "cuda", lambda: module)
    monkeypatch.setattr(_native, "register_cuda", lambda: found.gpus)
    monkeypatch.setattr(ctypes, "cast", lambda handler, kind: types.SimpleNamespace(value=f"address of {handler}"))
    monkeypatch.setattr(jax.ffi, "pycapsule", lambda handler: f"capsule of {handler}")
    monkeypatch.setattr(
        jax.ffi, "register_ffi_target", lambda name, stages, platform: found.calls.append((name, stages, platform))
    )
    return found


def test_a_target_is_registered_where_there_are_gpus(registered):
    jaxcomm.register_ffi_target("mine", Library(), initialize="Begin", execute="Run")
    assert registered.calls == [
        ("initialize", "mine", "address of Begin"),
        ("mine", {"instantiate": "ours", "execute": "capsule of Run"}, "CUDA"),
    ]
    registered.gpus = False
    registered.calls.clear()
    jaxcomm.register_ffi_target("mine", Library(), initialize="Begin", execute="Run")
    assert registered.calls == []


@pytest.mark.parametrize(
    ("library", "execute", "error", "message"),
    [
        (Library(), "Stop", AttributeError, "undefined symbol: Stop"),
        (Library(uses_host_api=False), "Run", AttributeError, "mine.so was compiled without jaxcomm/host.h"),
        (Library(b"0.0.1"), "Run", RuntimeError, r"mine.so was compiled with the headers of jaxcomm 0\.0\.1, but"),
    ],
)
def test_libraries_that_are_refused(registered, library, execute, error, message):
    with pytest.raises(error, match=message):
        jaxcomm.register_ffi_target("mine", library, initialize="Begin", execute=execute)
    assert registered.calls == []
