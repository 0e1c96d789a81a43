"""Placement of the ranks of a group, from the records of their processes. The key-value store is a fake."""

import json
import threading
import types

import jax
import numpy as np
import pytest

from jaxcomm._processes import bootstrap, kv_store, placement


class Store:
    """Fake client of jax.distributed's key-value store."""

    def __init__(self):
        self.values, self.asked = {}, []

    def key_value_set(self, key, value):
        if key in self.values:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_ms):
        self.asked.append((key, timeout_ms))
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}\nmore")
        return self.values[key]


class Mesh:
    """A mesh of fake devices of several processes."""

    def __init__(self, processes):
        self.devices = np.array(
            [types.SimpleNamespace(id=i, process_index=p, platform="cpu") for i, p in enumerate(processes)]
        )


@pytest.fixture
def cluster(monkeypatch):
    """cluster("aabb", 1): this is process 1 of four, of which 0 and 1 are on node a. Returns (store, connections)."""

    def make(nodes, own):
        store, connected = Store(), []
        for process, node in enumerate(nodes):
            record = {"version": "1.0", "node": node, "address": {"of": process}}
            store.key_value_set(f"jaxcomm/process/{process}", json.dumps(record))
        monkeypatch.setattr(bootstrap, "_records", {own: {"version": "1.0", "node": nodes[own], "address": {}}})
        monkeypatch.setattr(bootstrap, "_connected", set())
        monkeypatch.setattr(kv_store, "client", lambda: store)
        monkeypatch.setattr(bootstrap, "_start_network", lambda: connected.append("network started"))
        monkeypatch.setattr(jax, "process_count", lambda: len(nodes))
        monkeypatch.setattr(jax, "process_index", lambda: own)
        monkeypatch.setattr(jax.sharding, "Mesh", Mesh)
        core = types.SimpleNamespace(
            connect_process=lambda process, node, of: connected.append((process, node, of)),
            connect_network=lambda process, address: connected.append((process, address)),
        )
        monkeypatch.setattr(bootstrap, "_core", core)
        return store, connected

    return make


def test_nodes_come_in_the_order_of_their_first_process(cluster):
    cluster("babc", 2)
    assert placement.nodes() == [[0, 2], [1], [3]]


@pytest.mark.parametrize(
    ("nodes", "devices", "rows", "ranks_per_node"),
    [
        ("aabb", [0, 1, 2, 3], [[0, 1, 2, 3]], 2),
        ("aabb", [0, 2, 1, 3], [[0, 1, 2, 3]], 1),  # neighbours are on different nodes
        ("aabb", [0, 1, 2, 3], [[0, 1], [2, 3]], None),  # each group is of one node
        ("aabb", [0, 1, 2, 3], [[0, 2], [1, 3]], 1),
        ("aaab", [0, 1, 2, 3], [[0, 1], [2, 3]], 1),  # groups that differ
        ("aaaa", [0, 1, 2, 3], [[0, 1, 2, 3]], None),
        ("ab", [0, 0, 1, 1], [[0, 1, 2, 3]], 2),
        ("ab", [0, 0, 1, 1], [[3, 2, 1, 0]], 2),
    ],
)
def test_placement(cluster, nodes, devices, rows, ranks_per_node):
    store, _ = cluster(nodes, 1)
    store.values |= {f"jaxcomm/network/{process}": "" for process in range(len(nodes))}
    rows = np.array(rows)
    found = placement.of_groups(Mesh(devices), rows)
    assert found.ranks_per_node == ranks_per_node
    np.testing.assert_array_equal(found.processes, np.array(devices)[rows].reshape(-1))


def test_groups_of_this_process_alone_need_no_other(cluster):
    store, connected = cluster("aabb", 1)
    found = placement.of_groups(Mesh([1, 1]), np.array([[0, 1]]))
    assert (len(found.processes), found.ranks_per_node) == (0, None)
    assert store.asked == connected == []


def test_connects_to_the_processes_of_its_groups_once(cluster):
    """Connects to processes of another node through the network too."""
    store, connected = cluster("aabb", 1)
    store.values["jaxcomm/network/3"] = "aGVyZQ=="
    mesh = Mesh([0, 1, 2, 3])
    for _ in range(2):
        placement.of_groups(mesh, np.array([[0, 2], [1, 3]]))
    assert connected == ["network started", (3, "b", 3), (3, b"here")]
    placement.of_groups(mesh, np.array([[0, 1], [2, 3]]))
    assert connected[3:] == [(0, "a", 0)]


def test_versions_must_agree(cluster):
    store, _ = cluster("aa", 1)
    record = json.loads(store.values["jaxcomm/process/0"])
    store.values["jaxcomm/process/0"] = json.dumps({**record, "version": "99.0"})
    with pytest.raises(RuntimeError, match=r"process 0 runs jaxcomm 99\.0, but process 1 runs 1\.0"):
        bootstrap.connect([0, 1])
    assert bootstrap._connected == set()


def test_a_process_that_does_not_show_up_is_named(cluster):
    store, _ = cluster("aa", 1)
    del store.values["jaxcomm/process/0"]
    timeout_s = kv_store.config().timeout_s
    with pytest.raises(RuntimeError, match=rf"process 0 did not connect within {timeout_s:g} s .*DEADLINE_EXCEEDED"):
        bootstrap.connect([0, 1])
    assert store.asked == [("jaxcomm/process/0", int(timeout_s * 1000))]


def test_a_process_that_cannot_be_reached_is_named(cluster, monkeypatch):
    cluster("aa", 1)

    def fail(process, node, of):
        raise RuntimeError("no way")

    monkeypatch.setattr(bootstrap._core, "connect_process", fail)
    with pytest.raises(RuntimeError, match=r"process 0 can't be reached from process 1: no way.*here 'a'"):
        bootstrap.connect([0])
    tried = []
    monkeypatch.setattr(bootstrap._core, "connect_process", lambda process, node, of: tried.append(process))
    bootstrap.connect([0])
    assert tried == [0] and bootstrap._connected == {0}


def test_the_first_value_is_agreed_on_between_processes(cluster, monkeypatch):
    cluster("aa", 1)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert kv_store.kv_agree("token", "1") == "1"
    assert kv_store.kv_agree("token", "2") == "1"
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    assert kv_store.kv_agree("token", "2") == "2"


def test_a_coordinator_that_does_not_answer(monkeypatch):
    ended = threading.Event()
    client = types.SimpleNamespace(key_value_set=lambda key, value: ended.wait(100))
    monkeypatch.setattr(kv_store, "client", lambda: client)
    monkeypatch.setattr(kv_store, "config", lambda: types.SimpleNamespace(timeout_s=0.1))
    with pytest.raises(RuntimeError, match=r"process 0\) did not answer within 0.1 s \(JAXCOMM_TIMEOUT_S\)"):
        kv_store.kv_set("key", "value")
    ended.set()

    def fail(key, value):
        raise OSError("oops")

    client.key_value_set = fail
    monkeypatch.setattr(kv_store, "config", lambda: types.SimpleNamespace(timeout_s=100))
    with pytest.raises(OSError, match="oops"):
        kv_store.kv_set("key", "value")
