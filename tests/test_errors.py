"""Invalid input raises an exception that names op and argument: when tracing if possible, else at run time."""

import atexit
import functools
import importlib.metadata
import importlib.util
import sys
import textwrap
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import OURS, on_ranks
from jax.sharding import PartitionSpec as P

from jaxcomm import _check, _compat, _core, _native
from jaxcomm._config import Config

X, KEY = np.zeros((8, 8, 6), np.float32), jax.random.key(0)
OPS = {
    "all_to_all": lambda x, axes, **kw: OURS.all_to_all(x, axes, 0, 0, tiled=True, **kw),
    "all_gather": OURS.all_gather,
    "psum": OURS.psum,
    "pmean": OURS.pmean,
    "pmax": OURS.pmax,
    "pmin": OURS.pmin,
    "psum_scatter": lambda x, axes, **kw: OURS.psum_scatter(x, axes, tiled=True, **kw),
    "ppermute": lambda x, axes, **kw: OURS.ppermute(x, axes, [(0, 1)], **kw),
    "pbroadcast": lambda x, axes, **kw: OURS.pbroadcast(x, axes, 0, **kw),
    "barrier": OURS.barrier,
}
GROUPED = [op for op in OPS if op not in ("ppermute", "pbroadcast")]


def ragged(x, y, axes):
    return OURS.ragged_all_to_all(x, y, *[jnp.zeros(4, int)] * 4, axis_name=axes)


MOVES = {
    "reshard_in": lambda x, axes: OURS.reshard_in(x, axes, P("gpu"), P()),
    "ragged_all_to_all": lambda x, axes: ragged(x, x, axes),
}


def fails(error, match, body, mesh):
    with pytest.raises(error, match=match):
        jax.jit(on_ranks(body, mesh)).lower(X)


@pytest.mark.parametrize("op", OPS)
def test_max_sms_that_is_not_a_positive_integer(op, mesh):
    for value in (0, -1, True, 2**31):
        message = f"{op}: max_sms must be a positive integer, got {value}"
        fails(ValueError, message, lambda x, value=value: OPS[op](x, "gpu", max_sms=value), mesh)
    fails(TypeError, f"{op}: max_sms must be an integer, got 1.5", lambda x: OPS[op](x, "gpu", max_sms=1.5), mesh)
    message = f"{op}: max_sms must be known when tracing"
    fails(TypeError, message, lambda x: OPS[op](x, "gpu", max_sms=x[0, 0].astype(int)), mesh)


def test_numbers_at_their_limits():
    assert [_check.number("f", "x", value, 1, 3) for value in (1, 3)] == [1, 3]
    assert [_check.whole("f", "x", value, 1, 3) for value in (1, 3)] == [1, 3]
    assert _check.max_sms("f", 2**31 - 1) == 2**31 - 1


@pytest.mark.parametrize("op", OPS)
def test_axis_names_that_are_not_bound(op, mesh):
    with pytest.raises(
        NameError, match=f"{op}: axis_name 'gpu' is not bound here: there is no enclosing jax.shard_map"
    ):
        jax.jit(lambda x: OPS[op](x, "gpu")).lower(X[0])
    message = rf"{op}: axis_name 'model' is not bound here: the axes of the enclosing shard_map are \('gpu',\)"
    with pytest.raises(NameError, match=message):
        f = jax.shard_map(lambda x: OPS[op](x, "model"), mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"gpu"})
        jax.jit(f).lower(X[0])


@pytest.mark.parametrize("op", OPS)
def test_algorithms_that_do_not_fit(op, mesh):
    at = rf"{op} at test_errors.py:\d+ .*"
    for algorithm, message in {
        "fast": f"{op}: unknown algorithm 'fast'; pass one of direct",
        "hierarchical": rf"{at}\"hierarchical\" needs several nodes of several ranks, got 1 nodes of 4",
        "multimem": rf"{at}\"multimem\" needs one node of GPUs with NVLink SHARP, got 1 nodes of 4 ",
    }.items():
        if algorithm in ("fast", *OURS.algorithms(op)):
            fails(ValueError, message, lambda x, a=algorithm: OPS[op](x, "gpu", algorithm=a), mesh)


