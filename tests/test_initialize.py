"""jaxcomm.distributed.initialize(): the environment of each launcher, and the resulting arguments of JAX.

The environments are those that the launchers set; tests/multiprocess/test_launchers.py has real ones.
"""

import os
import socket
import subprocess
import sys
import types

import jax
import pytest

from jaxcomm import _compat, distributed
from jaxcomm._processes import bootstrap, kv_store, launchers

# Two hosts of two processes, this one the second of the second host, as each launcher says it.
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-node1-27093@1", "PMIX_RANK": "3",
}  # fmt: skip
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_NODELIST": "gpu[07-08]",
}  # fmt: skip
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
}  # fmt: skip
KUBERNETES = {"JOB_COMPLETION_INDEX": "3", "JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "hello-0.hello:29500"}
BY_HAND = {"JAX_PROCESS_ID": "3", "JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "node1:29500"}
AT = {"JAX_COORDINATOR_ADDRESS": "node1:29500"}
OURS = ("JAX_", "OMPI_", "PMI", "MPI_", "SLURM_", "CUDA_VISIBLE", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "JOB_")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (OPEN_MPI_5 | AT, (3, 4, 1, 2, "node1:29500")),
        (OPEN_MPI_5, (3, 4, 1, 2, None)),
        (MPICH | AT, (3, 4, 1, 2, "node1:29500")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", **AT}, (3, 4, None, None, "node1:29500")),
        (SLURM | {"JAX_COORDINATOR_PORT": "7"}, (3, 4, 1, 2, "gpu07:7")),
        (TORCHRUN, (3, 4, 1, 2, "node1:29400")),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, (3, 4, 1, 2, "node1:29401")),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "JAX_COORDINATOR_PORT": "7"}, (3, 4, 1, 2, "node1:7")),
        (TORCHRUN | {"MASTER_ADDR": "fe80::1", "JAX_COORDINATOR_PORT": "7"}, (3, 4, 1, 2, "[fe80::1]:7")),
        (KUBERNETES, (3, 4, None, None, "hello-0.hello:29500")),
        (BY_HAND, (3, 4, None, None, "node1:29500")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}, (3, 4, 1, 2, None)),
        (SLURM | {"SLURM_NTASKS": "8"} | AT, (3, 4, 1, 2, "node1:29500")),  # a step of half the tasks
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1"} | AT, (3, 4, 1, 1, "node1:29500")),
        (KUBERNETES | {"JAX_PROCESS_ID": "1"}, (1, 4, None, None, "hello-0.hello:29500")),  # several in a pod
        # One inside another: MPI inside Slurm, and our own variables above all.
        (OPEN_MPI_5 | {"OMPI_COMM_WORLD_RANK": "0"} | TORCHRUN, (3, 4, 1, 2, "node1:29400")),
        (TORCHRUN | {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"} | AT, (1, 2, None, None, "node1:29500")),
        (SLURM | {"SLURM_PROCID": "0"} | OPEN_MPI_5 | AT, (3, 4, 1, 2, "node1:29500")),
        (SLURM | {"SLURM_PROCID": "0"} | MPICH | AT, (3, 4, 1, 2, "node1:29500")),
    ],
)
def test_processes_of_each_launcher(environment, expected):
    found = launchers.detect(environment)
    assert (found.rank, found.size, found.local_rank, found.local_size, found.coordinator) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # a pod that is alone
        {name: text for name, text in SLURM.items() if "STEP" not in name},  # a batch script, not started by srun
        AT,
    ],
)
def test_processes_without_a_launcher(environment):
    assert launchers.detect(environment) is None


