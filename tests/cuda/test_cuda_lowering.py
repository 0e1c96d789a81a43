"""Lowering for GPUs: one custom call per op, with the attributes that the handlers in ffi/cuda read."""

import functools
import re
import types

import jax
import numpy as np
import pytest
from harness import OURS, on_ranks

from jaxcomm import _compat, _config, _lowering, _native, _selftest_record
from jaxcomm._processes import bootstrap, kv_store, placement

X = np.zeros((8, 16, 4), np.float32)

# Call on one device's (16, 4); FFI target; attributes of the custom call besides the common ones.
OPS = {
    "all_to_all": (
        lambda x, **k: OURS.all_to_all(x, "gpu", 0, 1, tiled=True, **k),
        {"input_contiguous_count": 16, "output_contiguous_count": 4},
    ),
    "all_gather": (lambda x, **k: OURS.all_gather(x, "gpu", axis=1, tiled=True, **k), {"output_contiguous_count": 4}),
    "psum": (lambda x, **k: OURS.psum(x, "gpu", **k), {"reduce_op": 0}),
    "pmax": (lambda x, **k: OURS.pmax(x, "gpu", **k), {"reduce_op": 1}),
    "pmin": (lambda x, **k: OURS.pmin(x, "gpu", **k), {"reduce_op": 2}),
    "psum_scatter": (
        lambda x, **k: OURS.psum_scatter(x, "gpu", scatter_dimension=0, tiled=True, **k),
        {"input_contiguous_count": 16, "reduce_op": 0},
    ),
    "ppermute": (lambda x, **k: OURS.ppermute(x, "gpu", [(0, 1), (1, 2)], **k), {"source_of": "-1, 0, 1, -1"}),
    "pbroadcast": (lambda x, **k: OURS.pbroadcast(x, "gpu", 2, **k), {"root": 2}),
    "barrier": (lambda x, **k: OURS.barrier(x, "gpu", **k), {}),
}
TARGETS = {
    "psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "psum_scatter": "reduce_scatter",
    "ppermute": "permute",
    "pbroadcast": "broadcast",
}


def gpus(count):
    """A mesh of GPUs, with the attributes that lowering reads; two GPUs per process."""
    numbers = (divmod(i, 2) for i in range(count))
    found = [types.SimpleNamespace(platform="gpu", process_index=p, local_hardware_id=d) for p, d in numbers]
    return object.__new__(type("Mesh", (jax.sharding.Mesh,), {"devices": np.array(found)}))


def lowered(f, mesh, platforms=("cuda",)):
    return jax.jit(on_ranks(f, mesh)).trace(X[: mesh.size]).lower(lowering_platforms=platforms).as_text()


def test_every_collective_is_tried():
    others = {"all_to_all_v", "dispatch", "combine", "done", "moe_one_shot"}
    assert {TARGETS.get(op, op) for op in OPS} | others == {
        name.removeprefix("jaxcomm_") for name in _native.cuda().cuda_targets() if not name.endswith("_eager")
    }


@pytest.mark.parametrize("op", OPS)
def test_one_call_with_the_attributes_that_the_handler_reads(mesh, op):
    f, expected = OPS[op]
    text = lowered(f, mesh)
    calls = re.findall(r"stablehlo\.custom_call @(jaxcomm_\w+)\((.*?)\)(.*)", text)
    assert [target for target, _, _ in calls] == [f"jaxcomm_{TARGETS.get(op, op)}"]
    ((_, operands, attributes),) = calls
    assert len(operands.split(",")) == 2, "the rank and x"
    assert re.search(r"groups = dense<\[0, 1, 2, 3, 4, 5, 6, 7\]> : tensor<8xi64>", attributes)
    call = re.search(r"call = \{(.*?)\}", attributes)[1]
    assert "group_size = 4 : i64" in call
    assert "ranks_per_node = 4 : i64" in call
    assert "max_sms = 0 : i64" in call
    assert f'op = "{op}"' in call
    assert re.search(r'site = "[^"]*test_cuda_lowering\.py:\d+ ', call)
    assert 'algorithm = ""' in call
    assert "processes" not in attributes
    assert "has_side_effect = true" in attributes
    for name, value in expected.items():
        written = f"dense<[{value}]>" if isinstance(value, str) else value
        assert f"{name} = {written}" in attributes, name
    assert ("output_operand_aliases" in attributes) == (op == "barrier")


