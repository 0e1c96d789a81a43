"""Calibration in one process: measurement, fit, and the saved parameters."""

import dataclasses
import importlib
import itertools
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest
from test_distributed import Device

import jaxcomm
from jaxcomm import _config, _core, _cost_params

calibration = importlib.import_module("jaxcomm._calibrate")
OPERAND = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Path of a temporary calibration file. Restores the parameters afterwards."""
    path = tmp_path / "folder" / "cost_params.json"
    monkeypatch.setattr(_cost_params, "config", lambda: _config.Config(calibration=str(path)))
    monkeypatch.setattr(_cost_params, "measured", set())
    before = {scope: _core.plan.machine_of(scope, 1) for scope in ("process", "network")}
    _cost_params.load.cache_clear()
    yield path
    for scope, machine in before.items():
        _core.set_cost_params(scope, machine)
    _cost_params.load.cache_clear()


def rows(bytes_per_s):
    return [["self", 1e-7, bytes_per_s, 0.0], ["node", 1e-7, bytes_per_s, 0.0], ["network", 2e-5, 1e9, 0.0]]


PARAMS = {"links": rows(1e6), "launch_s": 1e-5}


def test_measured_parameters_are_used_and_saved(kept, monkeypatch):
    monkeypatch.setattr(calibration, "_SIZES", (1024, 1 << 20))
    monkeypatch.setattr(calibration, "_SECONDS", 0.02)
    found = jaxcomm.calibrate()
    assert {cell.scope for cell in found.cells} == {"process"}
    assert {cell.op for cell in found.cells} == {"barrier", "psum", "all_to_all"}
    assert all(cell.measured_s > 0 and cell.predicted_s > 0 for cell in found.cells)
    assert found.path == kept and str(kept) in str(found)
    topology = jaxcomm.topology()
    assert topology.calibrated and "measured by calibrate()" in str(topology)
    assert (topology.nodes, topology.ranks) == (((0,),), (jax.local_device_count("cpu"),))
    (row,) = [link for link in topology.links if link.name == "node"]
    assert row.bytes_per_s == json.loads(kept.read_text())["cost_params"]["process"]["links"][1][2]


def test_each_round_of_each_calibration_is_a_fit_of_its_own(kept, monkeypatch):
    """Processes agree on parameters by a key, and the first value of a key stays. Predictions are those of the fit."""
    store, fits, applied = {}, itertools.count(1), []
    cell = calibration.Cell("process", "barrier", "direct", 0, 1.0, 0.0)
    monkeypatch.setattr(calibration.kv_store, "kv_agree", store.setdefault)
    monkeypatch.setattr(calibration, "_measure", lambda group, *_: [(group.request("barrier", 0), "direct", cell)])
    fit = lambda *_: _core.plan.Machine([tuple(row) for row in rows(1e9)], float(next(fits)))  # noqa: E731
    monkeypatch.setattr(calibration, "_fit", fit)
    monkeypatch.setattr(calibration._cost_params, "apply", lambda found: applied.append(found["process"]["launch_s"]))
    predicted_s = [jaxcomm.calibrate(keep=False).cells[0].predicted_s for _ in range(2)]
    assert applied == [1, 2, 3, 4] and predicted_s == pytest.approx([2, 4], abs=0.1)


def test_cost_params_are_read_again(kept, monkeypatch):
    def predicted_s():
        return jaxcomm.explain("psum", OPERAND, 8).predicted_time_s

    before = predicted_s()
    _cost_params.save({"process": PARAMS})
    assert predicted_s() == before  # the parameters are read once
    _cost_params.load.cache_clear()
    assert predicted_s() > 100 * before
    assert jaxcomm.topology().calibrated
    content = json.loads(kept.read_text())
    for change in ({"processors": 1000}, {"format": 1}):  # of another machine or version
        kept.write_text(json.dumps(content | change))
        _cost_params.load.cache_clear()
        monkeypatch.setattr(_cost_params, "measured", set())
        _cost_params.load()
        assert not jaxcomm.topology().calibrated


def test_parameters_of_each_scope_are_saved(kept):
    found = [PARAMS | {"links": rows(bytes_per_s)} for bytes_per_s in (1e6, 1e7, 1e8)]
    for scope, params in zip(("process", "network", "process"), found, strict=True):
        _cost_params.save({scope: params})
    assert json.loads(kept.read_text())["cost_params"] == {"process": found[2], "network": found[1]}
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


@pytest.mark.parametrize(("process", "keeps"), [(0, True), (1, False), (2, True), (3, False)])
def test_the_first_process_of_each_node_saves_the_parameters(kept, monkeypatch, process, keeps):
    """Nodes may have different home folders."""
    monkeypatch.setattr(calibration, "_groups", lambda: [types.SimpleNamespace(scope="network")])
    monkeypatch.setattr(calibration, "_calibrate_group", lambda group, number: (PARAMS, []))
    monkeypatch.setattr(calibration.placement, "nodes", lambda: [[0, 1], [2, 3]])
    monkeypatch.setattr(jax, "process_index", lambda: process)
    assert jaxcomm.calibrate().path == kept
    assert kept.exists() == keeps
    kept.unlink(missing_ok=True)
    assert jaxcomm.calibrate(keep=False).path is None
    assert not kept.exists()


def test_a_measurement_that_cannot_be_saved_is_returned(kept, monkeypatch):
    def fail(cost_params):
        raise OSError("the disk is full")

    monkeypatch.setattr(_cost_params, "save", fail)
    monkeypatch.setattr(calibration, "_groups", lambda: [types.SimpleNamespace(scope="process")])
    cell = calibration.Cell("process", "psum", "ring", 8, 1.0, 1.0)
    monkeypatch.setattr(calibration, "_calibrate_group", lambda group, number: ({}, [cell]))
    with pytest.warns(UserWarning, match="not saved in .*: the disk is full"):
        found = jaxcomm.calibrate()
    assert found.cells == (cell,) and found.path is None
    monkeypatch.setattr(calibration, "_groups", list)  # one device
    assert jaxcomm.calibrate().path is None


def test_groups_that_measure(monkeypatch):
    """The first process with several devices, the first node with several processes, and all devices."""

    def groups(nodes, processes):
        devices = [Device(i, process) for i, process in enumerate(processes)]
        monkeypatch.setattr(calibration.placement, "nodes", lambda: nodes)
        monkeypatch.setattr(jax, "devices", lambda platform: devices)
        monkeypatch.setattr(jax, "process_count", lambda: max(processes) + 1)
        return [(g.scope, [d.id for d in g.mesh.devices.flat], g.ranks_per_node) for g in calibration._groups()]

    assert groups([[0]], [0]) == []
    assert groups([[0]], [0, 0]) == [("process", [0, 1], 2)]
    assert groups([[0, 1]], [0, 1, 1]) == [("process", [1, 2], 2), ("node", [0, 1, 2], 3)]
    inter_node = groups([[0], [1, 3], [2]], [0, 1, 2, 3])
    assert inter_node == [("node", [1, 3], 2), ("network", [0, 1, 3, 2], 1)]
    assert groups([[0, 2], [1, 3]], [0, 1, 2, 3])[1:] == [("network", [0, 2, 1, 3], 2)]


@pytest.mark.parametrize(("scope", "nodes"), [("process", 1), ("node", 1), ("network", 8), ("network", 2)])
def test_the_fit_finds_the_machine_that_was_measured(scope, nodes):
    """Fits times that the cost model predicts for a machine with other parameters. A disturbed time changes little."""
    start = _core.plan.machine_of(scope, 8, 8 // nodes)
    links = [("self", 3e-7, 4e9, 0.0), ("node", 4e-7, 3e9, 3e-6), ("network", 6e-6, 1e9, 4e-5)]
    if scope == "process":  # all links are alike
        links = [(name, 1e-7, 2e9, 0.0) for name in ("self", "node", "network")]
    if scope == "node":
        links[2] = ("network", *links[1][1:])
    true = _core.plan.Machine(links, 7e-6, start.ranks_per_processor, True)
    if scope != "process":  # a parameter that is not fitted stays
        start = _core.plan.Machine([links[0], *start.links[1:]], start.launch_s, start.ranks_per_processor, True)
    measured = []
    for collective, algorithm in itertools.product(("all_reduce", "all_to_all"), ("direct", "ring", "hierarchical")):
        for count in (64, 1 << 14, 1 << 19):
            block = count // (8 if collective == "all_to_all" else 1)
            request = _core.plan.Request(collective, nodes, 8 // nodes, block)
            if algorithm in dict(_core.plan.algorithms(collective)) and _core.plan.supports(request, algorithm):
                time_s = _core.plan.cost(request, algorithm, 4, true).time_s
                cell = calibration.Cell(scope, "psum", algorithm, 4 * count, time_s, 0)
                measured.append((request, algorithm, cell))
    disturbed = dataclasses.replace(measured[0][2], measured_s=50 * measured[0][2].measured_s)
    fitted = calibration._fit(start, scope, [*measured, (*measured[0][:2], disturbed)])
    for request, algorithm, cell in measured:
        assert _core.plan.cost(request, algorithm, 4, fitted).time_s == pytest.approx(cell.measured_s, rel=0.1)
    assert fitted.launch_s == pytest.approx(true.launch_s, rel=0.3)
    own, node, network = fitted.links
    assert own[1:3] == node[1:3] if scope == "process" else own == links[0]
    assert node == start.links[1] if nodes == 8 else node[1:3] == pytest.approx(links[1][1:3], rel=0.2)
    assert network[1:] == pytest.approx(links[2][1:], rel=0.2) if nodes > 1 else network[1:] == node[1:]


@pytest.mark.parametrize(("call_s", "repetitions"), [(8, 3), (0.01, 15), (0.001, 50)])  # in 0.15 s, but 3 to 50
def test_a_measurement_is_the_median_of_one_call_of_a_chain(monkeypatch, call_s, repetitions):
    """After two warm-ups and one execution that chooses the repetitions. Two thirds of the repetitions are slow."""
    (group,) = calibration._groups()
    durations, asked, agreed = itertools.chain([9, 9, call_s], itertools.cycle([7, 1, 3])), [], []
    measure_us = lambda: asked.append(next(durations)) or asked[-1] * 1e6  # noqa: E731
    monkeypatch.setattr(calibration.timing, "stopwatch", lambda *_: measure_us)
    monkeypatch.setattr(calibration.kv_store, "kv_agree", lambda *call: agreed.append(call) or call[1])
    assert calibration._median_s(group, "psum", "direct", 1024, "key") == pytest.approx(3 / calibration._CHAIN)
    assert len(asked) == 3 + repetitions and agreed == [("key", str(repetitions))]


def test_measurements_and_predictions_are_of_the_same_call(monkeypatch):
    (group,) = calibration._groups()
    for op in ("psum", "all_to_all"):
        for num_bytes, count in ((1, 8), (256, 64), (1000, 248), (1 << 20, 1 << 18)):
            assert group.size(op, num_bytes).operand == group.request(op, num_bytes).input_count == count
    assert group.request("barrier", 1 << 20).input_count == 0
    calls, keys, done = [], [], set()
    monkeypatch.setattr(calibration, "_median_s", lambda *call: calls.append(call[1:]) or float(len(calls)))
    monkeypatch.setattr(calibration.kv_store, "kv_agree", lambda key, text: keys.append(key) or text)
    measured = calibration._measure(group, "round", done)
    assert calibration._measure(group, "again", done) == []  # the same choices are not measured again
    cells = [cell for _, _, cell in measured]
    assert [(c.scope, c.op, c.algorithm, c.measured_s, c.predicted_s) for c in cells] == [
        ("process", op, algorithm, i + 1.0, 0.0) for i, (op, algorithm, *_) in enumerate(calls)
    ]
    sizes = [("barrier", 256)] + [(op, size) for op in ("psum", "all_to_all") for size in calibration._SIZES]
    assert keys == [f"{key}/{op}/{size}" for key in ("round", "again") for op, size in sizes]
    for op, size in sizes:  # the three of the lowest cost that the cost model has for the sizes of the call
        request, machine = group.request(op, size), group.machine()
        names = [n for n in jaxcomm.algorithms(op) if _core.plan.supports(request, n) and not n.startswith("ll")]
        costs = {name: _core.plan.select(request, name, 4, machine).cost.time_s for name in names}
        found = [(call[1], call[3]) for call in calls if (call[0], call[2]) == (op, size)]
        assert found == [(name, f"round/{op}/{size}/{name}") for name in sorted(costs, key=costs.get)[:3]]
        asked = [request.input_count for request, _, cell in measured if (cell.op, cell.bytes) == (op, size)]
        assert asked == ([request.input_count] * len(found) if op != "barrier" else [])


def test_all_processes_use_the_parameters_of_one(kept, monkeypatch):
    """Otherwise processes would select different plans and hang."""
    asked = []

    def kv_agree(key, text):
        asked.append(text)
        return "none" if len(asked) == 1 else json.dumps({"cost_params": {"process": PARAMS | {"links": rows(1e8)}}})

    monkeypatch.setattr(_cost_params.kv_store, "kv_agree", kv_agree)
    _cost_params.load()
    assert asked == ["none"] and not _cost_params.measured
    _cost_params.save({"process": PARAMS})
    _cost_params.load.cache_clear()
    _cost_params.load()
    assert json.loads(asked[1])["cost_params"]["process"]["links"] == rows(1e6)
    assert _core.plan.machine_of("process", 1).links[1][2] == 1e8


def test_errors_of_cells_and_their_median():
    cells = [calibration.Cell("node", "psum", "ring", 1024, *times) for times in ((1e-6, 2e-6), (3e-6, 2e-6), (1, 1))]
    assert [cell.error for cell in cells] == [1, 0.5, 0]
    lines = str(calibration.Calibration(tuple(cells), None)).splitlines()
    assert lines[1].split() == ["node", "psum", "ring", "1024", "1.0", "us", "2.0", "us", "100%"]
    assert lines[-2:] == ["node: median error 50% of 3", "not saved"]


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", '{"format": 2}', '{"format": 2, "cost_params": {"node": {"links": [1]}}}']
)
def test_a_broken_file_is_ignored_with_a_warning(kept, text):
    kept.parent.mkdir()
    kept.write_text(text)
    with pytest.warns(UserWarning, match=f"{kept.name} can't be used"):
        _cost_params.load()
    assert not jaxcomm.topology().calibrated


def test_path_of_the_saved_parameters(monkeypatch, tmp_path):
    def path(calibration, **environment):
        monkeypatch.setattr(_cost_params, "config", lambda: _config.Config(calibration=calibration))
        for name in ("XDG_CACHE_HOME", "HOME"):
            monkeypatch.setenv(name, environment.get(name, ""))
        return _cost_params.path()

    monkeypatch.setattr(_cost_params.platform, "node", lambda: "host")
    assert path("/given", XDG_CACHE_HOME="/cache") == pathlib.Path("/given")
    assert path("") is None
    assert path(None, XDG_CACHE_HOME="/cache") == pathlib.Path("/cache/jaxcomm/calibration-host.json")
    assert path(None, HOME="/home/me") == pathlib.Path("/home/me/.cache/jaxcomm/calibration-host.json")
