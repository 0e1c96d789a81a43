"""The commands `collective` and `step`: what-ifs, comparisons, traces and plots."""

import json
import re
import sys

import jax
import numpy as np
import pytest

from jaxcomm.simulate import Cluster, cli, collective, step
from jaxcomm.simulate.collectives import time_text
from jaxcomm.simulate.export import perfetto, plots

PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import jaxcomm

def step(mesh):
    def f(x, w):
        def layer(h, _):
            return jaxcomm.psum(h @ w, "model"), None
        h, _ = jax.lax.scan(layer, x, length=3)
        return jax.lax.psum(h, "data")
    run = jax.shard_map(f, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    return run, (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))

def wrong(mesh):
    return 3

def split(mesh):
    run = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    return run, (jax.ShapeDtypeStruct((64,), jnp.float32),)

def nested(mesh):
    def inner(h, _):
        return jax.lax.psum(h, "data"), None
    def outer(h, _):
        return jax.lax.scan(inner, h @ h, length=2)[0], None
    def f(x):
        return jax.lax.scan(outer, x @ x, length=2)[0]
    run = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return run, (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16),)

def sized(mesh):
    return mesh.shape["data"]

def repeated(mesh):
    def f(x):
        return jax.lax.while_loop(lambda h: h[0, 0] < 9, lambda h: jaxcomm.psum(h @ h, "data", algorithm="ring"), x)
    run = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return run, (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16),)

