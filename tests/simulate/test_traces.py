"""Nodes of written traces by value, files of other runs, and executions of three ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm.simulate import Cluster, StepError, chakra, collective, goal, protobuf, step, workloads
from jaxcomm.simulate.chakra import COLL, COMP, RECV, SEND, Node, TraceError

H100 = Cluster.load("dgx-h100")


def _step(f, ranks=4, shape=(64, 64)):
    mesh = AbstractMesh((ranks,), ("d",))
    run = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return step(run, (jax.ShapeDtypeStruct(shape, jnp.float32),), mesh=mesh, cluster=H100)


def test_iterations_do_not_overlap(tmp_path):
    """Computation and transfer of an iteration are independent of each other, and both wait for the one before."""

    def f(x):
        def body(h, _):
            started = jaxcomm.psum_start(h, "d")
            h = jnp.tanh(h)
            return h, started.done(after=h)

        return jax.lax.scan(body, x, length=2)[1]

    chakra.write_step(str(tmp_path / "s.%d.et"), _step(f))
    nodes = chakra.read(str(tmp_path / "s.%d.et"))[1]
    first, second = nodes[:2], nodes[2:]
    assert [n.kind for n in first] == [n.kind for n in second] == [COLL, COMP]
    assert [n.control for n in first] == [(), ()] and [n.control for n in second] == [(0, 1), (0, 1)]


def test_nodes_of_a_plan():
    """A broadcast to one other rank, written by hand: the bytes arrive before anything that needs them."""
    schedule = [
        [goal.Op("calc", 1500), goal.Op("send", 64, 1, 7, (0,))],
        [goal.Op("recv", 64, 0, 7), goal.Op("calc", 2000, requires=(0,)), goal.Op("send", 8, 0, 9, (1, 0))],
    ]
    cpu = {"is_cpu_op": False}
    first, second = chakra.of_schedule(schedule)
    assert first == [
        Node(0, "calc", COMP, (), (), 2, {**cpu, "duration_ns": 1500}),
        Node(1, "send 0 to 1", SEND, (0,), (), 0,
             {**cpu, "comm_src": 0, "comm_dst": 1, "comm_tag": 7, "comm_size": 64}),
    ]  # fmt: skip
    assert second == [
        Node(0, "recv 0 to 1", RECV, (), (), 0,
             {**cpu, "comm_src": 0, "comm_dst": 1, "comm_tag": 7, "comm_size": 64}),
        Node(1, "calc", COMP, (), (0,), 2, {**cpu, "duration_ns": 2000}),
        Node(2, "send 1 to 0", SEND, (1,), (0,), 0,
             {**cpu, "comm_src": 1, "comm_dst": 0, "comm_tag": 9, "comm_size": 8}),
    ]  # fmt: skip


def test_nodes_of_a_step(tmp_path):
    """A product, two permutations of its result and a reduction to parts."""

    def f(x):
        y = x @ x
        a = jax.lax.ppermute(y, "d", [(0, 1), (1, 0)])
        b = jax.lax.ppermute(a, "d", [(0, 1), (1, 0)])
        return jax.lax.psum_scatter(b, "d", tiled=True)

    found = _step(f, ranks=2)
    template = str(tmp_path / "s.%d.et")
    chakra.write_step(template, found)
    nodes = chakra.read(template)[1]
    assert [(n.kind, n.control, n.data) for n in nodes] == [
        (COMP, (), ()), (SEND, (), (0,)), (RECV, (1,), (0,)), (SEND, (), (1, 2)), (RECV, (3,), (1, 2)),
        (COLL, (), (3, 4)),
    ]  # fmt: skip
    product, send, recv, again, _, scatter = (n.attributes for n in nodes)
    assert (product["num_ops"], product["tensor_size"], product["dtype"]) == (2 * 64**3, 3 * 4 * 64**2, "float32")
    assert product["duration_ns"] == round((found.timeline.runs[0].end_s) * 1e9)
    assert (send["comm_src"], send["comm_dst"], recv["comm_src"], recv["comm_dst"]) == (1, 0, 0, 1)
    assert send["comm_tag"] == recv["comm_tag"] != again["comm_tag"] and send["comm_size"] == 4 * 64**2
    assert (scatter["comm_type"], scatter["comm_size"], scatter["involved_dim"]) == (7, 4 * 64**2, [True])
    # duration_ns is a uint64_val: field 13.
    message = list(protobuf.messages((tmp_path / "s.1.et").read_bytes()))[1]
    assert b"\x0a\x0bduration_ns\x68" in message


def test_files_of_another_run(tmp_path):
    template = str(tmp_path / "t.%d.et")
    own = [Node(0, "k", COMP, micros=5, attributes={"is_cpu_op": False})]
    chakra.write(template, [own] * 12)
    with pytest.raises(TraceError, match=r"t.4.et: is of a run with more than 4 ranks"):
        chakra.write(template, [own] * 4)
    (tmp_path / "t.3.et").unlink()
    with pytest.raises(TraceError, match=r"t.3.et: is missing, but there is one of rank 11"):
        chakra.read(template)
    (tmp_path / "m.json").write_text("mine")
    chakra.write_step(str(tmp_path / "m.%d.et"), _step(lambda x: jax.lax.psum(x, "d")))
    assert (tmp_path / "m.json").read_text() == "mine" and (tmp_path / "m.groups.json").exists()
    for rank in range(2):
        (tmp_path / f"run{rank}").mkdir()
    assert chakra.write(str(tmp_path / "run%d/t.et"), [own] * 2) == len(chakra.read(str(tmp_path / "run%d/t.et")))


def test_long_loops_are_refused_before_they_are_unrolled(tmp_path):
    found = _step(lambda x: jax.lax.scan(lambda h, _: (jax.lax.psum(h @ h, "d"), None), x, length=10**9)[0])
    with pytest.raises(TraceError, match="4 traces of 2000000000 nodes exceed"):
        chakra.write_step(str(tmp_path / "l.%d.et"), found)


def test_a_step_of_traces_is_not_written(tmp_path):
    template = str(tmp_path / "t.%d.et")
    chakra.write(template, [[_comp(0, 1)], [_comp(0, 9)]])
    with pytest.raises(TraceError, match="was read from traces"):
        chakra.write_step(str(tmp_path / "c.%d.et"), workloads.of_traces(template, cluster=H100))


def _comp(number, micros, needs=(), host=False):
    return Node(number, "k", COMP, data=needs, micros=micros, attributes={"is_cpu_op": host})


def _message(number, kind, peer, size, needs=(), tag=0):
    other = "comm_dst" if kind == SEND else "comm_src"
    return Node(number, "m", kind, data=needs, attributes={"comm_size": size, other: peer, "comm_tag": tag})


def _run(tmp_path, ranks, cluster=H100, **options):
    chakra.write(str(tmp_path / "g.%d.et"), ranks)
    return workloads.of_traces(str(tmp_path / "g.%d.et"), cluster=cluster, **options)


@pytest.mark.parametrize("kind", [7, 8])
def test_three_ranks_wait_for_the_last_one(tmp_path, kind):
    """Both kinds of reduction to parts; the third rank differs, which two ranks would not show."""
    coll = Node(9, "c", COLL, data=(0,), attributes={"comm_type": kind, "comm_size": 3 << 20})
    alone = collective("psum_scatter", jax.ShapeDtypeStruct((3 << 20,), np.uint8), 3, cluster=H100).time_s
    found = _run(tmp_path, [[_comp(0, micros), coll] for micros in (10, 20, 400)])
    assert found.time_s == pytest.approx(400e-6 + alone)
    other = Node(9, "c", COLL, data=(0,), attributes={"comm_type": kind, "comm_size": 3})
    with pytest.raises(StepError, match=r"t?g.0.et: node 9 .* and .*g.2.et: node 9 .* differ"):
        _run(tmp_path, [[_comp(0, 1), own] for own in (coll, coll, other)])


def test_messages_between_nodes_take_every_level(tmp_path):
    """Rank 8 is in another node: the adapter sends, and all latencies above the domain count, with the flow's limit."""
    size = 8 << 20
    cluster = Cluster.load("dgx-h100", {"leaf.flow": "10 GB/s"})
    ranks = [[] for _ in range(16)]
    ranks[0], ranks[8] = [_message(0, SEND, 8, size)], [_message(0, RECV, 0, size)]
    found = _run(tmp_path, ranks, cluster)
    leaf = cluster.levels[1]
    assert found.time_s == pytest.approx(leaf.overhead_s + size / 10e9 + leaf.latency_s)
    cluster = Cluster.load("dgx-h100", {"leaf.ranks": "16"})
    ranks, leaf, spine = [[] for _ in range(32)], cluster.levels[1], cluster.levels[2]
    ranks[0], ranks[24] = [_message(0, SEND, 24, size)], [_message(0, RECV, 0, size)]
    (tmp_path / "far").mkdir()
    found = _run(tmp_path / "far", ranks, cluster)
    sent_s = spine.overhead_s + size / min(leaf.bytes_per_s, spine.flow_bytes_per_s)
    assert found.time_s == pytest.approx(sent_s + leaf.latency_s + spine.latency_s)


def test_messages_that_overlap_count_once(tmp_path):
    """Two messages arrive from two ranks at the same time, beside a task of the processor."""
    size = 8 << 20
    ranks = [
        [_message(0, RECV, 1, size), _message(1, RECV, 2, size), _comp(2, 1, host=True), _comp(3, 2)],
        [_message(0, SEND, 0, size)],
        [_message(0, SEND, 0, size)],
    ]
    found = _run(tmp_path, ranks)
    assert found.communication_s == pytest.approx(found.time_s) and found.compute_s == pytest.approx(2e-6)
