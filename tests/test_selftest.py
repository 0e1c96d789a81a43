"""python -m jaxcomm.selftest, the record that it leaves, and the default on GPUs that depends on the record."""

import json
import logging
import threading

import jax
import numpy as np
import pytest
from harness import OURS, on_ranks

import jaxcomm
from jaxcomm import _config, _lowering, _native, _selftest_record, selftest
from jaxcomm._core import plan
from jaxcomm._request import NATIVE

GPU_KEY = {
    "gpus": "NVIDIA H100", "hosts": "one", "driver": "580.65.06", "nccl": "23203", "built": "cuda=13000",
    "gin": "0", "jaxlib": "0.11.2", "jaxcomm": "0.1.0",
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_lowering, "_use_plans", False)


def run(tmp_path, *arguments):
    file = tmp_path / "selftest.json"
    status = selftest.main(["--json", str(file), "--sizes", "1K", *arguments])
    return status, json.loads(file.read_text())


def test_every_op_passes_here(tmp_path, capsys):
    status, found = run(tmp_path)
    assert status == found["status"] == 0
    assert found["result"].startswith(f"PASSED: {len(found['rows'])} tests on 8 devices in ")
    assert {row["op"] for row in found["rows"]} == set(NATIVE) | set(selftest.PROGRAMS)
    assert {row["type"] for row in found["rows"] if row["op"] == "psum"} == {"float32", "bfloat16", "int32"}
    assert [row["wrong"] for row in found["rows"]] == [0] * len(found["rows"])
    assert (found["platform"], found["devices"], found["processes"], found["recorded"]) == ("cpu", 8, 1, None)
    (row,) = (row for row in found["rows"] if (row["op"], row["type"]) == ("all_gather", "float32"))
    assert (row["size"], row["count"], row["redop"]) == (1024, 32, "none")  # as nccl-tests count
    assert row["algbw"] == pytest.approx(1024 / row["time_us"] / 1e3)
    assert row["busbw"] == pytest.approx(row["algbw"] * 7 / 8)
    text = capsys.readouterr().out.splitlines()
    assert text[1].split() == ["#op", "size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"]
    assert text[-1] == f"# {found['result']}"


@pytest.mark.parametrize("op", [op for op in NATIVE if op not in selftest.PROGRAMS])
def test_a_wrong_result_is_found(op, tmp_path, monkeypatch):
    right = getattr(jaxcomm, op)
    monkeypatch.setattr(jaxcomm, op, lambda x, *args, **more: right(x, *args, **more).at[-1].add(1))
    monkeypatch.setattr(selftest, "PROGRAMS", {})
    monkeypatch.setattr(selftest, "_DTYPES", ("float32",))
    status, found = run(tmp_path, "--ops", op)
    assert status == selftest.FAILED
    assert found["result"] == f"FAILED: 1 of 1 tests, in {op}"
    assert found["rows"][0]["wrong"] == 8  # one element of each device


@pytest.mark.parametrize("name", selftest.PROGRAMS)
def test_a_wrong_program_is_found(name, tmp_path, monkeypatch):
    program = selftest.PROGRAMS[name]
    monkeypatch.setattr(
        selftest, "PROGRAMS", {name: lambda lib, x, axes: program(lib, x, axes) + (1 if lib is jaxcomm else 0)}
    )
    status, found = run(tmp_path, "--ops", "barrier")
    assert (status, found["result"]) == (selftest.FAILED, f"FAILED: 1 of 2 tests, in {name}")


def test_an_exception_is_a_failure_and_the_other_ops_are_tested(tmp_path, monkeypatch):
    def fail(*args, **more):
        raise RuntimeError("no way\nmore")

    monkeypatch.setattr(jaxcomm, "pmin", fail)
    monkeypatch.setattr(selftest, "PROGRAMS", {})
    status, found = run(tmp_path, "--ops", "pmin", "barrier")
    assert status == selftest.FAILED
    assert [row["error"] for row in found["rows"]] == ["RuntimeError: no way"] * 3 + [""]


def test_time_that_runs_out_between_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(selftest, "_SHARE", 0)
    status, found = run(tmp_path)
    assert (status, found["rows"]) == (selftest.INCOMPLETE, [])
    assert found["result"] == "INCOMPLETE: 0 tests passed before the time ran out"


