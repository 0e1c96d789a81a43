"""Bootstrap of processes: calls of JAX and of the key-value store, and records of other processes.

The store, the native module and the other processes are fakes; tests/multiprocess has real ones.
"""

import dataclasses
import importlib
import os
import threading
import types

import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm import _config, distributed
from jaxcomm._processes import bootstrap, kv_store, liveness, placement

topology = importlib.import_module("jaxcomm._topology")  # the function has the same name
VERSION = jaxcomm.__version__


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "fake"


class Store:
    """Fake key-value store of jax.distributed. A missing key never appears later."""

    def __init__(self):
        self.values, self.asked = {}, {}  # asked: the limit of each key, in ms

    def key_value_set(self, key, value):
        if key in self.values:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_ms):
        self.asked[key] = timeout_ms
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}\nsecond line")
        return self.values[key]


class Native:
    """Fake of the functions of jaxcomm._core that the bootstrap calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments, **address):
            self.calls.append((name, *arguments, *([address] if address else [])))
            return {"start_process": {"token": 7}, "start_network": b"\x00mine"}.get(name)

        return call

    def called(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def world(monkeypatch):
    """This is process 1. Returns a function that sets the node of each process and the published records."""
    store, native = Store(), Native()
    monkeypatch.setattr(kv_store, "client", lambda: store)
    monkeypatch.setattr(bootstrap, "_core", native)
    monkeypatch.setattr(bootstrap, "_records", {})
    monkeypatch.setattr(bootstrap, "_connected", set())
    for module in (bootstrap, kv_store):
        monkeypatch.setattr(module, "config", lambda: _config.Config(timeout_s=2.5, single_copy=False))
    monkeypatch.setattr(bootstrap, "_network_devices", lambda: "")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    bootstrap._start_network.cache_clear()

    def start(nodes, version=VERSION):
        monkeypatch.setattr(jax, "process_count", lambda: len(nodes))
        monkeypatch.setattr(bootstrap, "node_id", lambda: nodes[1])
        for process, node in enumerate(nodes):
            if process != 1:
                record = f'{{"version": "{version}", "node": "{node}", "address": {{"token": {process}}}}}'
                store.values[f"jaxcomm/process/{process}"] = record
                store.values[f"jaxcomm/network/{process}"] = "AP8="  # bytes 0 and 255
        return types.SimpleNamespace(store=store, native=native)

    yield start
    bootstrap._start_network.cache_clear()


def mesh_of(processes):
    devices = [Device(i, process) for i, process in enumerate(processes)]
    return jax.sharding.Mesh(np.array(devices), ("i",))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("module", [True, False])
def test_registration_reaches_both_back_ends_and_all_processes(monkeypatch, module, processes):
    done = []

    def register_cuda():
        done.append("cuda")
        if not module:
            raise ImportError("jaxcomm was built without CUDA")

    monkeypatch.setattr(distributed._native, "register", lambda: done.append("cpu"))
    monkeypatch.setattr(distributed._native, "register_cuda", register_cuda)
    monkeypatch.setattr(distributed._cost_params, "load", lambda: done.append("cost_params"))
    monkeypatch.setattr(bootstrap, "connect", lambda others: done.append(list(others)))
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    jaxcomm.register()
    assert done == ["cpu", "cuda", "cost_params", *([[0, 1]] if processes == 2 else [])]


def test_who_is_alone_is_warned_after_back_ends_have_started(monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    for started in (False, True):
        monkeypatch.setattr(bootstrap._compat, "back_ends_have_started", lambda started=started: started)
        bootstrap.warn_if_alone.__wrapped__()
        assert ("8 devices seen, 16 expected in 2 processes" in capsys.readouterr().err) == started


def test_no_store_before_initialize():
    with pytest.raises(RuntimeError, match=r"store is missing: call jaxcomm\.distributed\.initialize\(\) first"):
        kv_store.client()


# Records of processes.


def test_processes_of_one_node_share_memory(world):
    at = world("aab")
    bootstrap.connect([0, 1])
    assert at.native.calls == [("start_process", 1, "a", False), ("connect_process", 0, "a", {"token": 0})]
    own = at.store.values["jaxcomm/process/1"]
    assert own == f'{{"version": "{VERSION}", "node": "a", "address": {{"token": 7}}}}'
    assert at.store.asked == {"jaxcomm/process/0": 2500}
    bootstrap.connect([0, 1])
    assert len(at.native.calls) == 2


def test_processes_of_other_nodes_are_reached_through_the_network(world):
    at = world("baba")
    at.store.values["jaxcomm/token"] = "12345"  # another process has set the key
    bootstrap.connect([0, 1, 2, 3])
    ((*_, processes, token),) = at.native.called("start_network")
    assert (processes, token) == (4, 12345)
    assert at.store.values["jaxcomm/network/1"] == "AG1pbmU="
    others = [(0, "b", {"token": 0}), (2, "b", {"token": 2}), (3, "a", {"token": 3})]
    assert at.native.called("connect_process") == others
    assert at.native.called("connect_network") == [(0, b"\x00\xff"), (2, b"\x00\xff")]


def test_a_process_that_does_not_come(world):
    at = world("aaa")
    del at.store.values["jaxcomm/process/2"]
    late = (
        r"^process 2 did not connect within 2.5 s \(JAXCOMM_TIMEOUT_S\); all .*: DEADLINE_EXCEEDED: jaxcomm/process/2$"
    )
    with pytest.raises(RuntimeError, match=late):
        bootstrap.connect([0, 2])
    assert not at.native.called("connect_process")


def test_a_process_that_can_not_be_reached(world):
    at = world("aa")

    def fail(*arguments, **address):
        raise RuntimeError("no permission")

    at.native.connect_process = fail
    with pytest.raises(RuntimeError, match=r"^process 0 can't be reached from process 1: no permission\. .* here 'a'"):
        bootstrap.connect([0])
    del at.native.connect_process  # the next call tries again
    bootstrap.connect([0])
    assert len(at.native.called("connect_process")) == 1
    world("aab").native.start_network = fail
    with pytest.raises(
        RuntimeError, match=r"can't be opened: no permission\. `pip install jaxcomm\[hosts\]` installs UCX"
    ):
        bootstrap.connect([2])


def test_a_process_with_another_version(world):
    world("aa", version="9.9")
    other = f"^process 0 runs jaxcomm 9.9, but process 1 runs {VERSION}: install equal versions$"
    with pytest.raises(RuntimeError, match=other):
        bootstrap.connect([0])


def test_the_first_value_is_agreed_on(world, monkeypatch):
    at = world("aa")
    assert kv_store.kv_agree("color", "red") == "red"
    assert kv_store.kv_agree("color", "blue") == "red"
    assert at.store.asked == {"jaxcomm/color": 2500}
    with pytest.raises(RuntimeError, match=r"^jaxcomm: no process has set shape within 0\.25 s: DEADLINE"):
        kv_store.kv_wait("shape", 0.25)
    assert at.store.asked["jaxcomm/shape"] == 250
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    assert kv_store.kv_agree("color", "blue") == "blue"


def test_a_store_that_does_not_answer(world, monkeypatch):
    at, ended, limits = world("aa"), threading.Event(), []

    class Thread(threading.Thread):
        def join(self, timeout=None):
            limits.append(timeout)

    with monkeypatch.context() as patch:
        patch.setattr(kv_store, "threading", types.SimpleNamespace(Thread=Thread))
        at.store.key_value_set = lambda key, value: ended.wait()
        with pytest.raises(RuntimeError, match=r"^the coordinator \(process 0\) did not answer within 2.5 s"):
            kv_store.kv_agree("color", "red")
        ended.set()
    assert limits == [2.5]

    def fail(key, value):
        raise OSError("broken")

    at.store.key_value_set = fail
    with pytest.raises(OSError, match="broken"):
        kv_store.kv_agree("color", "red")


def test_names_of_nodes(monkeypatch):
    """Processes share memory only if boot, namespaces of processes and users, and user are the same."""
    name = bootstrap.node_id.__wrapped__
    monkeypatch.setattr(bootstrap, "config", lambda: _config.Config())
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    pid, user = (os.stat(f"/proc/self/ns/{space}").st_ino for space in ("pid", "user"))
    assert name() == f"{boot}:{pid}:{user}:{os.getuid()}"
    monkeypatch.setattr(bootstrap, "config", lambda: _config.Config(node_id="mine"))
    assert name() == "JAXCOMM_NODE_ID=mine"


@pytest.mark.parametrize(
    ("given", "rdma", "expected"), [("all", False, ""), ("eth1", True, "eth1"), (None, True, ""), (None, False, "lo")]
)
def test_network_devices(monkeypatch, given, rdma, expected):
    monkeypatch.setattr(bootstrap, "config", lambda: _config.Config(network_devices=given))
    monkeypatch.setattr(bootstrap, "_core", types.SimpleNamespace(has_rdma=lambda: rdma))
    monkeypatch.setattr(kv_store, "coordinator_address", lambda: "127.0.0.1:80")
    assert bootstrap._network_devices() == expected


def test_processes_with_gpus_watch_each_other(world, monkeypatch, capsys):
    """Process 0 serves on a port, with a token; the others join, or warn that they could not."""
    at, module = world("aa"), Native()
    thread = lambda target, args, daemon: types.SimpleNamespace(start=lambda: target(*args))  # noqa: E731
    monkeypatch.setattr(liveness, "threading", types.SimpleNamespace(Thread=thread))
    monkeypatch.setattr(liveness, "config", lambda: _config.Config(timeout_s=2.5))
    monkeypatch.setattr(liveness._native, "cuda", lambda: module)
    monkeypatch.setattr(kv_store, "coordinator_address", lambda: "[fe80::1]:80")
    watch = liveness.watch.__wrapped__
    watch()
    warning = "process 0 has not started to watch for the end of processes; process 1 finds it after JAXCOMM_TIMEOUT_S"
    assert warning in capsys.readouterr().err and at.store.asked == {"jaxcomm/liveness": 2500}
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    module.serve_liveness = lambda token: module.calls.append(("serve", token)) or 99
    watch()
    ((token,),) = module.called("serve")
    assert len(token) == 16 and at.store.values["jaxcomm/liveness"] == f"99 {token}"
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    watch()
    assert module.called("join_liveness") == [("fe80::1", 99, token, 1)]


# Nodes, groups and meshes.


def test_mesh_in_the_order_of_nodes(world):
    """Inner axes stay inside a node, however the processes are numbered."""
    world("abab")
    devices = [Device(100 - i, i % 4) for i in range(8)]
    mesh = topology.make_mesh((2, 4), ("node", "gpu"), devices=devices)
    assert [[(d.process_index, d.id) for d in row] for row in mesh.devices] == [
        [(0, 96), (0, 100), (2, 94), (2, 98)],
        [(1, 95), (1, 99), (3, 93), (3, 97)],
    ]


def test_topology_of_several_nodes(world, monkeypatch):
    world("bab")
    monkeypatch.setattr(jax, "devices", lambda platform: [Device(i, i % 3) for i in range(9)] + [Device(9, 1)])
    monkeypatch.setattr(topology._cost_params, "load", lambda: None)
    found = topology.topology()
    assert (found.nodes, found.ranks) == (((0, 2), (1,)), (6, 4))
    lines = str(found).splitlines()
    assert lines[0] == f"2 node(s), 10 rank(s), {len(os.sched_getaffinity(0))} processor(s)"
    assert lines[1:3] == ["  node 0: 6 rank(s) of process(es) 0, 2", "  node 1: 4 rank(s) of process(es) 1"]
    assert [line.split()[0] for line in lines[3:-1]] == ["self", "node", "network"]
    assert lines[-1] == "  constants; calibrate() measures them" and not found.calibrated
    # A calibration of one process says nothing about the network.
    for scope in ("process", "network"):
        monkeypatch.setattr(topology._cost_params, "measured", {scope})
        assert topology.topology().calibrated == (scope == "network")


@pytest.mark.parametrize(
    ("nodes", "processes", "rows", "expected", "connected"),
    [
        ("aa", [1, 1, 1, 1], [[0, 1], [2, 3]], ([], None), []),  # all of this process
        ("aa", [0, 0, 1, 1], [[0, 1], [2, 3]], ([0, 0, 1, 1], None), []),  # no group with others
        ("aab", [0, 1, 0, 1], [[0, 1], [3, 2]], ([0, 1, 1, 0], None), [0]),
        ("bab", [0, 1, 2, 1], [[0, 1], [2, 3]], ([0, 1, 2, 1], 1), [0, 2]),
        ("aabb", [0, 1, 2, 3], [[0, 1, 2, 3]], ([0, 1, 2, 3], 2), [0, 2, 3]),
        ("aabb", [0, 1, 2, 3], [[0, 2, 1, 3]], ([0, 2, 1, 3], 1), [0, 2, 3]),
        ("aabb", [0, 1, 2, 3], [[0, 1], [2, 3]], ([0, 1, 2, 3], None), [0]),
        ("aabb", [0, 1, 2, 3, 0, 1], [[0, 1, 2, 3, 4, 5]], ([0, 1, 2, 3, 0, 1], 1), [0, 2, 3]),
        ("aabb", [0, 1, 2, 3, 0, 2], [[0, 1], [4, 5]], ([0, 1, 0, 2], 1), [0]),  # of one node, and of two
        ("aaab", [0, 1, 2, 3], [[0, 1, 2, 3]], ([0, 1, 2, 3], 1), [0, 2, 3]),  # nodes of three ranks and of one
        ("ab", [0, 0, 1, 1], [[3, 2, 1, 0]], ([1, 1, 0, 0], 2), [0]),
    ],
)
def test_placement_of_groups(world, nodes, processes, rows, expected, connected):
    at = world(nodes)
    found = placement.of_groups(mesh_of(processes), np.array(rows))
    assert (found.processes.tolist(), found.ranks_per_node) == expected
    ids = [device.id for device in mesh_of(processes).devices.flat]
    assert found.devices.tolist() == ([ids[rank] for row in rows for rank in row] if expected[0] else [])
    assert [call[0] for call in at.native.called("connect_process")] == connected
    with pytest.raises(NotImplementedError, match="AbstractMesh"):
        placement.of_groups(mesh_of(processes).abstract_mesh, np.array(rows))


def test_processes_of_gpus():
    """In rank order, group after group. Other devices have none: a program for GPUs may be lowered for them."""
    rows = np.array([[0, 2], [3, 1]])
    gpus = jax.sharding.Mesh(np.array([Device(i, p, "gpu") for i, p in enumerate([5, 5, 7, 7])]), ("i",))
    assert placement.gpu_processes(gpus, rows).tolist() == [5, 7, 7, 5]
    assert placement.gpu_processes(gpus.abstract_mesh, rows) is None
    assert placement.gpu_processes(mesh_of([5, 5, 7, 7]), rows) is None


@pytest.mark.parametrize(
    ("hosts", "rows", "node_id", "per_host"),
    [
        ([0, 0, 0, 0], [[0, 1, 2, 3]], None, 4),
        ([0, 0, 1, 1], [[0, 1, 2, 3]], None, 2),
        ([0, 0, 1, 1], [[0, 1], [2, 3]], None, 2),
        ([0, 1, 0, 1], [[0, 1, 2, 3]], None, 1),  # not consecutive
        ([0, 0, 1, 1], [[0, 1], [2, 3]], "a", 1),  # unknown: a host may be several nodes
        ([None] * 4, [[0, 1, 2, 3]], None, 2),  # then a process is a host
    ],
)
def test_gpus_of_a_host(monkeypatch, hosts, rows, node_id, per_host):
    gpus = [Device(i, i // 2, "gpu") for i in range(4)]
    for gpu, host in zip(gpus, hosts, strict=True):
        object.__setattr__(gpu, "slice_index", host)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(placement, "config", lambda: _config.Config(node_id=node_id))
    mesh, rows = jax.sharding.Mesh(np.array(gpus), ("i",)), np.array(rows)
    assert placement.gpus_per_host(mesh, rows) == per_host
    one_host = len(rows[0]) == per_host and node_id is None
    assert placement.gpus_are_on_one_host(mesh, rows) == one_host


def test_a_wait_for_a_key_warns_and_then_ends(monkeypatch, capsys):
    clock, limits_ms, error = [0.0], [], "DEADLINE_EXCEEDED"

    class Silent:
        def blocking_key_value_get(self, key, timeout_ms):
            limits_ms.append(timeout_ms)
            clock[0] += timeout_ms / 1000
            raise jax.errors.JaxRuntimeError(f"{error}: nobody has set it")

    monkeypatch.setattr(kv_store.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(kv_store, "config", lambda: _config.Config(timeout_s=100, warn_s=30))
    monkeypatch.setattr(kv_store, "client", Silent)
    with pytest.raises(jax.errors.JaxRuntimeError, match="nobody has set it"):
        kv_store.kv_get("process/1", 100, "process 1 did not connect")
    assert limits_ms == [30_000, 30_000, 40_000]
    assert capsys.readouterr().err.splitlines() == [
        f"warning: jaxcomm: process 1 did not connect within {waited_s} s; an error follows after 100 s"
        for waited_s in (30, 60)
    ]
    error = "UNAVAILABLE"
    with pytest.raises(jax.errors.JaxRuntimeError, match=error):
        kv_store.kv_get("process/1", 100, "process 1 did not connect")
    assert len(limits_ms) == 4
