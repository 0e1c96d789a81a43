"""Calibration in one process: what is found, kept, read again and used."""

import importlib
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm import _config, _core, figures

calibration = importlib.import_module("jaxcomm.calibrate")
OPERAND = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A file of its own, and the figures of before afterwards."""
    path = tmp_path / "folder" / "figures.json"
    monkeypatch.setattr(figures, "config", lambda: _config.Config(calibration=str(path)))
    monkeypatch.setattr(figures, "measured", set())
    before = _core.plan.machine_of("process", 1)
    figures.load.cache_clear()
    yield path
    _core.set_figures("process", before)
    figures.load.cache_clear()


def rows(bytes_per_s):
    return [["self", 1e-7, bytes_per_s, 0.0], ["node", 1e-7, bytes_per_s, 0.0], ["network", 2e-5, 1e9, 0.0]]


def predicted_s():
    return jaxcomm.explain("psum", OPERAND, 8).predicted_time_s


def test_what_is_measured_is_used_and_kept(kept, monkeypatch):
    monkeypatch.setattr(calibration, "_SIZES", (1024, 1 << 20))
    monkeypatch.setattr(calibration, "_SECONDS", 0.02)
    found = jaxcomm.calibrate()
    assert {cell.reach for cell in found.cells} == {"process"}
    assert {cell.op for cell in found.cells} == {"barrier", "psum", "all_to_all"}
    assert all(cell.measured_s > 0 and cell.predicted_s > 0 for cell in found.cells)
    assert found.path == kept and str(kept) in str(found)
    topology = jaxcomm.topology()
    assert topology.calibrated and "measured by calibrate()" in str(topology)
    (row,) = [link for link in topology.links if link.name == "node"]
    assert row.bytes_per_s == json.loads(kept.read_text())["figures"]["process"]["links"][1][2]


def test_figures_are_read_again(kept):
    before = predicted_s()
    figures.keep({"process": {"links": rows(1e6), "launch_s": 1e-5}})
    assert predicted_s() == before  # they are read once
    figures.load.cache_clear()
    assert predicted_s() > 100 * before
    assert jaxcomm.topology().calibrated


def test_reaches_are_kept_beside_each_other(kept):
    figures.keep({"process": {"links": rows(1e6), "launch_s": 1e-5}})
    figures.keep({"network": {"links": rows(1e7), "launch_s": 2e-5}})
    assert set(json.loads(kept.read_text())["figures"]) == {"process", "network"}
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", '{"format": 1}', '{"format": 1, "figures": {"node": {"links": [1]}}}']
)
def test_a_broken_file_is_said_and_ignored(kept, text):
    kept.parent.mkdir()
    kept.write_text(text)
    with pytest.warns(UserWarning, match=f"{kept.name} can't be used"):
        figures.load()
    assert not jaxcomm.topology().calibrated


def test_figures_of_another_machine_are_ignored(kept):
    figures.keep({"process": {"links": rows(1e6), "launch_s": 1e-5}})
    content = json.loads(kept.read_text())
    kept.write_text(json.dumps(content | {"processors": 1000}))
    figures.load()
    assert not jaxcomm.topology().calibrated


def test_the_environment_names_the_file(tmp_path):
    path = tmp_path / "figures.json"
    slow = {"format": 1, "processors": jaxcomm.topology().processors,
            "figures": {"process": {"links": rows(1e6), "launch_s": 1e-5}}}  # fmt: skip
    path.write_text(json.dumps(slow))
    script = "import jax, jaxcomm; print(jaxcomm.explain('psum', jax.ShapeDtypeStruct((1 << 20,), 'f4'), 8))"
    environment = {"JAXCOMM_CALIBRATION": str(path), "JAX_PLATFORMS": "cpu", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("predicted")]
    assert float(line.split()[1]) > 1e6


def test_explain_tells_reaches_apart():
    near = jaxcomm.explain("psum", OPERAND, 8, reach="node")
    far = jaxcomm.explain("psum", OPERAND, 8, reach="network", ranks_per_node=1)
    assert near.bytes["network"] == 0 < far.bytes["network"]
    assert far.algorithm not in ("direct", "root", "one_shot")  # which read the memory of others
    assert jaxcomm.explain("psum", OPERAND, (2, 4), reach="network").algorithm == "hierarchical"


def test_explain_refuses_what_is_no_group():
    with pytest.raises(ValueError, match="reach must be process, node or network"):
        jaxcomm.explain("psum", OPERAND, 8, reach="moon")
    with pytest.raises(ValueError, match="8 ranks are not nodes of 3"):
        jaxcomm.explain("psum", OPERAND, 8, ranks_per_node=3)
