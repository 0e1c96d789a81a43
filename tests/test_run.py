"""The launcher: environment and output of ranks, and the end of all processes after the first failure."""

import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jaxcomm import run

pytestmark = pytest.mark.deadline(200)
LIMIT_S = 100  # limit of operations that take a moment
WITH_SIGNALS = ("env", "--default-signal=HUP,INT")  # ignored, and so inherited, where tests run in the background
OPTIONS = {"processes": 4, "devices": None, "nodes": None, "address": "127.0.0.1:1"}


@pytest.fixture
def launch(tmp_path):
    """Starts the launcher on a script given as text, and ends it after the test."""
    started = []

    def start(script, *options, arguments=(), signals=WITH_SIGNALS):
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        process = subprocess.Popen(  # of a file, which needs no jax
            [*signals, sys.executable, run.__file__, *options, "script.py", *arguments], cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def finish(process):
    """(exit status, lines of output, lines of errors) of a launcher."""
    output, errors = process.communicate(timeout=LIMIT_S)
    return process.returncode, output.splitlines(keepends=True), errors.decode().splitlines()


def numbers(folder, pattern, count):
    """Waits for ``count`` files and returns the process ids in them."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        texts = [path.read_text() for path in pathlib.Path(folder).glob(pattern)]
        if len(texts) == count and all(text.endswith("\n") for text in texts):
            return [int(text) for text in texts]
        time.sleep(0.01)
    raise AssertionError(f"no {count} files {pattern}")


def assert_family_is_gone(folder, ranks):
    pids = numbers(folder, "rank*", ranks) + numbers(folder, "child*", ranks)
    until = time.monotonic() + 20  # they have been killed
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < until, f"still there: {alive}"
        time.sleep(0.01)


def _runs(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # what nobody has waited for yet is dead, too


# Leaves its number and that of a child in files, then calls what a test defines as after(rank).
FAMILY = """
    import os, signal, subprocess, sys, time
    rank = int(os.environ["JAX_PROCESS_ID"])
    child = subprocess.Popen(["sleep", "1000"])
    for name, pid in (("rank", os.getpid()), ("child", child.pid)):
        with open(f"{name}{rank}", "w") as file:
            file.write(f"{pid}\\n")
    while len([f for f in os.listdir() if f.startswith("child")]) < int(os.environ["JAX_NUM_PROCESSES"]):
        time.sleep(0.01)
"""


def test_every_rank_finds_the_others_and_its_node():
    ranks = [run.rank_environment({}, rank, **OPTIONS | {"devices": 2, "nodes": 2}) for rank in range(4)]
    for rank, environment in enumerate(ranks):
        assert environment.items() >= {
            "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_PROCESS_ID": str(rank), "JAX_NUM_PROCESSES": "4",
            "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAXCOMM_NODE_ID": "0011"[rank],
            "JAX_LOCAL_DEVICE_IDS": f"{2 * rank},{2 * rank + 1}",
        }.items()  # fmt: skip


def test_options_overrule_the_environment_and_that_overrules_defaults():
    base = {"JAX_PLATFORMS": "cuda", "JAX_NUM_CPU_DEVICES": "8", "JAXCOMM_NODE_ID": "a", "X": "y"}
    open_mpi_5 = {"OMPI_VERSION": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    kept = run.rank_environment(base | open_mpi_5, 3, **OPTIONS)
    for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAXCOMM_NODE_ID", "X"):
        assert kept[name] == base[name]
    assert kept["JAX_LOCAL_DEVICE_IDS"] == "3" and not open_mpi_5.keys() & kept.keys()
    assert run.rank_environment(base, 0, **OPTIONS | {"devices": 2})["JAX_NUM_CPU_DEVICES"] == "2"
    assert "JAXCOMM_NODE_ID" not in run.rank_environment({}, 0, **OPTIONS)
    assert run._named(-35) == ("signal 35", 163)  # one without a name


def test_lines_get_a_prefix_and_keep_their_bytes_and_stream(launch):
    script = r"""
        import os
        os.write(1, b"caf\xc3\xa9 \xff\x00\n\npart")
        os.write(2, b"problem\n")
        os.write(1, b"ial")
    """
    status, output, errors = finish(launch(script, "-n", "2"))
    assert (status, sorted(errors)) == (0, ["[0] problem", "[1] problem"])
    for rank in (b"[0] ", b"[1] "):
        ours = [line for line in output if line.startswith(rank)]
        assert ours == [rank + b"caf\xc3\xa9 \xff\x00\n", rank + b"\n", rank + b"partial\n"]


def test_lines_are_never_mixed(launch):
    script = """
        import os
        rank = os.environ["JAX_PROCESS_ID"]
        for number in range(300):
            for piece in (rank * 100, f"<{number}>", rank * 5000 + "\\n"):
                os.write(1, piece.encode())
    """
    status, output, _ = finish(launch(script, "-n", "4"))
    assert status == 0
    for rank in range(4):
        expected = [f"[{rank}] {str(rank) * 100}<{n}>{str(rank) * 5000}\n".encode() for n in range(300)]
        assert [line for line in output if line.startswith(b"[%d]" % rank)] == expected
    assert len(output) == 1200


def test_lines_appear_while_ranks_run_and_very_long_ones_are_cut(launch, tmp_path):
    script = (
        "import os, time\nprint('here')\nwhile not os.path.exists('seen'): time.sleep(0.01)\nprint('a' * 1_500_000)"
    )
    process = launch(script, "-n", "1", signals=("env", "--ignore-signal=HUP"))
    assert process.stdout.readline() == b"[0] here\n"
    process.send_signal(signal.SIGHUP)  # as under nohup
    (tmp_path / "seen").touch()
    status, output, _ = finish(process)
    assert (status, [len(line) for line in output]) == (0, [(1 << 20) + 5, 1_500_000 - (1 << 20) + 5])


@pytest.mark.parametrize(
    ("failure", "status", "said"),
    [("sys.exit(3)", 3, "exit code 3"), ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
     ("1 / 0", 1, "exit code 1"), ("", 0, None)],
)  # fmt: skip
def test_first_failure_ends_all_and_gives_the_exit_code(launch, tmp_path, failure, status, said):
    """Children end with the job, also if all ranks succeed."""
    ends = f"if rank == 2: {failure}\n    time.sleep(1000)" if failure else ""
    got, _, errors = finish(launch(f"{FAMILY}\n    {ends}", "-n", "3"))
    assert (got, errors[-1:]) == (status, [f"jaxcomm.run: rank 2 failed: {said}"] if failure else [])
    assert_family_is_gone(tmp_path, 3)


STUBBORN = f"""{FAMILY}
    def refuse(signum, frame):
        print("got", signum)
    signal.signal(signal.SIGTERM, refuse)
    signal.signal(signal.SIGINT, refuse)
    print("ready")
    open(f"ready{{rank}}", "w").close()
"""


def test_ranks_that_ignore_sigterm_are_killed_after_a_grace_period(launch, tmp_path):
    script = f"""{STUBBORN}
    while rank == 0 or not os.path.exists("ready0"):
        time.sleep(0.01)
    sys.exit(7)
    """
    status, output, errors = finish(launch(script, "-n", "2", "--grace", "1"))
    assert (status, b"[0] got 15\n" in output) == (7, True)
    assert errors == ["jaxcomm.run: rank 1 failed: exit code 7", "jaxcomm.run: killed after 1 s of grace: rank 0"]
    assert_family_is_gone(tmp_path, 2)


def wait_until_ready(process, ranks):
    assert sorted(process.stdout.readline() for _ in range(ranks)) == [b"[%d] ready\n" % r for r in range(ranks)]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_passed_on(launch, tmp_path, signum):
    process = launch(f"{FAMILY}\n    print('ready')\n    time.sleep(1000)", "-n", "2")
    wait_until_ready(process, 2)
    process.send_signal(signum)
    status, _, errors = finish(process)
    assert (status, f"jaxcomm.run: got {signum.name}" in errors) == (128 + signum, True)
    if signum == signal.SIGINT:
        assert {"[0] KeyboardInterrupt", "[1] KeyboardInterrupt"} < set(errors)
    assert_family_is_gone(tmp_path, 2)


def test_second_signal_kills(launch, tmp_path):
    process = launch(f"{STUBBORN}\n    while True: time.sleep(1)", "-n", "2", "--grace", "1000")
    wait_until_ready(process, 2)
    process.send_signal(signal.SIGINT)
    assert sorted(process.stdout.readline() for _ in range(2)) == [b"[0] got 2\n", b"[1] got 2\n"]
    process.send_signal(signal.SIGINT)
    status, _, errors = finish(process)
    assert (status, errors) == (130, ["jaxcomm.run: got SIGINT", "jaxcomm.run: killed: rank 0, 1"])
    assert_family_is_gone(tmp_path, 2)


def test_nothing_outlives_a_launcher_that_is_killed(launch, tmp_path):
    process = launch(f"{STUBBORN}\n    while True: time.sleep(1)", "-n", "2")
    wait_until_ready(process, 2)
    process.kill()
    process.wait(LIMIT_S)
    assert_family_is_gone(tmp_path, 2)


def test_timeout(launch, tmp_path):
    script = f"{FAMILY}\n    if rank: time.sleep(1000)"
    status, _, errors = finish(launch(script, "-n", "3", "--timeout", "3"))
    assert status == 124
    # On a busy machine by 0 too; other lines follow if a rank does not end soon.
    assert re.fullmatch("jaxcomm.run: --timeout 3 reached by rank (0, )?1, 2", errors[0])
    assert_family_is_gone(tmp_path, 3)


def test_job_ends_when_its_output_is_closed(launch):
    process = launch("import time\nwhile True: print('line'); time.sleep(0.01)", "-n", "2")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT_S) == 128 + signal.SIGPIPE


def test_paused_reader_does_not_stop_the_clock(launch):
    process = launch("while True: print('line')", "-n", "1", "--timeout", "1")
    assert process.wait(LIMIT_S) == 124


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        ([], ["--lr", "1", "-n", "3", "--", "-m", "x"], ["--lr", "1", "-n", "3", "--", "-m", "x"]),
        (["-m", "script", "--lr", "1"], [], ["--lr", "1", "script.py"]),  # which the fixture appends
    ],
)
def test_arguments_and_input(launch, options, arguments, expected):
    script = "import sys; print(sys.argv[1:], repr(sys.stdin.read()))"
    status, output, _ = finish(launch(script, "-n", "1", *options, arguments=arguments))
    assert (status, output) == (0, [f"[0] {expected} ''\n".encode()])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "4", "--nodes", "3", "x.py"], "--nodes: 4 processes cannot be split evenly among 3 nodes"),
        (["-n", "0", "x.py"], "argument -n/--processes: invalid positive int value: '0'"),
        (["-n", "2", "--timeout", "inf", "x.py"], "argument --timeout: invalid positive float value: 'inf'"),
        (["-n", "2"], "expected a script, or -m and a module"),
        (["x.py"], "the following arguments are required: -n/--processes"),
    ],
)
def test_refused_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as refused:
        run.main(arguments)
    assert (refused.value.code, message in capsys.readouterr().err) == (2, True)


JAX_SCRIPT = """
    import os, time
    import jax
    from jax.sharding import NamedSharding, PartitionSpec as P

    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    rows = jax.make_array_from_callback((4,), NamedSharding(mesh, P("d")), lambda i: jax.numpy.arange(1, 5)[i])
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(rows)
    print(f"process {jax.process_index()} of {jax.process_count()}: {jax.device_count()} devices, total {total}")
    if jax.process_index() == 1:
        os._exit(5)
    time.sleep(1000)
"""


def test_jax_needs_no_arguments(launch):
    process = launch(JAX_SCRIPT, "-n", "2", "--devices", "2", "--timeout", str(LIMIT_S), "--grace", "20")
    output, errors = process.communicate(timeout=LIMIT_S + 20)
    assert process.returncode == 5, errors.decode()
    said = re.findall(r"process \d.*", output.decode())
    assert sorted(said) == [f"process {p} of 2: 4 devices, total 10" for p in range(2)]
    assert errors.decode().splitlines()[-1] == "jaxcomm.run: rank 1 failed: exit code 5"  # SIGTERM was enough