def test_jobs_without_a_coordinator_have_a_port(monkeypatch):
    """All ranks of a job find the same port, other jobs find others."""

    def open_mpi(rank, job, name="PMIX_NAMESPACE"):
        environment = OPEN_MPI_5 | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
        return launchers.detect(environment | {"PMIX_NAMESPACE": ""} | {name: job}).coordinator

    found = [open_mpi(rank, "prterun-vm-1@1") for rank in range(4)]
    host, port = found[0].split(":")
    assert set(found) == {found[0]} and host == "127.0.0.1" and 61440 <= int(port) < 65536
    assert open_mpi(0, "prterun-vm-1@1", "OMPI_MCA_ess_base_jobid") == found[0], "of Open MPI 4"
    assert len({open_mpi(0, f"prterun-vm-{job}@1") for job in range(20)}) > 15
    assert launchers.detect(MPICH | {"MPI_LOCALNRANKS": "4"}).coordinator is None, "no mpiexec above this process"
    monkeypatch.setattr(launchers, "_ancestor", lambda name: 17 if name == "hydra_pmi_proxy" else None)
    assert launchers.detect(MPICH | {"MPI_LOCALNRANKS": "4"}).coordinator.startswith("127.0.0.1:6")

    def slurm(**variables):
        return launchers.detect(SLURM | variables).coordinator

    assert slurm() == slurm(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    assert len({slurm(), slurm(SLURM_JOB_ID="4712"), slurm(SLURM_STEP_ID="1")}) == 3


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"), ("node1,node2", "node1"), ("n[001-015],b", "n001"), ("n[001,007-015]", "n001"),
        ("n[3]", "n3"), ("rack[2-3]node[5,7],b", "rack2node5"), ("a-b,c", "a-b"), ("gpu[07-08]-ib", "gpu07-ib"),
    ],
)  # fmt: skip
def test_first_host_of_slurm(nodes, first):
    assert launchers.first_host(nodes) == first


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", [2, 2, 2, 1, None]), ("4", [4, None]), ("1,3(x2)", [1, 3, 3, None]), ("", [None])]
)
def test_tasks_per_node_of_slurm(text, counts):
    assert [launchers.tasks_of_node(text, node) for node in range(len(counts))] == counts


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "MPICH sets rank 4 of 4 processes"),
        ({"PMI_RANK": "one", "PMI_SIZE": "4"}, "PMI_RANK must be a number, got 'one'"),
    ],
)
def test_nonsense_in_the_environment(environment, message):
    with pytest.raises(ValueError, match=message):
        launchers.detect(environment)


@pytest.mark.parametrize(
    ("gpus", "local", "more", "expected"),
    [
        (8, (0, 8), {}, [0]), (8, (7, 8), {}, [7]), (8, (1, 2), {}, [4, 5, 6, 7]), (8, (1, 3), {}, [2, 3]),
        (8, (0, 1), {}, None),  # one process per host
        (8, (None, None), {}, None),
        (0, (1, 2), {}, None),
        (1, (1, 4), {}, None),  # each has one of its own
        (4, (1, 2), {"SLURM_GPUS_ON_NODE": "8"}, None),  # each has four of its own
        (8, (1, 2), {"SLURM_GPUS_ON_NODE": "8"}, [4, 5, 6, 7]),
    ],
)  # fmt: skip
def test_gpus_of_a_process(gpus, local, more, expected):
    process = launchers.Process("test", 0, 16, *local)
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))), **more}
    assert launchers.local_devices(process, environment) == expected


def test_gpus_are_counted_without_cuda_visible_devices(monkeypatch):
    monkeypatch.setattr(launchers.os, "listdir", lambda path: ["0000:01:00.0", "0000:02:00.0"])
    process = launchers.Process("test", 0, 2, 1, 2)
    visible = ({}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0,-1"})
    assert [launchers.local_devices(process, each) for each in visible] == [[1], None, None]


# The arguments that JAX gets.


@pytest.fixture
def calls(monkeypatch):
    """Calls of initialize() to the relay, JAX and the key-value store, in order."""
    made = []
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)
    state = types.SimpleNamespace(process_id=0, num_processes=1)

    def initialize(*args, **kwargs):
        made.append(("jax", args, kwargs))
        state.process_id, state.num_processes = kwargs.get("process_id"), kwargs.get("num_processes")

    def start_relay(host, port):
        made.append(("relay", host, port))
        return "name"

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(distributed._core, "start_relay", start_relay)
    monkeypatch.setattr(jax.config, "update", lambda name, value: made.append((name, value)))
    monkeypatch.setattr(distributed.atexit, "register", lambda function, *args: made.append(("at exit", *args)))
    monkeypatch.setattr(distributed.recorder, "start", lambda: made.append(("recorder",)))
    monkeypatch.setattr(kv_store, "hidden_coordinator", None)
    monkeypatch.setattr(kv_store, "process_id", lambda: state.process_id)
    monkeypatch.setattr(kv_store, "num_processes", lambda: state.num_processes)
    monkeypatch.setattr(kv_store, "kv_set", lambda key, value: made.append((key, value)))
    return made


def told(calls, name):
    (found,) = [call[1:] for call in calls if call[0] == name]
    return found


def test_arguments_of_jax(calls, monkeypatch):
    assert distributed.initialize("10.1.2.3:4567", 2, process_id=1) == 2
    assert told(calls, "relay") == ("10.1.2.3", "4567")
    args, kwargs = told(calls, "jax")
    assert args == ("unix-abstract:name",)
    assert kwargs == {
        "num_processes": 2, "process_id": 1, "local_device_ids": None, "cluster_detection_method": "deactivate",
        "coordinator_bind_address": "10.1.2.3:4567", "heartbeat_timeout_seconds": 1_000_000,
    }  # fmt: skip
    assert told(calls, "jax_enable_recoverability") == (True,)
    assert kv_store.hidden_coordinator == "10.1.2.3:4567"
    assert told(calls, "pid/1") == (f"{bootstrap.kernel_id()} {os.getpid()}",)
    assert told(calls, "at exit") == (1, 2, 300)
    assert calls[-1] == ("recorder",)  # its exit handler runs before the one that waits
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"initialize: jax\.distributed is initialized already"):
        distributed.initialize("10.1.2.3:4567", 2, process_id=1)


