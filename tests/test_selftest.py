"""python -m jaxcomm.selftest, and the record that it leaves."""

import dataclasses
import json
import threading
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxcomm
from jaxcomm import _config, _lowering, _native, _request, _selftest_record, selftest
from jaxcomm._request import NATIVE
from jaxcomm._selftest_record import GRAPHS, PLANS, PROGRAMS, TYPES, Row

GPU_KEY = {
    "gpus": "NVIDIA H100", "hosts": "one", "network": "mlx5_0", "driver": "580.65.06", "nccl": "23203",
    "built": "cuda=13000 nccl=23203", "settings": "NCCL_GIN_ENABLE=0", "jaxlib": "0.11.2", "jaxcomm": "0.1.0",
}  # fmt: skip
CACHED = (_selftest_record.own_rows, _selftest_record.measured, _selftest_record.measured_one_exchange)


def forget():
    for cached in CACHED:
        cached.cache_clear()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_lowering, "_use_plans", False)
    forget()
    yield
    forget()


def run(tmp_path, *arguments):
    file = tmp_path / "selftest.json"
    status = selftest.main(["--json", str(file), "--sizes", "1K", "--timeout", "1000", *arguments])
    return status, json.loads(file.read_text())


# The command, on CPU devices.


def test_values_on_ranks_of_other_processes_count(monkeypatch):
    """The first process writes the record that counts."""
    (group, _), *_ = selftest._groups(jax.devices(), [8])
    row, fill = next(test for test in selftest.tests(group, 8, "gpu", (1024,), ["psum"]) if test[0].feature == TYPES)
    array, right = type(jnp.zeros(1)), jaxcomm.psum
    shards = array.addressable_shards
    monkeypatch.setattr(array, "addressable_shards", property(lambda y: shards.__get__(y)[:4]))
    monkeypatch.setattr(jaxcomm, "psum", lambda x, axis: right(x, axis) + (lax.axis_index(axis) == 7).astype(x.dtype))
    fill()
    values = sum(4096 // jnp.dtype(name).itemsize for name in row.dtype.split(","))
    assert 0.99 * values < row.wrong <= values  # rounding hides 1 in some sums of 8 bits


RAN = ("psum", "pbroadcast", "all_gather", "psum_scatter")


def test_every_op_passes_here(tmp_path, capsys):
    status, found = run(tmp_path)
    assert status == found["status"] == 0
    assert found["result"].startswith(f"PASSED: {len(found['rows'])} tests on 8 devices in ")
    assert {row["op"] for row in found["rows"]} >= set(NATIVE) | set(selftest.ALL_PROGRAMS)
    assert [row["wrong"] for row in found["rows"]] == [0] * len(found["rows"])
    assert (found["platform"], found["devices"], found["processes"], found["recorded"]) == ("cpu", 8, 1, None)
    rows = {(row["feature"], row["op"]): row for row in found["rows"]}
    assert {op for feature, op in rows if feature == TYPES} == set(NATIVE) - {"barrier", "ragged_all_to_all"}
    assert rows[TYPES, "psum"]["dtype"].count(",") >= 11 and "bool" not in rows[TYPES, "psum"]["dtype"]
    with jax.enable_x64(True):
        assert {"int64", "uint64", "float64", "complex128"} < {*selftest._dtypes(selftest.OPS["psum"], 8)}
    timed = {op: row for (feature, op), row in rows.items() if feature == PLANS}
    assert {NATIVE[op] for op in timed} == set(NATIVE.values()) - {"all_to_all_v"}
    # 1 KiB as nccl-tests count: of the whole result of all_gather.
    assert [timed[op]["bytes"] for op in ("all_to_all", "all_gather", "psum_scatter")] == [1024, 128, 1024]
    assert all(row["jaxcomm_us"] > 0 and row["xla_us"] > 0 for row in timed.values())
    ran = {op: jaxcomm.explain(op, jax.ShapeDtypeStruct((timed[op]["bytes"] // 4,), "float32"), 8) for op in RAN}
    assert {op: timed[op]["ran"] for op in RAN} == {op: told.algorithm for op, told in ran.items()}
    assert len({timed[op]["ran"] for op in RAN}) > 1
    text = capsys.readouterr().out.splitlines()
    assert text[1].split() == ["#op", "ranks", "bytes", "type", "jaxcomm", "XLA", "wrong", "faster", "algorithms"]
    assert text[-1] == f"# {found['result']}"


def test_groups_smaller_than_the_program(tmp_path, monkeypatch):
    status, found = run(tmp_path, "--ranks", "2", "4", "--ops", "all_gather")
    assert (status, {row["ranks"] for row in found["rows"]}) == (0, {2, 4})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        selftest, "Mesh", lambda devices, *_, **__: types.SimpleNamespace(shape={"i": devices.shape[1]})
    )
    hosts = [Gpu(gpu % 2) for gpu in range(6)]
    assert [(group.size, on_host) for group, on_host in selftest._groups(hosts, [2, 6])] == [(2, 1), (6, 3)]


@pytest.fixture
def without_programs(monkeypatch):
    monkeypatch.setattr(selftest, "ALL_PROGRAMS", {})
    monkeypatch.setattr(selftest, "_tests_of_experts", lambda *args: iter(()))


@pytest.mark.parametrize("op", [op for op in NATIVE if op not in selftest.ALL_PROGRAMS])
def test_a_wrong_result_is_found(op, tmp_path, monkeypatch, without_programs):
    right = getattr(jaxcomm, op)

    def wrong(x, *args, **more):
        y = right(x, *args, **more)
        return y if more.get("algorithm") == "xla" else y.at[-1].set(~y[-1] if y.dtype == bool else y[-1] + 1)

    monkeypatch.setattr(jaxcomm, op, wrong)
    status, found = run(tmp_path, "--ops", op)
    assert status == selftest.FAILED
    assert found["result"].endswith(f"tests, in {op}")
    assert [row["wrong"] >= 8 for row in found["rows"]] == [True] * len(found["rows"])


@pytest.mark.parametrize(("name", "given"), selftest.ALL_PROGRAMS.items(), ids=selftest.ALL_PROGRAMS.keys())
def test_a_wrong_program_is_found(name, given, tmp_path, monkeypatch, without_programs):
    """CUDA graphs are replayed with other operands, whose elements reach 61."""
    feature, program = given

    def wrong(lib, x, axes):
        is_wrong = (lib is jaxcomm) & ((feature != GRAPHS) | (x.max() > 60))
        return program(lib, x, axes) + is_wrong.astype(x.dtype)

    monkeypatch.setattr(selftest, "ALL_PROGRAMS", {name: (feature, wrong)})
    status, found = run(tmp_path, "--ops", "barrier")
    assert (status, found["result"]) == (selftest.FAILED, f"FAILED: 1 of 2 tests, in {name}")


def test_an_exception_is_a_failure_and_the_other_ops_are_tested(tmp_path, monkeypatch, without_programs):
    def fail(*args, **more):
        raise RuntimeError("no way\nmore")

    monkeypatch.setattr(jaxcomm, "pmin", fail)
    status, found = run(tmp_path, "--ops", "pmin", "barrier")
    assert status == selftest.FAILED
    assert [row["error"] for row in found["rows"]] == ["RuntimeError: no way", ""]


def test_arguments(monkeypatch, capsys):
    for arguments in ("--sizes 0", "--sizes 1X", "--sizes 1M..64K", "--ops nothing", "--ranks 3"):
        with pytest.raises(SystemExit, match="2"):
            selftest.main(arguments.split())
    monkeypatch.setattr(_config, "config", lambda: _config.Config(algorithm="xla"))
    with pytest.raises(SystemExit, match="2"):
        selftest.main([])
    assert "JAXCOMM_ALGORITHM=xla" in capsys.readouterr().err


def experts_tests(per_node):
    (group, _), *_ = selftest._groups(jax.devices(), [8])
    return list(selftest._tests_of_experts(group, per_node, "cpu"))


@pytest.mark.parametrize("per_node", [4, 8])
def test_the_result_of_experts(per_node):
    """By the definition, on this machine; the kernels between nodes are tested in tests/cuda."""
    found = experts_tests(per_node)
    for row, fill in found[per_node == 4 :]:
        fill()
        assert row.wrong == 0
    types = ["bfloat16"] * (per_node == 4) + ["float32", "bfloat16", "bfloat16"] + ["float32"] * (per_node == 8)
    assert [row.dtype for row, _ in found] == types


def test_wrong_experts_are_found(monkeypatch):
    right, reduces = jaxcomm.moe.combine, []

    def wrong(rows, routing, weights, **more):
        reduces.append(routing.reduce)
        return right(rows + 1, routing, weights, **more)

    monkeypatch.setattr(jaxcomm.moe, "combine", wrong)
    for row, fill in experts_tests(8):
        fill()
        assert row.wrong > 0
    assert set(reduces) == {"node", "home"}


def test_one_node_is_found(monkeypatch):
    """The kernels add the rows of a node before those of the next one: one node has other sums."""
    right = jaxcomm.moe.route
    monkeypatch.setattr(jaxcomm.moe, "route", lambda *args, **more: right(*args, **more | {"reduce": "home"}))
    _, fill = experts_tests(4)[0]
    with pytest.raises(selftest._NotBetweenNodes, match="NVLink connects all GPUs"):
        fill()


# The course of a run on GPUs, with tests that only say what they found.


class Gpu:
    platform = "gpu"
    device_kind = "NVIDIA H100"
    process_index = 0

    def __init__(self, slice_index):
        self.slice_index = slice_index


@pytest.fixture
def on_gpus(monkeypatch, tmp_path):
    """Runs tests of two GPUs: (row, error or times) each. Returns the exit status and the report."""

    def start(*rows, gpus=2, limit_s=600, hosts=1, **more):
        def tests(group, per_node, *_):
            for given, found in rows:
                row = dataclasses.replace(given, ranks=group.size, ranks_per_node=per_node)

                def fill(row=row, found=found):
                    start.ran.append((row.op, row.ranks))
                    if isinstance(found, Exception) and (hosts == 1 or row.ranks_per_node < row.ranks):
                        raise found
                    row.wrong = 0
                    if isinstance(found, tuple):
                        row.jaxcomm_us, row.xla_us = found
                        lowered = types.SimpleNamespace(algorithm=None), types.SimpleNamespace(algorithm="ring")
                        _request.add_to_list(*lowered)
                    elif isinstance(found, int):
                        row.wrong = found

                yield row, fill

        start.ran = []
        monkeypatch.setattr(selftest, "tests", tests)
        monkeypatch.setattr(jax, "process_count", lambda: hosts)
        forget()
        report = selftest.Report(tmp_path / "selftest.json", limit_s)
        devices = [Gpu(gpu * hosts // gpus) for gpu in range(gpus)]
        return selftest.run(report, devices, (1,), tuple(selftest.OPS), **more), report

    monkeypatch.setattr(_native, "cuda", Module)
    monkeypatch.setattr(selftest, "Mesh", lambda devices, *_, **__: devices)
    monkeypatch.setattr(selftest, "Group", lambda mesh, axis: dataclasses.make_dataclass("G", ["size"])(mesh.shape[1]))
    monkeypatch.setattr(selftest, "_facts", lambda devices: {"jaxcomm": "", "jaxlib": ""})
    monkeypatch.setattr(_selftest_record, "key", lambda: dict(GPU_KEY))
    return start


def row(feature, op, size=8, dtype="float32"):
    return Row(feature, op, dtype, size, 2, 2)


PSUM = [
    (row(PROGRAMS, "loop"), 0),
    (row(TYPES, "psum", dtype="float32,bfloat16"), 0),
    (row(PLANS, "psum", 8), (1.0, 2.0)),
    (row(PLANS, "psum", 4096), (3.0, 4.0)),
    (row(PLANS, "psum", 1 << 20), (6.0, 5.0)),
]


def test_a_run_on_gpus_is_recorded(on_gpus, capsys):
    status, report = on_gpus(*PSUM)
    assert (status, len(report.rows)) == (selftest.PASSED, 5)
    out = capsys.readouterr().out
    assert "# jaxcomm by default: all_reduce over 2 ranks by ring, operands of 8 to 4,096 bytes of float32" in out
    assert "# jaxcomm by default: all_reduce over 2 ranks by ring, operands of 8 to 8 bytes of bfloat16" in out
    assert _selftest_record.rows_of(GPU_KEY) == (report.rows, "")
    assert report.facts["recorded"] == str(_selftest_record.path())


def test_a_run_continues_where_the_last_one_ended(on_gpus, monkeypatch):
    assert on_gpus(*PSUM[:2])[0] == selftest.PASSED
    status, report = on_gpus(*PSUM)
    assert [op for op, _ in on_gpus.ran] == ["psum"] * 3 and len(report.known) == 2
    assert [row["op"] for row in json.loads(report.file.read_text())["rows"]] == ["loop", *["psum"] * 4]
    assert on_gpus(*PSUM, again=True)[0] == selftest.PASSED and len(on_gpus.ran) == 5
    monkeypatch.setattr(_selftest_record, "key", lambda: GPU_KEY | {"driver": "570"})
    assert on_gpus(*PSUM)[0] == selftest.PASSED and len(on_gpus.ran) == 5  # another driver
    monkeypatch.setattr(selftest, "_SHARE", 0)
    assert on_gpus(*PSUM)[0] == selftest.PASSED and not on_gpus.ran  # nothing is left to do
    status, report = on_gpus(*PSUM, (row(PLANS, "psum", 1 << 24), (1.0, 2.0)))
    assert (status, report.rows) == (selftest.INCOMPLETE, [])
    monkeypatch.setattr(selftest, "_goes_on", lambda report, number: number == 1)
    assert on_gpus((PSUM[0][0], 1), PSUM[1], again=True)[0] == selftest.FAILED  # before the time ran out


def test_a_failure_stays_until_it_has_passed(on_gpus):
    assert on_gpus(*PSUM[:-1])[0] == selftest.PASSED
    status, _ = on_gpus(*PSUM[:-1], (PSUM[-1][0], 3))
    assert (status, on_gpus.ran) == (selftest.FAILED, [("psum", 2)])
    assert _selftest_record.ranges(_selftest_record.rows_of(GPU_KEY)[0]) == []
    assert on_gpus(*PSUM)[0] == selftest.PASSED and on_gpus.ran == [("psum", 2)]
    assert len(_selftest_record.ranges(_selftest_record.rows_of(GPU_KEY)[0])) == 2


@pytest.mark.parametrize(
    ("error", "status", "recorded"),
    [
        (RuntimeError("jaxcomm: psum: several nodes of 2 ranks, and there is no GIN between them"), "PASSED", [2]),
        (selftest._NotBetweenNodes("NVLink connects all GPUs"), "PASSED", [2]),
        (RuntimeError("another\nmore"), "FAILED", [2, 4]),
    ],
)
def test_several_hosts(on_gpus, capsys, error, status, recorded):
    """Groups inside a host come first, and their results stay."""
    first = 0 if status == "FAILED" else error
    found, _ = on_gpus((PSUM[0][0], first), (PSUM[1][0], error), gpus=4, hosts=2)
    assert found == getattr(selftest, status)
    rows, _ = _selftest_record.rows_of(GPU_KEY)
    assert sorted({row.ranks for row in rows}) == recorded
    out = capsys.readouterr().out
    assert ("another" in out, "1 could not run here" in out) == ((True, False) if status == "FAILED" else (False, True))


def test_nothing_tested_is_no_success(on_gpus, monkeypatch, capsys):
    assert on_gpus(*PSUM, gpus=1)[0] == selftest.NOTHING and not on_gpus.ran
    with monkeypatch.context() as patch:

        def nccl(wheel):
            raise RuntimeError("libnccl.so.2 is NCCL 2.28.9, but jaxcomm's kernels need 2.29.7 or later")

        patch.setattr(Module, "nccl", staticmethod(nccl))
        assert on_gpus(*PSUM)[0] == selftest.NOTHING and not on_gpus.ran
        assert "# NOTHING TESTED: libnccl.so.2 is NCCL 2.28.9, but" in capsys.readouterr().out
    no_gin = RuntimeError("there is no GIN between them")
    assert on_gpus((PSUM[0][0], no_gin), gpus=2, hosts=2)[0] == selftest.NOTHING
    assert _selftest_record.rows_of(GPU_KEY)[0] == []
    tpu = dataclasses.make_dataclass("Tpu", ["platform", "device_kind"])("tpu", "v5")
    monkeypatch.setattr(jax, "devices", lambda: [tpu])
    assert selftest.main([]) == selftest.NOTHING


@pytest.mark.parametrize(
    ("left_out", "error", "why"),
    [
        (PSUM[-1][0], "RESOURCE_EXHAUSTED: Out of memory", "psum of 1048576 bytes was not tested: out of memory"),
        (
            row("multimem", "multimem"),
            "psum at a.py:1: algorithm \"multimem\" needs NVLink SHARP, which the group's GPUs don't offer",
            "there is no NVLink SHARP: multimem was not tested",
        ),
    ],
)
def test_what_cannot_run_on_one_host_is_left_out(on_gpus, capsys, left_out, error, why):
    status, report = on_gpus((left_out, RuntimeError(error)), PSUM[0])
    assert (status, [found.op for found in report.rows]) == (selftest.PASSED, ["loop"])
    assert f"# {why}\n" in capsys.readouterr().out


def test_a_test_that_does_not_end(tmp_path, monkeypatch):
    ended = threading.Event()
    statuses, defaults = [], []
    monkeypatch.setattr(selftest.os, "_exit", lambda status: (statuses.append(status), ended.set()))
    monkeypatch.setattr(selftest.faulthandler, "dump_traceback", lambda all_threads: None)

    def hang(report, *given):
        assert given == (jax.devices(), selftest._SIZES["cpu"], list(selftest.OPS), [4], True)
        report.current, report.key = row(PLANS, "psum"), GPU_KEY
        assert ended.wait(60)
        return 0

    monkeypatch.setattr(selftest, "run", hang)
    file = tmp_path / "selftest.json"
    monkeypatch.setattr(_config, "set_default", lambda *given: defaults.append(given))
    selftest.main(["--json", str(file), "--timeout", "0.2", "--ranks", "4", "--again"])
    assert (statuses, defaults) == ([selftest.TIMED_OUT], [("JAXCOMM_TIMEOUT_S", "0.1")])
    found = json.loads(file.read_text())
    assert found["result"] == "FAILED: psum of 8 bytes did not end within 0.2 s"
    (recorded,) = _selftest_record.rows_of(GPU_KEY)[0]
    assert not recorded.right and recorded.error == "did not end"


class Module:
    driver_version = staticmethod(lambda: 13000)
    num_devices = staticmethod(lambda: 1)
    nccl = staticmethod(lambda wheel: {"version": 23203})
    built = staticmethod(lambda: {"cuda": 13000, "nccl": 23203})


def test_the_key_of_the_record(monkeypatch, tmp_path):
    assert _selftest_record.key() is None  # no GPU
    gpus = [Gpu(0), Gpu(0)]
    monkeypatch.setenv("NCCL_GIN_ENABLE", "0")
    monkeypatch.setattr(jax, "devices", lambda platform: gpus)
    monkeypatch.setattr(_native, "cuda", Module)
    monkeypatch.setattr(_native, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(_selftest_record, "_NICS", tmp_path / "nics")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06  Release Build\n")
    (tmp_path / "nics" / "mlx5_0").mkdir(parents=True)
    key = _selftest_record.key()
    assert key == GPU_KEY | {"jaxlib": jax.lib.__version__, "jaxcomm": jaxcomm.__version__}
    flags = "--xla_gpu_enable_command_buffer=CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    others = ["JAXCOMM_BULK_COPY", "JAXCOMM_MAX_SMS", "JAXCOMM_SYMMETRIC_BUFFERS", "NCCL_NVLS_ENABLE"]
    for name, value in (("XLA_FLAGS", f"--xla_dump_to=x {flags}"), *((name, "1") for name in others)):
        monkeypatch.setenv(name, value)
    settings = " ".join([*(f"{name}=1" for name in others[:3]), "NCCL_GIN_ENABLE=0", "NCCL_NVLS_ENABLE=1", flags])
    assert _selftest_record.key() == key | {"settings": settings}
    for name in ("XLA_FLAGS", *others):
        monkeypatch.delenv(name)
    (tmp_path / "version").unlink()
    (tmp_path / "nics" / "mlx5_0").rmdir()
    assert _selftest_record.key() == key | {"driver": "13000", "network": ""}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert _selftest_record.key()["hosts"] == "one"
    gpus[1].slice_index = 1
    assert _selftest_record.key()["hosts"] == "several"
    gpus[:] = [Gpu(None)]
    assert _selftest_record.key()["hosts"] == "several"  # unknown


def test_a_record_of_others_is_refused(monkeypatch, caplog):
    """Of another machine, another version of jaxcomm, or a damaged file. One line says why."""
    own = dict(GPU_KEY)
    monkeypatch.setattr(_selftest_record, "key", lambda: own)

    def found():
        forget()
        caplog.clear()
        rows = _selftest_record.own_rows()
        return rows, "".join(caplog.messages)

    assert found() == ((), "")
    file = _selftest_record.save(GPU_KEY, [dataclasses.replace(PSUM[0][0], wrong=0)])
    assert file == _selftest_record.path() and len(found()[0]) == 1
    for name, value in GPU_KEY.items():
        own[name] = value + "1"
        rows, line = found()
        assert rows == () and f"was recorded with {name} {value!r} instead of {value + '1'!r}" in line, name
        own[name] = value
    record = json.loads(file.read_text())
    for text in ("", "[]", '{"format": 2, "passed": [{}]}', json.dumps(record | {"records": [{"key": {}}]})):
        file.write_text(text)
        rows, line = found()
        assert rows == () and f"{file} cannot be used" in line
    _selftest_record.save(GPU_KEY, [dataclasses.replace(PSUM[0][0], wrong=0)])
    assert len(found()[0]) == 1