def test_a_test_that_does_not_end(tmp_path, monkeypatch):
    ended = threading.Event()
    statuses = []
    monkeypatch.setattr(selftest.os, "_exit", lambda status: (statuses.append(status), ended.set()))
    monkeypatch.setattr(selftest.faulthandler, "dump_traceback", lambda all_threads: None)

    def hang(report, *_):
        report.current = "psum of 8 bytes"
        assert ended.wait(60)
        return 0

    monkeypatch.setattr(selftest, "run", hang)
    file = tmp_path / "selftest.json"
    selftest.main(["--json", str(file), "--timeout", "0.2"])
    assert statuses == [selftest.TIMED_OUT]
    found = json.loads(file.read_text())
    assert found["result"] == "FAILED: psum of 8 bytes did not end within 0.2 s"


def test_arguments(monkeypatch, capsys):
    for arguments in (["--sizes", "0"], ["--sizes", "1X"], ["--ops", "nothing"]):
        with pytest.raises(SystemExit, match="2"):
            selftest.main(arguments)
    monkeypatch.setattr(_config, "config", lambda: _config.Config(algorithm="xla"))
    with pytest.raises(SystemExit, match="2"):
        selftest.main([])
    assert "JAXCOMM_ALGORITHM=xla" in capsys.readouterr().err


class Gpu:
    platform = "gpu"
    device_kind = "NVIDIA H100"

    def __init__(self, slice_index):
        self.slice_index = slice_index


class Module:
    driver_version = staticmethod(lambda: 13000)
    nccl = staticmethod(lambda wheel: {"version": 23203})
    built = staticmethod(lambda: {"cuda": 13000, "nccl": 23203})


def test_the_key_of_the_record(monkeypatch, tmp_path):
    assert _selftest_record.key() is None  # no GPU
    gpus = [Gpu(0), Gpu(0)]
    monkeypatch.setenv("NCCL_GIN_ENABLE", "0")
    monkeypatch.setattr(jax, "devices", lambda platform: gpus)
    monkeypatch.setattr(_native, "cuda", Module)
    monkeypatch.setattr(_selftest_record, "_DRIVER", tmp_path / "version")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06  Release Build\n")
    key = _selftest_record.key()
    assert key == GPU_KEY | {
        "built": "cuda=13000 nccl=23203", "jaxlib": jax.lib.__version__, "jaxcomm": jaxcomm.__version__,
    }  # fmt: skip
    (tmp_path / "version").unlink()
    assert _selftest_record.key() == key | {"driver": "13000"}
    monkeypatch.delenv("NCCL_GIN_ENABLE")
    assert _selftest_record.key() == key | {"driver": "13000", "gin": ""}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert _selftest_record.key()["hosts"] == "one"
    gpus[1].slice_index = 1
    assert _selftest_record.key()["hosts"] == "several"
    gpus[:] = [Gpu(None)]
    assert _selftest_record.key()["hosts"] == "several"  # unknown


def test_the_record_counts_for_equal_versions_only(monkeypatch):
    own = dict(GPU_KEY)
    monkeypatch.setattr(_selftest_record, "key", lambda: own)
    passed = _selftest_record.passed.__wrapped__
    assert not passed()
    file = _selftest_record.save(GPU_KEY | {"driver": "570"})
    assert file == _selftest_record.path() and not passed()
    _selftest_record.save(GPU_KEY)
    _selftest_record.save(GPU_KEY)
    assert passed() and len(json.loads(file.read_text())["passed"]) == 2
    for name, value in GPU_KEY.items():
        own[name] = value + "1"
        assert not passed(), name
        own[name] = value
    for text in ("", "[]", '{"format": 0, "passed": [{}]}', '{"format": 1, "passed": 1}'):
        file.write_text(text)
        assert not passed()
    monkeypatch.setattr(_selftest_record, "key", lambda: None)
    file.write_text('{"format": 1, "passed": [null]}')
    assert not passed()


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_the_record_is_written_after_all_ops_on_several_gpus(monkeypatch, complete, count):
    report = selftest.Report(None, 1)
    assert selftest._passed(report, [Gpu(0)] * count, GPU_KEY, complete, False) == 0
    recorded = complete and count > 1
    assert (GPU_KEY in _selftest_record._keys()) == recorded
    assert not _selftest_record._keys("between_nodes")
    assert report.facts.get("recorded") == (str(_selftest_record.path()) if recorded else None)


NO_GIN = "INVALID_ARGUMENT: jaxcomm: moe.dispatch at f.py:3: several nodes of 4 ranks, and there is no GIN between them"


def test_the_record_of_experts_between_nodes(monkeypatch):
    several = GPU_KEY | {"hosts": "several"}
    monkeypatch.setattr(_selftest_record, "key", lambda: several)
    passed = _selftest_record.passed_between_nodes.__wrapped__
    assert not passed()
    _selftest_record.save(several)
    assert not passed()  # without GIN
    selftest._passed(selftest.Report(None, 1), [Gpu(0), Gpu(1)], several, True, True)
    assert passed() and _selftest_record.passed.__wrapped__()
    _selftest_record.save(GPU_KEY, between_nodes=True)
    assert passed()
    _selftest_record.save(several)  # a later self-test finds no GIN
    assert not passed() and several in _selftest_record._keys()