def test_the_environment_is_enough_and_arguments_override_it(calls, monkeypatch):
    for name, text in SLURM.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert distributed.initialize() == 4
    _, kwargs = told(calls, "jax")
    assert (kwargs["process_id"], kwargs["num_processes"], kwargs["local_device_ids"]) == (3, 4, [2, 3])
    assert told(calls, "relay")[0] == "gpu07"
    calls.clear()
    assert distributed.initialize("[fe80::1]:80", num_processes=8, process_id=5, local_device_ids=[0, 1]) == 8
    _, kwargs = told(calls, "jax")
    assert (kwargs["process_id"], kwargs["num_processes"], kwargs["local_device_ids"]) == (5, 8, [0, 1])
    assert told(calls, "relay") == ("fe80::1", "80")
    assert kwargs["coordinator_bind_address"] == "[fe80::1]:80"
    calls.clear()
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "1")
    distributed.initialize()
    assert told(calls, "jax")[1]["local_device_ids"] is None, "JAX reads JAX_LOCAL_DEVICE_IDS"
    calls.clear()
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0:80")
    distributed.initialize(shutdown_timeout_seconds=7)
    assert told(calls, "jax")[1]["coordinator_bind_address"] == "0.0.0.0:80"
    assert told(calls, "at exit") == (3, 4, 7)
    calls.clear()
    distributed.initialize(coordinator_bind_address="10.0.0.1:80", heartbeat_timeout_seconds=5, process_id=0)
    kwargs = told(calls, "jax")[1]
    assert (kwargs["coordinator_bind_address"], kwargs["heartbeat_timeout_seconds"]) == ("10.0.0.1:80", 5)
    assert kwargs["process_id"] == 0
    calls.clear()
    distributed.initialize(cluster_detection_method="slurm")  # JAX itself reads the environment
    kwargs = told(calls, "jax")[1]
    names = ("cluster_detection_method", "process_id", "num_processes")
    assert [kwargs[name] for name in names] == ["slurm", None, None]


@pytest.mark.parametrize(
    "environment", [{}, {"PMI_RANK": "0", "PMI_SIZE": "1"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}]
)
def test_a_single_process_initializes_nothing(calls, monkeypatch, environment):
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert distributed.initialize() == 1
    assert not calls


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({}, {"coordinator_address": "host"}, "the coordinator is 'host', but num_processes is None"),
        (AT, {}, "the coordinator is 'node1:29500', but num_processes is None and process_id None"),
        (AT, {"num_processes": 2}, "num_processes is 2 and process_id None; pass them, or set JAX_NUM_PROCESSES"),
        (MPICH, {}, "coordinator_address must be host:port, got None; pass it, or set JAX_COORDINATOR_ADDRESS"),
        (BY_HAND, {"coordinator_address": "host"}, "coordinator_address must be host:port, got 'host'"),
    ],
)
def test_missing_settings_are_named(calls, monkeypatch, environment, arguments, message):
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=message):
        distributed.initialize(**arguments)
    assert not calls


def test_cloud_tpus_are_left_to_jax(calls, monkeypatch):
    monkeypatch.setattr(_compat, "on_cloud_tpu", lambda: True)
    distributed.initialize(initialization_timeout=5)
    assert calls == [("jax", (), {"local_device_ids": None, "initialization_timeout": 5})]
    calls.clear()
    assert distributed.initialize("localhost:1", 2, 1) == 2
    assert told(calls, "relay") == ("localhost", "1")


@pytest.mark.parametrize(
    ("host", "leads_to", "expected"),
    [
        ("10.1.2.3", "10.1.2.3", "10.1.2.3:80"),
        ("node1", "10.1.2.3", "node1:80"),
        ("node1", "127.0.1.1", "[::]:80"),  # its own name, in /etc/hosts
        ("node1", "127.0.1.1 10.1.2.3", "node1:80"),
        ("localhost", "127.0.0.1", "localhost:80"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1:80"),
        ("::1", "::1", "[::1]:80"),
        ("node9", None, "node9:80"),
    ],
)
def test_address_of_the_service(monkeypatch, host, leads_to, expected):
    def getaddrinfo(host, port, type):
        if leads_to is None:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, type, 6, "", (address, 80)) for address in leads_to.split()]

    monkeypatch.setattr(distributed.socket, "getaddrinfo", getaddrinfo)
    assert distributed._bind_address(host, "80") == expected


