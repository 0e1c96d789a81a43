"""Tests of `make test-gpu` and `make bench-gpu` that need no GPU."""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import bulk_times
import on_gpu
import pytest
import runner
import status

ROOT = pathlib.Path(__file__).parents[2]
GPU = ROOT / "tests" / "cuda" / "gpu"
sys.path.append(str(GPU))
import killed  # noqa: E402
import losses  # noqa: E402


def shell(name, script, limit_s=20, **more):
    return runner.Part(name, ("/bin/sh", "-c", script), limit_s, **more)


def test_the_runner_records_every_part_whatever_the_others_do(tmp_path, capsys):
    """Parts that fail, hang, print JSON, report tests, need others or come too late; parts of a step run together."""
    (tmp_path / "reports").mkdir()

    def line(**entry):
        return json.dumps(entry)

    def reports(name, *processes):
        texts = ["\n".join(lines) for lines in processes]
        writes = " ".join(f"cat > {tmp_path}/reports/{i}.jsonl <<'END'\n{text}\nEND\n" for i, text in enumerate(texts))
        return shell(name, writes, reports=tmp_path / "reports")

    meets = f"touch {tmp_path}/%s; while [ ! -e {tmp_path}/%s ]; do sleep 0.05; done"
    passes = [line(test="a", outcome="not ended"), line(test="a", outcome="passed"), line(note="ranks", value=2)]
    fails = [line(test="a", outcome="failed", reason="wrong"), line(test="b", outcome="not ended"), '{"test']
    made = runner.Runner("name", tmp_path / "out", tmp_path / "work", {"device": "a GPU"}, total_s=40)
    for step in (
        [shell("hangs", f"sleep 99 & echo $! > {tmp_path}/child; wait", 1)],
        [shell("fails", "echo why; exit 3"), runner.Part("not there", ("/no/such/program",), 5)],
        [shell("one", meets % ("a", "b"), 10), shell("other", meets % ("b", "a"), 10)],
        [shell("no hardware", "true", missing="there is no GPU"), shell("after", "true", after="fails")],
        [shell("keeps", "echo text; echo '{\"x\": 1}'; echo '{broken'", keep=True)],
        [shell("has nothing to keep", "true", keep=True)],
        [reports("good", passes)],
        [reports("bad", passes, fails)],
        [reports("skipped", [line(test="c", outcome="skipped", reason="no nodes")])],
        [shell("too long", "true", takes_s=60)],
    ):
        made.run(*step)
    record = json.loads((tmp_path / "out" / "name.json").read_text())
    assert record["device"] == "a GPU"
    passed = {name for name, passed in record["tests"].items() if passed}
    assert passed == {"one", "other", "keeps", "good"}
    assert record["tests"].keys() - passed == {"hangs", "fails", "not there", "has nothing to keep", "bad"}
    assert record["parts"]["hangs"] == {"killed": "after 1 s: its limit"}
    assert record["parts"]["bad"] == {"tests": {"a": "failed: wrong", "b": "not ended"}, "notes": {"ranks": 2}}
    assert made.lines("keeps") == [{"x": 1}]
    left = record["left_out"]
    assert re.fullmatch("no time was left: it takes about 60 s, and [23][0-9] s were left", left.pop("too long"))
    expected = {"no hardware": "there is no GPU", "after": "fails has not passed", "skipped": "skipped: no nodes"}
    assert left == expected
    child = int((tmp_path / "child").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(child, 0)
            time.sleep(0.05)
    log = (tmp_path / "out" / "name.log").read_text()
    assert "=== hangs" in log and "killed after" in log and "why" in log
    made.print_table()
    assert "FAILED" in capsys.readouterr().out


# The selection of parts.


def fake_nccl(folder, headers, library):
    """A folder like that of the wheel, whose library returns a version. 0 omits the library."""
    (folder / "include").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "include" / "nccl.h").write_text(f"#define NCCL_VERSION_CODE {headers}\n")
    if library:
        source = f"int ncclGetVersion(int* version) {{ *version = {library}; return 0; }}"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "lib" / "libnccl.so.2")],
            input=source, text=True, check=True,
        )  # fmt: skip
    return folder


def test_usable_versions_of_nccl(tmp_path):
    cases = [(23007, 23203, ""), (22809, 22809, "headers of NCCL 2.28.9"), (23203, 23007, "libnccl.so.2 is 2.30.7")]
    for headers, library, problem in [*cases, (23007, 0, "there is no libnccl.so.2")]:
        folder = tmp_path / f"{headers}-{library}"
        fake_nccl(folder / "nvidia" / "nccl", headers, library)
        found = on_gpu.find_nccl(str(folder), on_gpu.Nccl(None, given=False))
        assert found.given
        assert found.problem.startswith(problem) and bool(found.problem) == bool(problem)
    assert on_gpu.Nccl(None, given=False).problem.startswith("no headers of NCCL")