@pytest.fixture
def nodes(monkeypatch):
    """Runs the tests between nodes only, on devices that the record takes for GPUs of several hosts."""
    several = GPU_KEY | {"hosts": "several"}

    def run(limit_s=1):
        report = selftest.Report(None, limit_s)
        return report, selftest.run(report, [Gpu(0), Gpu(1)], (1,), tuple(selftest.OPS))

    run.key = several
    monkeypatch.setattr(selftest, "tests", lambda *args: iter(()))
    monkeypatch.setattr(selftest, "_facts", lambda devices: {"jaxcomm": "", "jaxlib": ""})
    monkeypatch.setattr(_selftest_record, "key", lambda: run.key)
    return run


def fail_by(monkeypatch, error):
    def fail(row, *_):
        row.wrong = 0
        if error:
            raise error

    monkeypatch.setattr(selftest, "_find_nodes", fail)
    monkeypatch.setattr(selftest, "_test_program", fail)


@pytest.mark.parametrize("error", [None, selftest._NotBetweenNodes("one node")])
def test_experts_between_nodes(monkeypatch, capsys, nodes, error):
    """With NVLink between the hosts, the self-test passes, and records nothing about nodes."""
    fail_by(monkeypatch, error)
    report, status = nodes()
    assert (status, len(report.rows)) == (selftest.PASSED, 0 if error else 4)
    assert _selftest_record._keys() == [nodes.key]
    assert _selftest_record._keys("between_nodes") == ([] if error else [nodes.key])
    out = capsys.readouterr().out
    assert ("# one node" in out) == (error is not None)


@pytest.mark.parametrize("hosts", ["one", "several"])
def test_without_gin_no_plan_runs_between_nodes(monkeypatch, capsys, nodes, hosts):
    """An earlier pass inside the nodes stays, and this run records none. On one host, the error is a failure."""

    def fail():
        raise RuntimeError(NO_GIN)

    nodes.key = GPU_KEY | {"hosts": hosts}
    psum = selftest.Row("psum", 4, 1, "int32", "sum")
    monkeypatch.setattr(selftest, "tests", lambda *args: iter([(psum, fail)]))
    several = hosts == "several"
    assert (nodes()[1] == selftest.PASSED) == several
    assert _selftest_record._keys() == []
    _selftest_record.save(nodes.key, True)
    assert (nodes()[1] == selftest.PASSED) == several
    assert (_selftest_record._keys(), _selftest_record._keys("between_nodes")) == ([nodes.key] if several else [], [])
    assert ("no plans between nodes" in capsys.readouterr().out) == several


def test_a_wrong_result_fails_also_without_gin(monkeypatch, nodes):
    wrong = selftest.Row("psum", 4, 1, "int32", "sum", wrong=1)
    monkeypatch.setattr(selftest, "tests", lambda *args: iter([(wrong, lambda: None)]))
    fail_by(monkeypatch, RuntimeError(NO_GIN))
    _selftest_record.save(nodes.key, True)
    assert (nodes()[1], _selftest_record._keys()) == (selftest.FAILED, [])


def test_only_groups_of_several_hosts_test_experts_between_nodes(monkeypatch, nodes):
    fail_by(monkeypatch, None)
    nodes.key = GPU_KEY
    report, status = nodes()
    assert (status, report.rows, _selftest_record._keys("between_nodes")) == (selftest.PASSED, [], [])


def test_experts_between_nodes_obey_the_time_limit(monkeypatch, nodes):
    fail_by(monkeypatch, None)
    monkeypatch.setattr(selftest, "_SHARE", 0)
    report, status = nodes()
    assert (status, report.rows, _selftest_record._keys()) == (selftest.INCOMPLETE, [], [])


def test_a_failure_revokes_the_record(monkeypatch, nodes):
    """Between nodes, it leaves the record of the other collectives."""
    other = GPU_KEY | {"driver": "570"}
    _selftest_record.save(other, True)
    _selftest_record.save(nodes.key, True)
    fail_by(monkeypatch, RuntimeError("another\nmore"))
    report, status = nodes()
    assert (status, {row.error for row in report.rows}) == (selftest.FAILED, {"RuntimeError: another"})
    assert (_selftest_record._keys(), _selftest_record._keys("between_nodes")) == ([other, nodes.key], [other])
    wrong = selftest.Row("psum", 4, 1, "int32", "sum", wrong=1)
    monkeypatch.setattr(selftest, "tests", lambda *args: iter([(wrong, lambda: None)]))
    fail_by(monkeypatch, None)
    _selftest_record.save(nodes.key, True)
    assert nodes()[1] == selftest.FAILED
    assert _selftest_record._keys() == _selftest_record._keys("between_nodes") == [other]
    assert nodes()[1] == selftest.FAILED  # without a record