@pytest.mark.parametrize("op", GROUPED)
def test_bad_groups(op, mesh):
    once = r"must have each index of 'gpu' \(0 to 3\) exactly once, got"
    for groups, error, message in (
        ([[0, 1]], ValueError, rf"{once} \(\(0, 1\),\)"),
        ([[0, 1], [1, 2]], ValueError, once),
        ([[0, 1, 2], [3]], ValueError, r".*equal sizes, got sizes \[3, 1\]"),
        (5, TypeError, "must be lists of ranks, got 5"),
        ([[0.0, 1.0], [2.0, 3.0]], TypeError, "must be an integer, got 0.0"),
    ):
        if "equal sizes" not in message or op not in ("psum", "pmax", "pmin"):
            call = lambda x, g=groups: OPS[op](x, "gpu", axis_index_groups=g)  # noqa: E731
            fails(error, f"{op}: axis_index_groups {message}", call, mesh)


@pytest.mark.parametrize("op", OPS)
def test_axis_names_that_are_none(op, mesh):
    call, twice = OPS[op], ("gpu", "gpu")
    message = rf"{op}: axis_name must have each axis at most once, got \('gpu', 'gpu'\)"
    fails(ValueError, message, lambda x: call(x, twice), mesh)
    fails(TypeError, f"{op}: axis_name must be a mesh axis or a tuple of them", lambda x: call(x, np.arange(2)), mesh)
    if op not in ("psum", "pmean", "pmax", "pmin"):  # which take dimensions as well
        fails(TypeError, f"{op}: axis_name must name mesh axes, got the integer 0", lambda x: call(x, (0, "gpu")), mesh)
    fails(TypeError, f"{op}: axis_name must be known when tracing", lambda x: call(x, x[0, 0]), mesh)


def test_what_excludes_groups(mesh):
    message = r"pmax: axis_index_groups can't be combined with array dimensions in axis_name, got \(0,\)"
    fails(ValueError, message, lambda x: OURS.pmax(x, ("gpu", 0), axis_index_groups=[[0, 1], [2, 3]]), mesh)
    fails(ValueError, "all_gather: to must be 'varying', .* got 'x'", lambda x: OURS.all_gather(x, "gpu", to="x"), mesh)
    message = "all_gather: to='invarying' can't be combined with axis_index_groups"
    call = lambda x: OURS.all_gather(x, "gpu", to="invarying", axis_index_groups=[[0, 1], [2, 3]])  # noqa: E731
    fails(NotImplementedError, message, call, mesh)


def test_what_an_axis_of_vmap_excludes(mesh):
    x, groups = np.zeros((4, 16, 6), np.float32), [[0, 1], [2, 3]]
    calls = [(op, "axis_index_groups", lambda x, op=op: OPS[op](x, "v", axis_index_groups=groups)) for op in GROUPED]
    for op in ("all_gather", "psum_scatter", "ppermute"):
        calls.append((op, r"further axes, got \('gpu', 'v'\)", lambda x, op=op: OPS[op](x, ("gpu", "v"))))
    for op, what, call in calls:
        message = f"{op}: an axis of vmap can't be combined with {what}"
        fails(NotImplementedError, message, lambda _, call=call: jax.vmap(call, axis_name="v")(x), mesh)


def test_sizes_that_do_not_divide(mesh):
    message = r"all_to_all: dimension split_axis=1 of an array of shape \(8, 6\) has size 6, .* 4 equal blocks"
    fails(ValueError, message, lambda x: OURS.all_to_all(x, "gpu", 1, 0, tiled=True), mesh)
    message = r"all_to_all: dimension split_axis=0 .* must have size 4, one per rank of 'gpu', unless tiled=True; got 8"
    fails(ValueError, message, lambda x: OURS.all_to_all(x, "gpu", 0, 0), mesh)
    message = r"psum_scatter: dimension scatter_dimension=1 .* has size 6"
    fails(ValueError, message, lambda x: OURS.psum_scatter(x, "gpu", scatter_dimension=1, tiled=True), mesh)


DIMENSIONS = {
    "all_gather: axis": lambda x, axis: OURS.all_gather(x, "gpu", axis=axis, tiled=True),
    "all_to_all: split_axis": lambda x, axis: OURS.all_to_all(x, "gpu", axis, 0, tiled=True),
    "all_to_all: concat_axis": lambda x, axis: OURS.all_to_all(x, "gpu", 0, axis, tiled=True),
    "psum_scatter: scatter_dimension": lambda x, axis: OURS.psum_scatter(x, "gpu", scatter_dimension=axis, tiled=True),
}
RANKS = {
    "pbroadcast: source": lambda x, rank: OURS.pbroadcast(x, "gpu", rank),
    "ppermute: perm": lambda x, rank: OURS.ppermute(x, "gpu", [(0, rank)]),
}