class Recorder:
    """Records parts instead of running them. `now_s`: the time at which they would have ended."""

    def __init__(self):
        self.parts, self.record, self.now_s = [], {"tests": {}}, 0

    def run(self, *parts):
        self.end(self.begin(*parts))

    def begin(self, *parts):
        self.parts += parts
        return [self.now_s + part.takes_s for part in parts]

    def end(self, ends_s):
        self.now_s = max([self.now_s, *ends_s])


def recorders_of(machine):
    recorders = {name: Recorder() for name in ("test", "bench")}
    on_gpu.test(machine, recorders["test"])
    on_gpu.bench(machine, recorders["bench"])
    return recorders


def parts_of(machine):
    recorders = recorders_of(machine)
    return {name: {part.name: part for part in recorder.parts} for name, recorder in recorders.items()}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine that reports a GPU and has an NCCL in a given folder."""
    folder = fake_nccl(tmp_path / "nccl", 23007, 23007)
    monkeypatch.setattr(on_gpu.shutil, "which", lambda name: None if "mps" in name else f"/bin/{name}")
    made = on_gpu.Machine(tmp_path / "build", "cuda", str(folder))
    made.no_gpu = ""
    return made


def test_which_parts_run(machine, tmp_path):
    """All of them, in time, with a GPU and NCCL; those that need neither without them."""
    for recorder in recorders_of(machine).values():
        assert recorder.now_s <= on_gpu.TOTAL_S
        names = {part.name for part in recorder.parts}
        for part in recorder.parts:
            assert part.takes_s <= part.limit_s and (part.after == "" or part.after in names)
            assert not part.missing or part.name in {"errors: old NCCL", "errors: no module"}  # need a missing package
            for word in part.command:
                assert not word.endswith((".py", ".cc")) or pathlib.Path(word).exists(), word
    parts = parts_of(machine)
    for feature in status.FEATURES:
        assert set(feature.parts) <= set(parts["test"]), feature.name
    machine.lay_overlay()
    environment = machine.environment()
    assert environment["LD_PRELOAD"] == str(machine.nccl.path)
    assert str(machine.work / "overlay") in environment["PYTHONPATH"].split(os.pathsep)
    assert "LD_PRELOAD" not in machine.environment(on_gpu.Nccl(None, given=False))

    machine.nccl = on_gpu.Nccl(fake_nccl(tmp_path / "old", 22809, 22809), given=False)
    parts = parts_of(machine)
    for name in ("JAX, 1 rank, command buffers on", "JAX, 4 ranks", "models/moe, 1 rank: on the GPU"):
        assert "NCCL 2.28.9" in parts["test"][name].missing and "NCCL=folder" in parts["test"][name].missing
    assert not parts["test"]["executor"].missing and not parts["bench"][on_gpu.VIRTUAL_RANKS].missing
    assert "-Ccmake.define.JAXCOMM_CUDA=OFF" in parts["test"]["build: jaxcomm"].command

    machine.no_gpu = "there is no NVIDIA GPU"
    for parts in parts_of(machine).values():
        left = [name for name, part in parts.items() if not part.missing]
        assert [name for name in left if not name.startswith("build") and not name.endswith("losses")] == []


# The conclusions of the tests on a GPU.


def test_conclusions():
    """Targets, ratios of bulk copies, the survivors' errors, losses."""
    virtual = [
        {"what": "target", "op": "all_to_all", "of_copy": 0.91},
        {"what": "target", "op": "all_reduce", "of_copy": 0.79},
    ]
    flagged = [(8, 8, 2.5), (8, 1024, 1.5), (2, 8, 0.5)]
    ll = [{"op": "all_reduce", "ranks": n, "block_bytes": size, "ll_us": us} for n, size, us in flagged]
    host = [{"platform": "gpu", "until it returns": {"us_above_empty": {"psum": 5.1}}}]
    found = on_gpu.targets(virtual, ll, host)
    assert [(t["value"], t["met"]) for t in found.values()] == [
        (0.91, True), (None, None), (0.79, False), (2.5, True), (5.1, False)
    ]  # fmt: skip
    assert {t["met"] for t in on_gpu.targets([], [], []).values()} == {None}

    line = {"what": "bulk", "op": "all_to_all", "channels": 4}
    virtual = [line | {"bulk": 0, "median_us": 8.0}, line | {"bulk": 1, "median_us": 6.0}]
    virtual.append(line | {"op": "all_gather", "bulk": 0, "median_us": 5.0})  # not complete
    assert bulk_times.ratios(virtual) == {"all_to_all, 4 SMs per rank": 0.75}

    good = {"error": "jaxcomm: psum at x.py:1: psum at x.py:1: rank 0 aborted: rank 1 did not signal", "seconds": 5}
    assert killed.problem_of([good], 2) == ""
    assert "printed nothing" in killed.problem_of([None], 2)
    assert "no error within" in killed.problem_of([{"error": "", "seconds": 30}], 2)
    assert "does not name" in killed.problem_of([good], 3)

    def side(values):
        return {"platform": "p", "ranks": 1, "steps": len(values), "ms_per_step": 1.0, "losses": values}

    falling = [6 - i / 20 for i in range(40)]
    assert losses.compare(side(falling), side(falling[:30]))["problem"] == ""
    for values, problem in (
        ([x + 0.1 for x in falling], "first steps differ"),
        ([*falling[:39], 9], "differ by up to"),
        ([*falling[:39], float("nan")], "differ by up to"),
        (falling[:3], "only 3 steps"),
    ):
        assert problem in losses.compare(side(falling), side(values))["problem"]