"""
STEP = ["--mesh", "data=2,model=8", "--cluster", "dgx-h100"]
LATE = ["--what-if", "leaf.latency=60us"]
CALL = ["collective", "ppermute", "--bytes", "64MiB", "--ranks", "16", "--cluster", "dgx-h100"]
PSUM = ["collective", "psum", *CALL[2:]]


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program_of_a_test.py"
    path.write_text(PROGRAM)
    yield str(path)
    sys.modules.pop("program_of_a_test", None)
    sys.path.remove(str(tmp_path)) if str(tmp_path) in sys.path else None


def _rows(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def _plain(row):
    return json.loads(json.dumps(row))


def test_options_reach_the_prediction(program, tmp_path, capsys):
    fault = {"fault.leaf[3]": "0.5", "fault.rank[1]": "2"}
    clusters = [Cluster.load("dgx-h100", fault | more) for more in ({}, {"leaf.latency": "60us"})]
    command = ["--json", "--symmetric-buffers", *LATE, "--fault", "leaf[3]=0.5", "rank[1]=2"]
    call = [*CALL[:1], "psum", *CALL[2:], *command, "--algorithm", "ring", "--dtype", "bfloat16", "--fidelity", "full"]
    assert cli.main(call) == 0
    options = {"algorithm": "ring", "fidelity": "full", "symmetric_buffers": True}
    x = jax.ShapeDtypeStruct((32 << 20,), "bfloat16")
    found = [collective("psum", x, 16, cluster=cluster, **options) for cluster in clusters]
    rows = [{key: value for key, value in vars(one).items() if key != "timeline"} for one in found]
    assert _rows(capsys) == [_plain(rows[0]), {"what_if": "leaf.latency=60us", **_plain(rows[1])}]
    assert cli.main([*CALL[:3], "1MiB,2MiB", *CALL[6:], "--json"]) == 0  # by default, a group of the first level
    assert [(row["ranks"], row["bytes"]) for row in _rows(capsys)] == [(8, 1 << 20), (8, 2 << 20)]
    assert cli.main(["step", f"{program}:repeated", *STEP, *command, "--while-trips", "5"]) == 0
    made = {}
    exec(PROGRAM, made)
    mesh = jax.sharding.AbstractMesh((2, 8), ("data", "model"))
    run, arguments = made["repeated"](mesh)
    rows = [step(run, arguments, mesh=mesh, cluster=c, while_trips=5, symmetric_buffers=True).row() for c in clusters]
    found = _rows(capsys)
    for row in (*rows, *found):
        assert [c.pop("site") for c in row["collectives"]]
        row["why"] = row["why"].split(" at ")[0]
    assert found == [_plain(rows[0]), {"what_if": "leaf.latency=60us", **_plain(rows[1])}]
    assert found[0]["collectives"][0]["count"] == 5


def test_a_trace_of_a_collective_opens_as_chrome_events(tmp_path):
    assert cli.main([*CALL, "--what-if", "leaf.bandwidth=25GB/s", "--trace", str(tmp_path / "t.json")]) == 0  # the last
    content = json.loads((tmp_path / "t.json").read_text())
    slices = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in slices) <= content["otherData"]["time_s"] * 1e6
    sent = [event for event in slices if event["name"].startswith("leaf")]
    assert sum(event["args"]["bytes"] for event in sent) == 64 << 20
    assert sum(event["dur"] for event in sent) == pytest.approx((64 << 20) / (25e9 * 0.97) * 1e6, rel=0.01)
    x = jax.ShapeDtypeStruct((1024,), "float32")
    options = {"cluster": Cluster.load("dgx-h100"), "algorithm": "ring", "max_entries": 999}
    found = collective("all_gather", x, 16, **options)
    events = perfetto.of_collective(found)["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    rows = []
    for e in found.timeline:
        thread = "queue of the network" if e.queued else "processor" if e.name else "waits"
        times = e.start_s * 1e6, (e.end_s - e.start_s) * 1e6
        rows.append((f"rank {e.rank}, as {e.ranks - 1} others", thread, e.name or "wait", e.bytes, *times))
    assert sorted(rows) == sorted(
        (names["process_name", e["pid"], 0], names["thread_name", e["pid"], e["tid"]], e["name"], e["args"]["bytes"],
         e["ts"], e["dur"])
        for e in events if e["ph"] == "X"
    )  # fmt: skip
    assert {e.queued for e in found.timeline} == {False, True} and {e.ranks for e in found.timeline} == {2}


def test_loops_of_a_trace_hold_their_iterations(program, tmp_path):
    assert cli.main(["step", f"{program}:nested", *STEP, "--trace", str(tmp_path / "t.json")]) == 0
    content = json.loads((tmp_path / "t.json").read_text())
    threads = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    slices = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert [(threads[e["tid"]], e["name"]) for e in slices] == [
        ("computation", "dot_general"), ("loops", "scan x 2"), ("computation", "dot_general"), ("loops", "scan x 2"),
        ("collectives", "psum data"),
    ]  # fmt: skip
    first, outer, product, inner, call = ((e["ts"], e["ts"] + e["dur"]) for e in slices)
    assert outer[1] == pytest.approx(content["otherData"]["time_s"] * 1e6)
    assert first[0] == 0 and first[1] == outer[0] == product[0] and product[1] == inner[0] == call[0]
    assert outer[1] - outer[0] == pytest.approx(2 * (inner[1] - outer[0]))
    assert inner[1] - inner[0] == pytest.approx(2 * (call[1] - call[0]))
    arguments = [{key: value for key, value in e["args"].items() if key != "site"} for e in slices]
    product, exchange = {"flop": 2 * 1024**3, "bytes": 3 * 2 * 1024**2}, (call[1] - call[0]) * 1e-6
    assert arguments == [product, {}, product, {}, {"elements": 1024**2, "exposed_s": pytest.approx(exchange)}]
    assert all(e["args"]["site"].startswith("program_of_a_test.py:") for e in slices)
    (name,) = (e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name")
    assert name.startswith("each of 16 devices of DGX H100")


def _drawn(monkeypatch):
    """The figures that are saved from now on."""
    figure = pytest.importorskip("matplotlib.figure")
    saved = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **_: saved.append((path, self)))
    return saved


def _no_overlap(figure):
    """No two texts of an axis overlap, and all are inside the figure."""
    figure.draw_without_rendering()
    edge = figure.bbox
    for axes in figure.axes:
        boxes = [t.get_window_extent() for t in [*axes.get_yticklabels(), *axes.texts, axes.title] if t.get_text()]
        assert all(b.x0 >= edge.x0 and b.x1 <= edge.x1 and b.y0 >= edge.y0 and b.y1 <= edge.y1 for b in boxes)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_waterfall_has_each_change_alone_and_all_together(program, monkeypatch, capsys):
    saved = _drawn(monkeypatch)
    what_if = ["--what-if", "device.flops_bf16=494.5Tflop/s", "leaf.latency=60us"]
    command = ["step", f"{program}:step", *STEP, "--json", *what_if, "--compare", "nvl576"]  # not in the waterfall
    assert cli.main([*command, "--plot", "x.png", "waterfall=w.png"]) == 0
    rows = _rows(capsys)
    base, *alone, together, _ = (row["time_s"] for row in rows)
    (_, steps), (_, figure) = saved
    [axes] = steps.axes  # computation of all rows, then communication without computation
    exposed = [row["exposed_s"] for row in rows]
    rest = [row["time_s"] - row["exposed_s"] for row in rows]
    bars = [(bar.get_x() * 1e-3, bar.get_width() * 1e-3) for bar in axes.patches]
    assert np.array(bars) == pytest.approx(
        np.array([(0, s) for s in rest] + [*zip(rest, exposed, strict=True)]), abs=1e-9
    )
    low, high = (time_text(end_s) for end_s in rows[1]["interval"])
    assert axes.texts[1].get_text() == f"{time_text(alone[0])} ({low} to {high})"
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["as given", *what_if[1:], "all what-ifs", "cluster nvl576"]
    _no_overlap(steps)
    [axes] = figure.axes
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]
    times = [(0, base), *((base, time_s) for time_s in alone), (0, together)]
    assert [x * 1e-3 for bar in bars for x in bar] == pytest.approx([x for bar in times for x in bar], abs=1e-9)
    assert together > max(alone) and "(ms)" in axes.get_xlabel()
    _no_overlap(figure)


def test_lines_of_a_plot_are_those_of_their_points(monkeypatch):
    """Over bytes, unless only ranks differ. The intervals of two lines are shaded."""
    saved, kib = _drawn(monkeypatch), 1024
    few = [(8, kib, 1e-6, (5e-7, 3e-6)), (16, kib, 2e-6, None), (8, 4 * kib, 4e-6, (1e-6, 9e-6))]
    plots.collectives("few.png", "a title", [plots.Point("ring", *point) for point in few])
    plots.collectives("many.png", "", [plots.Point(name, n, kib, n * 1e-6, (0, 1)) for name in "abc" for n in (2, 8)])
    assert [path for path, _ in saved] == ["few.png", "many.png"] and saved[0][1].get_suptitle() == "a title"
    [axes], [other] = (figure.axes for _, figure in saved)
    assert [one.get_xlabel() for one in (axes, other)] == ["operand", "ranks"]
    lines = [{line.get_label(): line.get_xydata().tolist() for line in one.lines} for one in (axes, other)]
    assert lines[0] == {"ring, 8 ranks": [[kib, 1e-6], [4 * kib, 4e-6]], "ring, 16 ranks": [[kib, 2e-6]]}
    assert lines[1] == {f"{series}, 1 KiB": [[2, 2e-6], [8, 8e-6]] for series in "abc"}
    ends = [area.get_paths()[0].vertices[:, 1] for area in axes.collections]
    assert [(end.min(), end.max()) for end in ends] == [(5e-7, 9e-6), (2e-6, 2e-6)] and not other.collections
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1 KiB", "4 KiB"]
    assert axes.yaxis.get_major_formatter()(2e-3, 0) == "2 ms"


def test_a_waterfall_has_no_other_algorithms(monkeypatch, tmp_path):
    saved = _drawn(monkeypatch)
    path = str(tmp_path / "a=b.png")
    command = ["collective", "psum", "--bytes", "1MiB", "--ranks", "16", "--cluster", "dgx-h100", "--compare", "ring"]
    assert cli.main([*command, *LATE, "--plot", path, f"waterfall={tmp_path}/w.png"]) == 0
    assert [name for name, _ in saved] == [path, f"{tmp_path}/w.png"]
    [axes] = saved[1][1].axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["as given", "leaf.latency=60us", "all changes"]


def test_missing_matplotlib_is_noticed_before_the_first_prediction(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main([*CALL, "--plot", "x.png"]) == 2
    printed = capsys.readouterr()
    assert "--plot: needs matplotlib" in printed.err and not printed.out


def test_a_change_is_a_guess():
    cluster = Cluster.load("dgx-h100", {"leaf.bandwidth": "800 Gb/s", "nvlink.ranks": "16", "leaf.ranks": "512"})
    assert cluster.levels[1].bytes_per_s == pytest.approx(100e9 * 0.97)
    assert cluster.levels[0].ranks == 16
    assert cluster.origins["leaf.bandwidth"] == "guess: what-if"
    assert cluster.origins["leaf.efficiency"] == Cluster.load("dgx-h100").origins["leaf.efficiency"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([*CALL, "--plot", "x.png", "waterfall=./x.png"], "--plot: got 'waterfall=./x.png', expected OUT.png or"),
        ([*CALL, "--plot", "no/x.png"], "--plot: no/x.png: expected a file that can be written"),
        ([*CALL, "--trace", "no/x.json"], "--trace: no/x.json: expected a file that can be written"),
        ([*CALL, "--plot", "waterfall="], "--plot: got 'waterfall='"),
        ([*CALL, "--plot", "waterfall=x.png"], "--plot waterfall: needs --what-if"),
        ([*CALL, "--plot", "waterfall=x.png", *LATE, "leaf.latency=2us"], "leaf.latency is in two"),
        ([*CALL, "--plot", "waterfall=x.png", *LATE, "--ranks", "8,16"], "needs one size and one number of ranks"),
        ([*CALL, "--plot", "x.png", "--fidelity", "bounds"], "--plot: --fidelity bounds gives no times"),
        ([*CALL, "--compare", "nonsense"], "--compare: got 'nonsense', expected nccl-VERSION such as nccl-2.28, or"),
        ([*CALL, "--bytes", "3"], "--bytes: 3 is not a multiple of the 4 bytes of float32"),
        ([*CALL, "--bytes", "1TB"], "the operand has 1,000 GB per rank, but a device of DGX H100, .* has 80 GB"),
        (["collective", "all_gather", "--bytes", "2GB", "--ranks", "64", *CALL[6:]], "the result has 128 GB per"),
        ([*CALL, "--bytes", "1TiB", "--fidelity", "bounds"], "the operand has 1,100 GB per rank"),
        (["step", "{}", *STEP], "expected FILE.py:FUNCTION or MODULE:FUNCTION"),
        (["step", "none.py:step", *STEP], "none.py: No such file"),
        (["step", "no_such_module:step", *STEP], "no_such_module: No module named"),
        (["step", "{}:nothing", *STEP], "has no function nothing"),
        (["step", "{}:wrong", *STEP], "must return the step and a tuple of its arguments, got 3"),
        (["step", "{}:step", "--mesh", "data=2,model", "--cluster", "dgx-h100"], "--mesh: got 'model'"),
        (["step", "{}:step", "--mesh", "dat=8", "--cluster", "dgx-h100"],
         "{}:step: step: mesh dat=8: psum: axis_name 'model' is not bound here"),
        (["step", "{}:split", "--mesh", "dat=8", "--cluster", "dgx-h100"], "{}:split: step: mesh dat=8: shard_map "),
        (["step", "{}:sized", "--mesh", "dat=8", "--cluster", "dgx-h100"],
         "step: {}:sized: --mesh dat=8 has no axis 'data'"),
        (["step", "{}:step", *STEP, "--what-if", "leaf.latency"], "--what-if: got 'leaf.latency', expected KEY=VALUE"),
        (["step", "{}:step", *STEP, "--compare", "nope"], "neither a file"),
        (["step", *STEP], "step: expected one of TARGET and --hlo, got none"),
        (["step", "{}:step", *STEP, "--hlo", "x"], "step: expected one of TARGET and --hlo, got both"),
        (["step", *STEP, "--hlo", "x", "--symmetric-buffers"], "step: --symmetric-buffers needs a TARGET"),
        (["step", "{}:step", "--cluster", "dgx-h100"], "step: --mesh is missing, such as --mesh data=16,model=8"),
        ([*CALL, "--fault", "leaf[3]=0.5", "leaf[3] =0.2"], "--fault: 'leaf[3] =0.2' contradicts an earlier fault"),
        ([*CALL, "--dtype", "nope"], "--dtype: got 'nope', expected an element type"),
        ([*CALL, "--what-if", "rack.latency=1"], "dgx-h100: rack.latency: unknown key; known are device.KEY, "),
        ([*CALL, "--ranks", "many"], "--ranks: got 'many'"),
        ([*CALL, "--ranks", "8,0"], "--ranks: got '8,0', expected positive numbers"),
        ([*CALL, "--compare", "nccl-2.28", "--ranks", "1"], "a group of one rank exchanges nothing"),
        ([*CALL, "--compare", "nccl-2.28", "--cluster", "nvl576"], "measured domains of GB300 have at most 72 ranks"),
        ([*PSUM, "--fault", "leaf[3]"], "--fault: got 'leaf[3]'"),
        ([*PSUM, "--fault", "leaf[99]=0.5"], "fault leaf[99] with 0.5 of its bandwidth: the index must be below 16"),
        ([*PSUM, "--fault", "nvlink[1]=0"], "would be cut off"),
        ([*PSUM, "--fault", "rank[16]=2"], "fault rank 16 2 times as slow: the index must be below 16"),
        ([*PSUM, "--fault", "rank[16]=lost"], "fault rank 16 lost: the index must be below 16"),
        ([*PSUM, "--fault", "spine[1]=0.5"], "16 ranks use the levels nvlink, leaf only"),
        ([*PSUM, "--fault", *(f"leaf[{rank}]=lost" for rank in range(8))], "all adapters of the domain of rank"),
        ([*PSUM, "--fault", *(f"leaf[{rank}]=lost" for rank in (0, 1, 2, 3, 12, 13, 14, 15))],
         "the domains of ranks 0 and 8 have no rail left in common"),
        ([*PSUM, "--ranks", "512", "--fault", "spine[16]=0.5"], "the index must be below 16"),
        ([*PSUM, "--bytes", "1KiB", "--ranks", "8", "--fault", "nvlink[8]=0.5"], "the index must be below 8"),  # LL
        ([*CALL, "--dtype", "V0"], "--dtype: got 'V0', expected an element type"),
        ([*CALL, "--cluster", "nope.toml"], "nope.toml: No such file"),
        (["collective", "barrier", *CALL[2:], "--compare", "nccl-2.28"], "no measurements of barrier"),
    ],
)  # fmt: skip
def test_bad_input_ends_before_the_first_prediction(program, command, message, capsys):
    try:
        assert cli.main([part.replace("{}", program) for part in command]) == 2
    except SystemExit as error:  # argparse itself
        assert error.code == 2
    printed = capsys.readouterr()
    message = message.replace("{}", program)
    assert re.search(message, printed.err) if ".*" in message else message in printed.err
    assert not printed.out or "--compare" in command