@pytest.mark.parametrize(
    ("hosts", "node_id", "expected"),
    [
        ([0, 0, 0, 0], None, ""),
        ([0, 0, 1, 1], None, "_eager"),
        ([None] * 4, None, "_eager"),  # a version of JAX that doesn't know hosts
        ([0, 0, 0, 0], "name", "_eager"),
    ],
)
def test_calls_between_hosts_are_not_for_cuda_graphs(monkeypatch, hosts, node_id, expected):
    """Two processes of two GPUs each."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(placement, "config", lambda: _config.Config(node_id=node_id))
    several = gpus(4)
    for gpu, host in zip(several.devices, hosts, strict=True):
        if host is not None:
            gpu.slice_index = host
    whole, halves = np.array([[0, 1, 2, 3]]), np.array([[0, 1], [2, 3]])
    assert placement.gpus_are_on_one_host(several, whole) == (not expected)
    assert placement.gpus_are_on_one_host(several, halves) == (node_id is None)
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    assert placement.gpus_are_on_one_host(several, whole)


@pytest.mark.parametrize("op", OPS)
def test_max_sms(op, mesh):
    """Includes the calls made by derivatives and batching, on both platforms."""
    f = functools.partial(OPS[op][0], max_sms=3)
    found = re.findall(
        r"max_sms = (\d+) : i64",
        lowered(lambda x: jax.vmap(f)(jax.numpy.stack([x, x])), mesh, platforms=("cpu", "cuda")),
    )
    assert found == ["3", "3"]
    if op in ("pmax", "pmin"):  # without a derivative
        return
    text = lowered(lambda x: jax.grad(lambda x: (f(x) ** 2).sum())(x), mesh)
    found = re.findall(r"max_sms = (\d+) : i64", text)
    assert found == ["3"] * (1 if op in ("psum", "barrier") else 2)


@pytest.mark.parametrize("passed", [True, False])
def test_calls_that_have_not_passed_in_cuda_graphs_stay_out_of_them(monkeypatch, mesh, passed):
    jax.clear_caches()
    monkeypatch.setattr(_lowering, "by_record", lambda platform, algorithm: True)
    monkeypatch.setattr(_selftest_record, "passed_in_graphs", lambda: passed)
    text = lowered(functools.partial(OPS["all_gather"][0], algorithm="direct"), mesh)
    assert re.findall(r"custom_call @jaxcomm_(\w+)", text) == ["all_gather" if passed else "all_gather_eager"]
    jax.clear_caches()


def test_the_setting_limits_multiprocessors(monkeypatch):
    """JAXCOMM_MAX_SMS."""
    monkeypatch.setattr(_lowering, "config", lambda: _config.Config(max_sms=7))
    monkeypatch.setattr(_lowering.plan, "Capabilities", lambda *args, **fields: fields)
    assert _lowering.capabilities("cuda", "direct")["max_channels"] == 7


def test_buffers_in_collective_memory(mesh, monkeypatch):
    """JAXCOMM_SYMMETRIC_BUFFERS=1, from jax 0.12 on, on GPUs: operand 1, which follows the rank, and the result."""
    wanted = 'mhlo.frontend_attributes = {operands_memory_spaces = "{1:1}", results_memory_spaces = "{0:1}"}'
    for version, on in (("0.12.0.1", True), ("0.12.0.1", False), ("0.11.2", True)):
        jax.clear_caches()  # lowerings without the setting
        monkeypatch.setattr(bootstrap, "config", lambda on=on: _config.Config(symmetric_buffers=on))
        monkeypatch.setattr(_compat.jaxlib, "__version__", version)
        for op, (f, _) in OPS.items():
            text = lowered(f, mesh, platforms=("cpu", "cuda"))
            (_, of_cpu), (_, of_cuda) = sorted(
                (text.index(call), call) for call in re.findall(r"custom_call @jaxcomm_.*", text)
            )
            if "processes" not in of_cpu:
                of_cpu, of_cuda = of_cuda, of_cpu
            windows = on and version == "0.12.0.1"
            assert ("symmetric_buffers = 1 : i64" in of_cuda) == windows and "symmetric_buffers" not in of_cpu
            assert (wanted in of_cuda) == (windows and op != "barrier"), op
            assert text.count("memory_spaces") == 2 * (windows and op != "barrier"), "of other operations"
    jax.clear_caches()


def test_processes_of_gpus_are_an_attribute_unless_other_gpus_may_run_the_program(mesh, monkeypatch):
    monkeypatch.setattr(placement, "gpu_processes", lambda mesh, rows: rows.reshape(-1).astype(np.int32) // 4)
    f = on_ranks(lambda x: OURS.psum(x, "node"), mesh)
    attribute = "processes = dense<[0, 1, 0, 1, 0, 1, 0, 1]> : tensor<8xi32>"
    assert attribute in lowered(lambda x: OURS.psum(x, "node"), mesh)
    checks = [jax.export.DisabledSafetyCheck.custom_call("jaxcomm_all_reduce")]
    exported = jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=checks)(X[: mesh.size])
    assert "custom_call @jaxcomm_all_reduce" in exported.mlir_module()
    assert "processes = dense" not in exported.mlir_module()
    monkeypatch.setattr(placement, "gpu_processes", lambda mesh, rows: None)
    assert "processes = dense" not in lowered(lambda x: OURS.psum(x, "node"), mesh)


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [(True, "1 1", True), (True, "0 1", False), (True, "1 0", False), (False, "1 1", False)],
)
def test_windows_are_wanted_by_all_or_made_for_none(monkeypatch, own, others, expected):
    """XLA would wait forever for a process that does not request a communicator."""
    of_others = dict(zip((0, 2), others.split(), strict=True))
    said, asked = {}, []

    def fetch(key, process):
        asked.append((key, process))
        return of_others[process]

    monkeypatch.setattr(bootstrap, "_symmetric_buffers", {})
    monkeypatch.setattr(kv_store, "kv_set", said.__setitem__)
    monkeypatch.setattr(kv_store, "kv_get_of_process", fetch)
    monkeypatch.setattr(bootstrap, "config", lambda: _config.Config(symmetric_buffers=own))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    for _ in range(2):
        assert bootstrap.symmetric_buffers(gpus(6)) == expected
    assert said == {"symmetric_buffers/1": str(int(own))}
    assert asked == ([("symmetric_buffers", 0), ("symmetric_buffers", 2)] if own else []), (
        "each once, and not of process 3"
    )


def test_algorithms(mesh):
    """NCCL finds nodes and multimem at run time: declared axes have no effect, and a plan for several nodes may fit."""
    text = lowered(lambda x: OURS.psum(x, ("node", "gpu")), mesh)
    assert "group_size = 8 : i64" in text and "ranks_per_node = 8 : i64" in text
    for op, (f, _) in OPS.items():
        if op != "ppermute":
            assert 'algorithm = "hierarchical"' in lowered(functools.partial(f, algorithm="hierarchical"), mesh)
        if "multimem" not in OURS.algorithms(op):
            continue
        g = functools.partial(f, algorithm="multimem")
        assert 'algorithm = "multimem"' in lowered(g, mesh)
        message = (
            rf"{op} at .*: algorithm \"multimem\" needs one node of GPUs with NVLink SHARP, got 1 nodes of 4 ranks w"
        )
        with pytest.raises(ValueError, match=message):
            lowered(g, mesh, platforms=("cpu",))
    with pytest.raises(ValueError, match=r"psum at .*: algorithm \"hierarchical\" needs several nodes"):
        lowered(lambda x: OURS.psum(x, "node", algorithm="hierarchical"), mesh)  # two ranks


@pytest.mark.parametrize("op", [op for op in OPS if op != "ppermute"])
def test_a_group_of_one_is_called_only_when_an_algorithm_is_asked_for(op):
    one = jax.make_mesh((1,), ("gpu",), axis_types=(jax.sharding.AxisType.Auto,))
    f = OPS[op][0] if op != "pbroadcast" else lambda x, **k: OURS.pbroadcast(x, "gpu", 0, **k)
    assert "jaxcomm_" not in lowered(f, one).replace("jit_jaxcomm", "")
    text = lowered(functools.partial(f, algorithm="direct"), one)
    assert len(re.findall(r"custom_call @jaxcomm_", text)) == 1