def test_demanded_errors_are_in_the_sources():
    sources = [path for folder in ("ffi", "jaxcomm") for path in (ROOT / folder).rglob("*") if path.suffix != ".so"]
    text = "".join(path.read_text() for path in sources if path.suffix in (".cc", ".h", ".py"))
    text = re.sub(r'"\n\s*"', "", text)  # joins literals that continue on the next line
    demanded = []
    for node in ast.walk(ast.parse((GPU / "errors.py").read_text())):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            demanded.append(ast.literal_eval(node.left))
        elif isinstance(node, ast.keyword) and node.arg == "match":
            demanded += ast.literal_eval(node.value).split(".*")
    # The common start of all errors, and the call site.
    rest = [one for one in demanded if not one.startswith("jaxcomm: psum at") and "errors" not in one]
    assert len(rest) >= 5
    assert [one for one in rest if one.removeprefix(": ") not in text] == []


# The tests inside JAX, rehearsed on CPU devices.


@pytest.fixture(scope="module")
def empty_call(tmp_path_factory):
    import jax

    library = tmp_path_factory.mktemp("empty") / "empty_call.so"
    compiler = ["c++", "-std=c++17", "-O1", "-fPIC", "-shared", "-w", f"-I{jax.ffi.include_dir()}"]
    subprocess.run([*compiler, GPU / "empty_call.cc", "-o", library], check=True)
    return library


def rehearse(tmp_path, empty_call, *command, launcher=(), **more):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (GPU, ROOT / "tests"))),
        "PYTHONSAFEPATH": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAXCOMM_REPORTS": str(tmp_path),
        "JAXCOMM_EMPTY_CALL": str(empty_call),
        "JAXCOMM_COMMAND_BUFFERS": "off",
        "JAXCOMM_ROUNDS": "50",
        **more,
    }
    return subprocess.run(
        [sys.executable, *launcher, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250
    )


@pytest.mark.full
def test_rehearsal_in_one_process(tmp_path, empty_call):
    state, flags = list(on_gpu.COMMAND_BUFFERS.items())[-1]
    more = {"JAXCOMM_COMMAND_BUFFERS": state, "XLA_FLAGS": flags}  # XLA refuses unknown flags
    done = rehearse(tmp_path, empty_call, *on_gpu.pytest_command("in_jax.py"), **more)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = runner.read_reports(tmp_path)
    assert len(found["tests"]) > 40
    assert {name for name, outcome in found["tests"].items() if outcome != "passed"} == {
        "in_jax.py::test_arena_grows_under_old_programs",
    }
    assert found["notes"]["ranks"] == 1 and found["notes"]["info"][0] == "versions"


def test_rehearsal_in_two_processes(tmp_path, empty_call):
    chosen = on_gpu.pytest_command("in_jax.py", "-k", "info or psum or thousands")
    done = rehearse(tmp_path, empty_call, *chosen, launcher=("-m", "jaxcomm.run", "-n", "2"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert {path.name for path in tmp_path.iterdir()} == {"0.jsonl", "1.jsonl"}
    found = runner.read_reports(tmp_path)
    assert found["notes"]["ranks"] == 2
    assert set(found["tests"].values()) == {"passed"}


def test_rehearsal_of_a_killed_process(tmp_path, empty_call):
    done = rehearse(tmp_path, empty_call, str(GPU / "killed.py"), "2")
    assert done.returncode == 0, done.stdout + done.stderr


def test_rehearsal_of_the_host_cost(tmp_path, empty_call, monkeypatch):
    done = rehearse(tmp_path, empty_call, str(ROOT / "benchmarks" / "gpu" / "host_cost.py"), str(empty_call))
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = runner.objects(done.stdout.splitlines())
    for until in line.keys() - {"what", "platform"}:
        assert set(line[until]["us_above_empty"]) == {"psum", "all_to_all", "barrier"}
    assert "until it is done" in line


@pytest.mark.full
def test_rehearsal_of_the_example(wheels, tmp_path, machine):
    """An example is built and registered as on a GPU. Calls need a GPU."""
    toolkit = wheels / "cu13"
    environment = machine.environment(on_gpu.Nccl(None, given=False), JAX_PLATFORMS="cpu")
    environment |= {"CUDACXX": str(toolkit / "bin" / "nvcc"), "CUDAFLAGS": f"-L{toolkit / 'lib'}"}
    part = on_gpu.example_parts(machine)[0]
    done = subprocess.run(part.command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=250)
    assert done.returncode != 0
    assert "registered" in done.stderr, done.stdout + done.stderr