# The end of a process.


@pytest.fixture
def leave(monkeypatch):
    """How long the end of a process of three takes on a fake clock, and what it does. Other keys never come."""
    monkeypatch.delattr(sys, "last_value", raising=False)  # no exception

    def run(own, values, lost=False, error="DEADLINE_EXCEEDED", joined=True):
        clock, done = [0.0], []

        def get(key, timeout_ms):
            if key not in values:
                clock[0] += timeout_ms / 1000
                raise jax.errors.JaxRuntimeError(error)
            return values[key]

        client = types.SimpleNamespace(blocking_key_value_get=get)
        monkeypatch.setattr(distributed.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: joined)
        monkeypatch.setattr(kv_store, "client", lambda: client)
        monkeypatch.setattr(kv_store, "kv_set", lambda key, value, timeout_s: done.append(key))
        monkeypatch.setattr(kv_store, "detach", lambda: done.append("detached"))
        monkeypatch.setattr(distributed._core, "relay_has_lost_server", lambda: lost)
        monkeypatch.setattr(distributed._core, "close_relay_to_server", lambda: done.append("closed"))
        distributed._leave(own, 3, 10.0)
        return clock[0], done

    return run


def pid(number, kernel=None):
    return f"{kernel or bootstrap.kernel_id()} {number}"


def test_process_0_waits_for_the_others(leave, monkeypatch):
    done = {"jaxcomm/exit/1": "", "jaxcomm/exit/2": ""}
    assert leave(0, done) == (0, ["exit/0"])
    living = {"jaxcomm/exit/1": "", "jaxcomm/pid/2": pid(os.getpid())}
    assert leave(0, living)[0] == pytest.approx(10, abs=0.01)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert leave(0, living) == (0, ["exit/0"]), "after an uncaught exception"


def test_process_0_does_not_wait_for_dead_processes_of_its_host(leave):
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert leave(0, {"jaxcomm/exit/1": "", "jaxcomm/pid/2": pid(child.pid)})[0] == 0.5
    child.wait()
    assert leave(0, {"jaxcomm/exit/1": "", "jaxcomm/pid/2": pid(child.pid)})[0] == 0.5
    elsewhere = {"jaxcomm/exit/1": "", "jaxcomm/pid/2": pid(child.pid, "another kernel")}
    for unknown in (elsewhere, {"jaxcomm/exit/1": ""}):  # the last process has not published its number
        assert leave(0, unknown)[0] == pytest.approx(10, abs=0.01)


def test_the_others_wait_for_process_0_and_detach(leave, monkeypatch):
    """JAX's own disconnection ends a process by SIGABRT if process 0 is a moment faster."""
    assert leave(2, {"jaxcomm/exit/0": ""}) == (0, ["exit/2", "detached", "closed"])
    waited_s, done = leave(2, {})
    assert waited_s == pytest.approx(10, abs=0.01) and done == ["exit/2", "detached", "closed"]
    assert leave(2, {}, lost=True) == (0, ["detached", "closed"])
    assert leave(2, {}, error="UNAVAILABLE")[0] == 0.5, "the service has ended"
    assert leave(2, {}, joined=False) == (0, []), "the program has left"
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert leave(2, {}) == (0, ["exit/2", "detached", "closed"])


NEVER_CALLED = """
import jax, jaxcomm
jax.make_mesh((8,), ("ranks",))
"""
ENDS = """
import sys, time
import jax
from jaxcomm import distributed
from jaxcomm._processes import kv_store
distributed.initialize()
rank, late = jax.process_index(), int(sys.argv[1])
if rank == late:
    time.sleep(1.5)  # the other has long come to its end
    print("still served", kv_store.kv_agree("late", "yes"), flush=True)
else:
    print("ends", flush=True)
    sys.exit(3)
"""


def run(tmp_path, script, *arguments):
    (tmp_path / "script.py").write_text(script)
    kept = {name: text for name, text in os.environ.items() if not name.startswith(OURS)} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxcomm.run", "-n", "2", "--devices", "4", "--timeout", "100", "script.py"]
    return subprocess.run([*command, *arguments], cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=200)


def test_a_script_that_never_calls_it(tmp_path):
    done = run(tmp_path, NEVER_CALLED)
    assert done.returncode == 1 and "4 devices seen, 8 expected in 2 processes: call jaxcomm." in done.stderr


@pytest.mark.parametrize("late", [0, 1])
def test_a_normal_end_waits_for_all(tmp_path, late):
    """Otherwise, jaxcomm.run would end the late process when the other one returns 3."""
    done = run(tmp_path, ENDS, str(late))
    assert (done.returncode, {*done.stdout.splitlines()}) == (3, {f"[{1 - late}] ends", f"[{late}] still served yes"})