@pytest.mark.parametrize("name", [*DIMENSIONS, *RANKS])
def test_numbers_that_are_traced_or_out_of_range(mesh, name):
    call = (DIMENSIONS | RANKS)[name]
    fails(TypeError, f"{name} must be known", lambda x: call(x, x[0, 0].astype(jnp.int32)), mesh)
    for number in (2, 3, -3) if name in DIMENSIONS else ():
        message = f"{name}={number} is out of range for an array of 2 dimensions"
        fails(ValueError, message, lambda x, number=number: call(x[:, :4], number), mesh)


def test_dimensions_sharded_over_an_explicit_axis():
    """Splitting or joining such a dimension on each device separately would give wrong values."""
    mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    calls = {f"{name}=1": functools.partial(call, axis=1) for name, call in DIMENSIONS.items()}
    calls["reshard_in: x.shape=1"] = lambda x: MOVES["reshard_in"](x, "gpu")
    calls["ragged_all_to_all: operand=0"] = lambda x: ragged(x.T, jnp.zeros((8, 8)), "gpu")
    calls["ragged_all_to_all: output=0"] = lambda x: ragged(jnp.zeros((8, 8)), x.T, "gpu")
    for name, call in calls.items():
        with jax.set_mesh(mesh):
            x = jax.device_put(np.zeros((32, 8), np.float32), P("gpu", "node"))
            f = jax.shard_map(call, in_specs=P("gpu"), out_specs=P("gpu"), axis_names={"gpu"})
            message = f"{name.replace(': ', ': dimension ')} is sharded over the explicit mesh axis 'node'; reshard it"
            with pytest.raises(ValueError, match=message):
                jax.jit(f).lower(x)


def test_element_types(mesh):
    fails(TypeError, "pmax: x has element type complex64, which has no order", lambda x: OURS.pmax(x + 1j, "gpu"), mesh)
    message = "psum_scatter: x has element type bool, which can't be summed"
    fails(TypeError, message, lambda x: OURS.psum_scatter(x > 0, "gpu", tiled=True), mesh)
    for op, call in (OPS | MOVES).items():
        keys = lambda x, call=call: call(jax.random.split(KEY, 4), "gpu")  # noqa: E731
        fails(TypeError, f"{op}: x has element type key", keys, mesh)


def test_bad_permutations_and_sources(mesh):
    for perm, message in (
        ([(0, 1), (0, 2)], r"must have each source at most once, got sources \[0, 0\]"),
        ([(0, 1), (2, 1)], "must have each destination at most once"),
        ([(0, 4)], "must have destinations from 0 to 3"),
        ([(-1, 0)], "must have sources from 0 to 3"),
        ([(0, 1, 2)], r"must be a list of \(source, destination\) pairs, got \[\(0, 1, 2\)\]"),
    ):
        fails(ValueError, f"ppermute: perm {message}", lambda x, p=perm: OURS.ppermute(x, "gpu", p), mesh)
    for perm in (None, [0, 1], 5):
        fails(TypeError, "ppermute: perm must be a list", lambda x, p=perm: OURS.ppermute(x, "gpu", p), mesh)
    fails(TypeError, "pbroadcast: source must be an integer", lambda x: OURS.pbroadcast(x, "gpu", 1.5), mesh)
    for source in (4, -1):
        message = f"pbroadcast: source must be a rank from 0 to 3, got {source}"
        fails(ValueError, message, lambda x, source=source: OURS.pbroadcast(x, "gpu", source), mesh)


def test_what_has_no_arrays_and_no_derivative(mesh):
    fails(ValueError, "barrier: x has no arrays", lambda x: (OURS.barrier({}, "gpu"), x), mesh)
    maximum = jax.grad(lambda x: OURS.pmax(x, "gpu").sum())
    fails(NotImplementedError, "pmax at test_errors.py", maximum, mesh)


