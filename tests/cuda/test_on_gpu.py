"""Tests of the five commands of on_gpu.py (`make gpu-smoke` and so on) that need no GPU."""

import json
import os
import pathlib
import subprocess
import sys
import time

import on_gpu
import pytest
import runner

ROOT = pathlib.Path(__file__).parents[2]
GPU = ROOT / "tests" / "cuda" / "gpu"


def shell(name, script, limit_s=20, **more):
    return runner.Part(name, ("/bin/sh", "-c", script), limit_s, **more)


@pytest.fixture
def run(tmp_path):
    def run(*parts):
        made = runner.Runner("name", tmp_path / "out", tmp_path / "work", {"device": "a GPU", "commit": "a"}, 60)
        for part in parts:
            made.run(part)
        return made, json.loads((tmp_path / "out" / "name.json").read_text())

    return run


def test_a_part_that_fails_hangs_or_can_not_start_does_not_keep_others_from_running(run, tmp_path, capsys):
    began = time.monotonic()
    made, record = run(
        shell("hangs", f"sleep 99 & echo $! > {tmp_path}/child; wait", 1),
        shell("fails", "echo why; exit 3"),
        runner.Part("not there", ("/no/such/program",), 5),
        shell("works", "echo fine"),
    )
    assert time.monotonic() - began < 15
    assert record["tests"] == {"hangs": False, "fails": False, "not there": False, "works": True}
    assert record["parts"]["hangs"] == {"killed": "after 1 s: its limit"}
    assert record["device"] == "a GPU"
    child = int((tmp_path / "child").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(child, 0)
            time.sleep(0.05)
    log = (tmp_path / "out" / "name.log").read_text()
    assert "=== hangs" in log and "killed after" in log and "why" in log and "fine" in log
    made.print_table()
    table = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in table] == ["FAILED", "FAILED", "FAILED", "passed"]


def test_reports_of_all_processes_count(run, tmp_path):
    folder = tmp_path / "reports"

    def line(**entry):
        return json.dumps(entry)

    first = [line(test="a", outcome="not ended"), line(test="a", outcome="passed"), line(note="ranks", value=2)]
    second = [line(test="a", outcome="failed", reason="wrong"), line(test="b", outcome="not ended"), '{"test']
    third = [line(test="c", outcome="skipped", reason="no nodes")]

    def part(name, *processes):
        texts = ["\n".join(lines) for lines in processes]
        writes = " ".join(f"cat > {folder}/{i}.jsonl <<'END'\n{text}\nEND\n" for i, text in enumerate(texts))
        return shell(name, writes, reports=folder)

    _, record = run(part("good", first), part("bad", first, second), part("skipped", third), part("silent"))
    assert record["tests"] == {"good": True, "bad": False, "silent": False}
    assert record["parts"]["bad"] == {
        "tests": {"a": "failed: wrong", "b": "not ended"},
        "notes": {"ranks": 2},
    }
    assert record["left_out"] == {"skipped": "skipped: no nodes"}


# The selection of parts.


def fake_nccl(folder, version):
    """A folder like that of the wheel, whose library returns a version."""
    (folder / "include").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "include" / "nccl.h").write_text(f"#define NCCL_VERSION_CODE {version}\n")
    source = f"int ncclGetVersion(int* version) {{ *version = {version}; return 0; }}"
    library = str(folder / "lib" / "libnccl.so.2")
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=source, text=True, check=True)
    return folder


class Recorder:
    """Records parts instead of running them."""

    def __init__(self):
        self.parts, self.record = [], {"tests": {}}

    def run(self, *parts):
        self.parts += parts

    begin = run

    def end(self, parts):
        pass


def parts_of(machine):
    """Parts by name, of all commands in their order. Each command keeps what it has built."""
    found = {}
    for name, command in on_gpu.COMMANDS.items():
        recorder = Recorder()
        command(machine, recorder)
        found[name] = {part.name: part for part in recorder.parts}
        kept = [pathlib.Path(machine.program(program)) for program in on_gpu.PROGRAMS.get(name, ())]
        if "build: jaxcomm" in found[name]:
            kept.append(machine.work / "site" / "jaxcomm")
        for path in kept:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return found


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine that reports a GPU and has an NCCL in a given folder."""
    folder = fake_nccl(tmp_path / "nccl", 23007)
    monkeypatch.setattr(on_gpu.shutil, "which", lambda name: f"/bin/{name}")
    made = on_gpu.Machine(tmp_path / "build", "cuda", str(folder))
    made.no_gpu = ""
    return made


def test_with_a_gpu_and_nccl_all_parts_run(machine):
    for parts in parts_of(machine).values():
        left_out = {name for name, part in parts.items() if part.missing}
        assert left_out <= {"errors: old NCCL", "errors: no module"}  # these need a missing package
        for part in parts.values():
            assert part.after == "" or part.after in parts
            for word in part.command:
                if word.endswith((".py", ".cc")):
                    assert pathlib.Path(word).exists(), word


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
        [sys.executable, *launcher, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900
    )


@pytest.mark.full
def test_rehearsal_in_one_process(tmp_path, empty_call):
    state, flags = list(on_gpu.COMMAND_BUFFERS.items())[-1]
    more = {"JAXCOMM_COMMAND_BUFFERS": state, "XLA_FLAGS": flags}  # XLA refuses unknown flags
    done = rehearse(tmp_path, empty_call, *on_gpu.pytest_command("in_jax.py"), **more)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = runner.read_reports(tmp_path)
    assert len(found["tests"]) > 35
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