def test_a_test_that_does_not_end_revokes_the_record(monkeypatch):
    monkeypatch.setattr(selftest.os, "_exit", lambda status: None)
    monkeypatch.setattr(selftest.faulthandler, "dump_traceback", lambda all_threads: None)
    _selftest_record.save(GPU_KEY, True)
    report = selftest.Report(None, 1)
    report.key, report.current = GPU_KEY, selftest.Row("moe", 4, 1, "float32", "sum")
    report.time_out()
    assert (_selftest_record._keys(), _selftest_record._keys("between_nodes")) == ([GPU_KEY], [])


@pytest.mark.parametrize("algorithm", [None, "hierarchical"])
def test_the_result_of_experts(monkeypatch, algorithm):
    """By the definition, on this machine; the kernels between nodes are tested in tests/cuda."""
    monkeypatch.setattr(selftest, "_BETWEEN_NODES", algorithm)
    found = list(selftest._tests_between_nodes(jax.devices()))
    for row, fill in found:
        fill()
        assert row.wrong == 0
    assert [row.type for row, _ in found] == ["bfloat16", "float32", "bfloat16", "bfloat16"]


def test_wrong_experts_are_found(monkeypatch):
    monkeypatch.setattr(selftest, "_BETWEEN_NODES", None)
    right, reduces = jaxcomm.moe.combine, []

    def wrong(rows, routing, weights, **more):
        reduces.append(routing.reduce)
        return right(rows, routing, **more)

    monkeypatch.setattr(jaxcomm.moe, "combine", wrong)
    for row, fill in selftest._tests_between_nodes(jax.devices()):
        fill()
        assert row.wrong > 0
    assert list(dict.fromkeys(reduces)) == ["node", "home"]


def test_one_node_is_found(monkeypatch):
    """The kernels add the rows of a node before those of the next one: one node has other sums."""
    monkeypatch.setattr(selftest, "_BETWEEN_NODES", None)
    right = jaxcomm.moe.route
    monkeypatch.setattr(jaxcomm.moe, "route", lambda *args, **more: right(*args, **more | {"reduce": "home"}))
    _, fill = next(selftest._tests_between_nodes(jax.devices()))
    with pytest.raises(selftest._NotBetweenNodes, match="NVLink connects all GPUs"):
        fill()


def test_experts_between_gpus_occupy_many_thread_blocks():
    """A thread block takes at least 128 bytes of every row, and 32 rows are few for signals and arenas."""
    tokens, width = selftest._WIDE["gpu"]
    *_, (node, _), (home, _) = selftest._tests_between_nodes([Gpu(0), Gpu(1)])
    assert (tokens >= 1024, 2 * width >= 8 << 10) == (True, True)
    assert node.size == home.size == tokens * width * 2


def test_the_default_on_gpus(monkeypatch, mesh, caplog):
    """XLA's own collective until the self-test has passed; one line says how to change that."""
    jax.clear_caches()
    _lowering._log.cache_clear()
    monkeypatch.setattr(_selftest_record, "passed", lambda: False)
    monkeypatch.setattr(_lowering, "config", _config.Config)
    x = np.zeros((8, 16), np.float32)
    with caplog.at_level(logging.WARNING, "jaxcomm"):
        for op in ("all_gather", "psum"):
            f = jax.jit(on_ranks(lambda x, op=op: getattr(OURS, op)(x, "gpu"), mesh))
            assert "custom_call @jaxcomm" not in f.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    (message,) = caplog.messages
    assert "run `python -m jaxcomm.selftest`" in message and "JAXCOMM_ALGORITHM=plans" in message

    def why_xla(platform, algorithm=None):
        return plan.why_xla(algorithm or "", _lowering.capabilities(platform, algorithm))

    assert "self-test has not passed" in why_xla("cuda") and not why_xla("cuda", "direct") and not why_xla("cpu")
    monkeypatch.setattr(_lowering, "config", lambda: _config.Config(algorithm="plans"))
    assert not why_xla("cuda")
    monkeypatch.setattr(_lowering, "config", _config.Config)
    monkeypatch.setattr(_selftest_record, "passed", lambda: True)
    assert not why_xla("cuda")
    monkeypatch.setattr(_selftest_record, "passed", lambda: False)
    _lowering.use_plans()
    assert not why_xla("cuda")
    jax.clear_caches()