def test_the_native_module_gets_limit_and_devices(monkeypatch):
    limits, devices, heard, ended = [], [], [], []
    native = types.SimpleNamespace(
        cpu_state_type=dict, cpu_targets=dict, set_wait_limits=lambda *given: limits.append(given),
        start_completion_pool=devices.append, end_program=lambda: ended.append(True),
    )  # fmt: skip
    monkeypatch.setattr(_native, "_core", native)
    monkeypatch.setattr(_native, "config", lambda: Config(timeout_s=2.5, warn_s=1.5))
    monkeypatch.setattr(jax.ffi, "register_ffi_type", lambda *types, **platform: None)
    monkeypatch.setattr(jax.monitoring, "register_scalar_listener", lambda listener: None)
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", heard.append)
    _native.register.__wrapped__()
    assert (limits, devices) == ([(2.5, 1.5)], [jax.local_device_count()])
    (listener,) = heard
    listener("/jax/core/compile/jaxpr_trace_duration", 1.0)
    assert not ended
    listener("/jax/core/compile/backend_compile_duration", 1.0, fun_name="f")
    assert ended == [True]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_compilations_between_processes_of_cpus_take_turns(monkeypatch, num_processes, backend):
    """The end of one compilation would restart the numbering of call sites during another one."""
    event, ended, order = _native._COMPILE, [], []
    monkeypatch.setattr(_native, "_core", types.SimpleNamespace(end_program=lambda: ended.append(True)))
    monkeypatch.setattr(jax, "process_count", lambda: num_processes)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    compilations, second_began = _native._Compilations(), threading.Event()

    def second():
        compilations.begin(event, 1.0, fun_name="g")
        order.append("second begins")
        second_began.set()
        compilations.end(event, 1.0, fun_name="g")

    compilations.begin("/jax/core/compile/another", 1.0)
    compilations.begin(event, 1.0, fun_name="f")
    compilations.begin(event, 1.0, fun_name="within f")
    compilations.end(event, 1.0, fun_name="within f")
    thread = threading.Thread(target=second)
    thread.start()
    take_turns = num_processes == 2 and backend == "cpu"
    assert second_began.wait(0.2 if take_turns else 60) != take_turns
    order.append("first ends")
    compilations.end("/jax/core/compile/another", 1.0)
    compilations.end(event, 1.0, fun_name="f")
    thread.join(60)
    assert order == ["first ends", "second begins"][:: 1 if take_turns else -1]
    assert len(ended) == (2 if take_turns else 3)


def test_jax_reports_begin_and_end_of_compilations():
    """The serialization of compilations depends on these events."""
    events = []
    begins, ends = (
        lambda event, _, what=what, **more: events.append((what, event, threading.get_ident()))
        for what in ("begins", "ends")
    )
    jax.monitoring.register_scalar_listener(begins)
    jax.monitoring.register_event_duration_secs_listener(ends)
    try:
        jax.jit(lambda x: x * 3 + 7).lower(np.float32(1)).compile()
    finally:
        jax.monitoring.unregister_scalar_listener(begins)
        jax.monitoring.unregister_event_duration_listener(ends)
    own = [entry for entry in events if entry[1] == _native._COMPILE]
    assert own == [(what, _native._COMPILE, threading.get_ident()) for what in ("begins", "ends")]


WHEEL = """
    xla_ffi_api_version = {version!r}
    found = []
    calls = []
    def __getattr__(name):
        results = dict(failures=found, built=dict(cuda=13000), driver_version=13000)
        return lambda *given: calls.append((name, *given)) or results.get(name, dict())
"""


def test_check_asks_the_module_of_the_wheel(monkeypatch, tmp_path):
    """The wheel's module is jaxcomm_cuda13._cuda. check() raises its failures, every time."""
    package, version = tmp_path / "jaxcomm_cuda13", importlib.metadata.version("jaxcomm")
    info = tmp_path / f"jaxcomm_cuda13-{version}.dist-info"
    package.mkdir()
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jaxcomm-cuda13\nVersion: {version}\n")
    (package / "__init__.py").touch()
    (package / "_cuda.py").write_text(textwrap.dedent(WHEEL).format(version=_core.xla_ffi_api_version))
    find_spec, exits = importlib.util.find_spec, []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jaxcomm._cuda" else find_spec(name))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_native, "cuda", _native.cuda.__wrapped__)
    monkeypatch.setattr(_native, "_failures", list)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [])
    monkeypatch.setattr(_compat, "provides_communicators", lambda: True)
    monkeypatch.setattr(jax.ffi, "register_ffi_type", lambda *types, **platform: None)
    monkeypatch.setattr(atexit, "register", exits.append)
    OURS.check()  # no module, no failures
    assert _native.register_cuda.__wrapped__()
    module = sys.modules["jaxcomm_cuda13._cuda"]
    OURS.check()
    module.found += ["first", "second"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"\Ajaxcomm: first\njaxcomm: second\Z"):
            OURS.check()
    assert ("start_watchdog",) in module.calls
    for error in (False, True):  # peers of a process that ends by an exception must not wait for it
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
        if not error:
            monkeypatch.delattr(sys, "last_value")
        exits[-1]()
        assert module.calls[-1] == ("end_threads", not error)
