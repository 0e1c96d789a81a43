"""Chakra execution traces: the wire format against google.protobuf, times against the engine and step()."""

import dataclasses
import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from test_goal import APART, LATENCY_S

import jaxcomm
from jaxcomm.simulate import Cluster, StepError, chakra, cli, collective, goal, protobuf, step, workloads
from jaxcomm.simulate.chakra import COLL, COMP, INVALID, RECV, SEND, Node, TraceError

H100 = Cluster.load("dgx-h100")
# Name, number and type of the fields of the schema that traces of collectives use (schema 0.0.4).
_LISTS = ("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
          "sfixed64", "bool", "string", "bytes")  # fmt: skip
# Values of DoubleList.values and so on, in the order of _LISTS.
_VALUES = (0.5, 0.25, -3, -(1 << 40), 7, 1 << 63, -9, -(1 << 50), 5, 1 << 60, -6, -(1 << 45), True, "text", b"\x00\xff")


@pytest.fixture(scope="module")
def schema():
    """Message classes of the schema, by google.protobuf."""
    pb = pytest.importorskip("google.protobuf.descriptor_pb2")
    pool = pytest.importorskip("google.protobuf.descriptor_pool").DescriptorPool()
    factory = pytest.importorskip("google.protobuf.message_factory")
    file = pb.FileDescriptorProto(name="et.proto", package="t", syntax="proto3")

    def message(name, *fields):
        made = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            row = made.field.add(name=field, number=number, label=3 if repeated else 1)
            if kind in _LISTS:
                row.type = getattr(row, f"TYPE_{kind.upper()}")
            else:
                row.type, row.type_name = row.TYPE_MESSAGE, f".t.{kind}"
        return made

    for kind in _LISTS:
        message(f"{kind}_list", ("values", 1, kind, True))
    values = [(f"{kind}_val", 3 + 2 * i, kind, False) for i, kind in enumerate(_LISTS)]
    values += [(f"{kind}_list", 4 + 2 * i, f"{kind}_list", False) for i, kind in enumerate(_LISTS)]
    attribute = message("Attribute", ("name", 1, "string", False), ("doc_string", 2, "string", False), *values)
    attribute.oneof_decl.add(name="value")
    for row in attribute.field:
        if row.number > 2:
            row.oneof_index = 0
    message("Metadata", ("version", 1, "string", False), ("attr", 2, "Attribute", True))
    message("Node", ("id", 1, "uint64", False), ("name", 2, "string", False), ("type", 3, "int32", False),
            ("ctrl_deps", 4, "uint64", True), ("data_deps", 5, "uint64", True),
            ("start_time_micros", 6, "uint64", False), ("duration_micros", 7, "uint64", False),
            ("attr", 10, "Attribute", True))  # fmt: skip
    pool.Add(file)
    return lambda name: factory.GetMessageClass(pool.FindMessageTypeByName(f"t.{name}"))


def _decoded(schema, path):
    """Metadata and nodes, by google.protobuf."""
    first, *rest = protobuf.messages(path.read_bytes())
    return schema("Metadata").FromString(first), [schema("Node").FromString(data) for data in rest]


def test_bytes_of_a_node_are_those_of_the_encoding():
    """Computed by hand: field << 3 | wire type, then the value; 300 is 0xAC 0x02."""
    node = Node(300, "ab", COMP, (), (1, 2), 5, {"is_cpu_op": True})
    attribute = b"\x0a\x09is_cpu_op\xd8\x01\x01"
    expected = b"\x08\xac\x02\x12\x02ab\x18\x04\x2a\x02\x01\x02\x38\x05\x52" + bytes([len(attribute)]) + attribute
    assert chakra.encode(node) == expected
    assert chakra.decode(expected) == node


def test_another_decoder_reads_the_files(schema, tmp_path):
    node = Node(0, "n", COLL, (1, 1 << 40), (7,), 9, {
        "comm_type": 6, "comm_size": 1 << 40, "comm_tag": -1, "is_cpu_op": False, "involved_dim": [True, False],
        "pg_name": "3", "tensor_size": 1 << 63,
    })  # fmt: skip
    assert chakra.write(str(tmp_path / "x.%d.et"), [[node], []]) == 2
    metadata, [found] = _decoded(schema, tmp_path / "x.0.et")
    assert metadata.version and (found.id, found.name, found.type, found.duration_micros) == (0, "n", COLL, 9)
    assert (list(found.ctrl_deps), list(found.data_deps)) == ([1, 1 << 40], [7])
    values = {a.name: (a.WhichOneof("value"), getattr(a, a.WhichOneof("value"))) for a in found.attr}
    assert values.pop("involved_dim")[1].values == [True, False]
    assert values == {
        "comm_type": ("int64_val", 6), "comm_size": ("int64_val", 1 << 40), "comm_tag": ("int32_val", -1),
        "is_cpu_op": ("bool_val", False), "pg_name": ("string_val", "3"), "tensor_size": ("uint64_val", 1 << 63),
    }  # fmt: skip
    assert _decoded(schema, tmp_path / "x.1.et")[1] == []


@pytest.mark.parametrize("kind", range(len(_LISTS)), ids=_LISTS)
def test_attributes_of_every_type_are_read(schema, kind):
    """Written by google.protobuf, which packs lists of numbers."""
    name, value = _LISTS[kind], _VALUES[kind]
    lists = {f"{name}_list": schema(f"{name}_list")(values=[value, value])}
    written = schema("Node")(id=1, attr=[
        schema("Attribute")(name="one", doc_string="d", **{f"{name}_val": value}),
        schema("Attribute")(name="many", **lists),
    ])  # fmt: skip
    assert chakra.decode(written.SerializeToString()).attributes == {"one": value, "many": [value, value]}


def test_lists_that_are_not_packed_are_read():
    assert chakra.decode(b"\x28\x01\x28\x02\x20\x03").data == (1, 2)
    assert chakra.decode(b"\x28\x01\x28\x02\x20\x03").control == (3,)


@pytest.mark.parametrize(
    ("op", "algorithm"), [("psum", "ring"), ("all_gather", "recursive_doubling"), ("all_to_all", "direct")]
)
def test_traces_of_a_plan_take_the_time_of_the_engine(op, algorithm, tmp_path):
    """Where ranks share no link. The engine adds the start and the latency of a last message."""
    (tmp_path / "apart.toml").write_text(APART + "\n")
    cluster = Cluster.load(str(tmp_path / "apart.toml"), {"device.flops_bf16": "1e15"})
    x = jax.ShapeDtypeStruct((1 << 20,), np.float32)
    engine = collective(op, x, 8, cluster=cluster, algorithm=algorithm, fidelity="full")
    template = str(tmp_path / "plan.%d.et")
    chakra.write(template, chakra.of_schedule(goal.of(op, x, 8, cluster=cluster, algorithm=algorithm)))
    found = workloads.of_traces(template, cluster=cluster)
    assert engine.time_s - 7e-6 == pytest.approx(found.time_s, abs=1.1 * LATENCY_S)
    nodes = chakra.read(template)
    sent = [(r, n.attributes["comm_dst"], n.attributes["comm_tag"], n.attributes["comm_size"])
            for r, own in enumerate(nodes) for n in own if n.kind == SEND]  # fmt: skip
    received = [(n.attributes["comm_src"], r, n.attributes["comm_tag"], n.attributes["comm_size"])
                for r, own in enumerate(nodes) for n in own if n.kind == RECV]  # fmt: skip
    assert sorted(sent) == sorted(received) and len(sent) >= 8 * 3


def _step(mesh):
    def f(x, w):
        def layer(h, _):
            return jaxcomm.psum(h @ w, "model"), (h * 2).sum()

        def beside(h, _):
            return jnp.tanh(h), jnp.cos(jax.lax.psum(h * 2, "data")).sum()

        h, sums = jax.lax.scan(layer, x, length=3)
        h, more = jax.lax.scan(beside, h, length=2)
        sums = sums + more.sum()
        return jax.lax.psum(h, "data").sum() + (w @ w).sum() + jax.lax.all_gather(sums, "model").sum()

    s = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    run = jax.shard_map(f, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    return step(run, (s, s), mesh=mesh, cluster=H100)


def test_a_step_keeps_its_time_through_its_traces(schema, tmp_path):
    """Both streams, loops, and groups of each axis. Durations are rounded to nanoseconds."""
    found = _step(AbstractMesh((2, 8), ("data", "model")))
    template = str(tmp_path / "step.%d.et")
    assert chakra.write_step(template, found) == 16
    back = workloads.of_traces(template, cluster=H100)
    assert back.time_s == pytest.approx(found.time_s, rel=1e-5)
    assert back.exposed_s == pytest.approx(found.exposed_s, rel=1e-4) and back.flops == found.flops

    def rows(result):
        return sorted((c.op, c.ranks, c.bytes, c.count) for c in result.collectives)

    assert rows(back) == rows(found)
    groups = json.loads((tmp_path / "step.groups.json").read_text())
    _, nodes = _decoded(schema, tmp_path / "step.11.et")
    attributes = [{a.name: getattr(a, a.WhichOneof("value")) for a in node.attr} for node in nodes if node.type == COLL]
    assert [groups[a["pg_name"]] for a in attributes[:1]] == [list(range(8, 16))]
    spans = {tuple(a["involved_dim"].values): groups[a["pg_name"]] for a in attributes}
    assert spans == {(True, False): list(range(8, 16)), (False, True): [3, 11]}  # the innermost axis comes first
    (tmp_path / "step.groups.json").unlink()
    for rank in range(16):
        path = tmp_path / f"step.{rank}.et"
        own = chakra.read_file(path)
        for node in own:
            node.attributes.pop("pg_name", None)
        chakra.write(str(path).replace(f".{rank}.et", f"{rank}.%d.et"), [own])
        (tmp_path / f"step{rank}.0.et").rename(path)
    by_dims = workloads.of_traces(template, cluster=H100, mesh={"data": 2, "model": 8})
    assert by_dims.time_s == pytest.approx(found.time_s, rel=1e-5)
    with pytest.raises(TraceError, match=r"step.0.et: node \d+ .*involved_dim .* needs communicator groups"):
        workloads.of_traces(template, cluster=H100, mesh={"rank": 16})


def test_a_permutation_becomes_messages(tmp_path):
    """A shift along the inner axis: the last rank of each row sends nothing, the first receives nothing."""
    mesh = AbstractMesh((2, 8), ("data", "model"))

    def f(x):
        return jax.lax.ppermute(x, "model", [(i, i + 1) for i in range(7)])

    run = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    found = step(run, (jax.ShapeDtypeStruct((1 << 20,), jnp.float32),), mesh=mesh, cluster=H100)
    chakra.write_step(str(tmp_path / "p.%d.et"), found)
    nodes = chakra.read(str(tmp_path / "p.%d.et"))
    assert [[n.kind for n in own] for own in nodes] == (
        [[SEND, INVALID]] + [[SEND, RECV]] * 6 + [[INVALID, RECV]]
    ) * 2  # fmt: skip
    assert nodes[9][0].attributes["comm_dst"] == 10 and nodes[9][1].attributes["comm_src"] == 8
    back = workloads.of_traces(str(tmp_path / "p.%d.et"), cluster=H100)
    level = H100.levels[0]
    assert back.time_s == pytest.approx((4 << 20) / level.bytes_per_s + level.overhead_s + level.latency_s)


def _coll(number, size=1 << 20, kind=0, **more):
    return Node(number, "c", COLL, **more, attributes={"comm_type": kind, "comm_size": size})


def _comp(number, micros, **more):
    return Node(number, "k", COMP, **more, micros=micros, attributes={"is_cpu_op": False})


def _run(tmp_path, *ranks):
    chakra.write(str(tmp_path / "t.%d.et"), ranks)
    return workloads.of_traces(str(tmp_path / "t.%d.et"), cluster=H100)


def test_a_collective_waits_for_the_last_rank(tmp_path):
    """Rank 1 computes 700 us before, rank 0 500 us beside and 10 us after the collective."""
    alone = collective("psum", jax.ShapeDtypeStruct((1 << 20,), np.uint8), 2, cluster=H100).time_s
    one = [_coll(0), _comp(1, 500), _comp(2, 10, data=(0,))]
    found = _run(tmp_path, one, [_comp(5, 700), _coll(6, control=(5,))])
    assert found.time_s == pytest.approx(700e-6 + alone + 10e-6)
    assert (found.compute_s, found.exposed_s) == (pytest.approx(510e-6), pytest.approx(alone))


def test_streams_take_one_task_at_a_time(tmp_path):
    """Two kernels and two collectives without dependencies, and a task of the processor beside them."""
    host = Node(4, "h", COMP, micros=5, attributes={"is_cpu_op": True})
    alone = collective("psum", jax.ShapeDtypeStruct((1 << 20,), np.uint8), 2, cluster=H100).time_s
    own = [_comp(0, 3), _comp(1, 4), _coll(2), _coll(3), host]
    found = _run(tmp_path, own, own)
    assert found.time_s == pytest.approx(2 * alone) and found.compute_s == pytest.approx(7e-6)


def test_computation_without_a_duration_takes_its_roofline(tmp_path):
    node = Node(0, "k", COMP, attributes={"num_ops": 10**12, "tensor_size": 10, "is_cpu_op": False})
    found = _run(tmp_path, [node, _coll(1)], [node, _coll(1)])
    of = H100.compute
    assert found.compute_s == pytest.approx(1e12 / (of.flops_per_s * of.efficiency) + of.kernel_s)


def test_collectives_have_the_names_of_the_schema(tmp_path):
    kinds = {0: "psum", 2: "all_gather", 5: "pbroadcast", 6: "all_to_all", 7: "psum_scatter", 9: "barrier"}
    own = [_coll(i, kind=kind) for i, kind in enumerate(kinds)]
    found = _run(tmp_path, own, own)
    assert sorted(c.op for c in found.collectives) == sorted(kinds.values())
    assert {chakra.COLLECTIVES[kind] for kind in kinds} == {
        "ALL_REDUCE", "ALL_GATHER", "BROADCAST", "ALL_TO_ALL", "REDUCE_SCATTER", "BARRIER",
    }  # fmt: skip


def test_a_compressed_trace_is_read(tmp_path):
    chakra.write(str(tmp_path / "t.%d.et"), [[_comp(3, 1)]])
    path = tmp_path / "t.0.et"
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert chakra.read_file(path) == [_comp(3, 1)]


def _after_message(peer):
    """Sends only after it has received."""
    recv = Node(0, "r", RECV, attributes={"comm_size": 4, "comm_src": peer})
    return [recv, Node(1, "s", SEND, data=(0,), attributes={"comm_size": 4, "comm_dst": peer})]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[_comp(0, 1, data=(4,))]], r"t.0.et: node 0 \(k\): depends on node 4, which is not in the file"),
        ([[_comp(0, 1), _comp(0, 2)]], r"t.0.et: node 0 \(k\): its id occurs twice"),
        ([[_comp(0, 1, data=(1,)), _comp(1, 1, data=(0,))]], r"t.0.et: node 0 \(k\) never ends: .*cycle"),
        ([[_coll(0)], [_coll(0, size=4)]], r"t.0.et: node 0 \(c\) and .*t.1.et: node 0 \(c\) differ"),
        ([[_coll(0)], [_coll(0, kind=2)]], r"differ in operation or size"),
        ([[_coll(0), _coll(1)], [_coll(0)]], r"t.0.et: node 1 \(c\): rank 1 of its group never joins"),
        ([[_coll(0, kind=1)]], "REDUCE is not modelled"),
        ([[_coll(0, kind=12)]], "comm_type 12 is not modelled"),
        ([[_coll(0, size=-1)]], "comm_size: got -1, expected a number of at least 0"),
        ([[Node(0, "", COLL, attributes={"comm_type": 0})]], r"node 0 \(COMM_COLL_NODE\): has no attribute comm_size"),
        ([[Node(0, "s", 8)]], r"node 0 \(s\): STORAGE_NODE is not modelled"),
        ([[Node(0, "s", COMP, attributes={"is_cpu_op": True, "num_ops": 3})]], "processor without a duration"),
        ([[Node(0, "s", SEND, attributes={"comm_size": 4, "comm_dst": 0, "comm_src": 1})]], "is that of rank 0"),
        ([[Node(0, "s", SEND, attributes={"comm_size": 4, "comm_dst": 3})]], "peer is rank 3, but there are 1"),
        ([[Node(0, "s", SEND, attributes={"comm_size": 4, "comm_dst": 1})], []], r"t.0.et: .*never received"),
        ([[], [Node(0, "s", RECV, attributes={"comm_size": 4, "comm_src": 0})]], r"t.1.et: .*never sent"),
        ([[Node(0, "s", SEND, attributes={"comm_size": 4, "comm_dst": 1})],
          [Node(0, "r", RECV, attributes={"comm_size": 5, "comm_src": 0})]], r"sends 4 bytes, but .* receives 5"),
        ([[_comp(0, 1, data=(1,)), _comp(1, 1, data=(2,)), _comp(2, 1, data=(1,))]], r"t.0.et: node 1 .* never ends"),
        ([[_coll(0)], [_coll(0, data=(1,)), _comp(1, 1, data=(1,))]], r"^\S*t.1.et: node 1 \(k\) never ends: .*cycle"),
        ([_after_message(1), _after_message(0)], r"ranks wait for each other: .*t.0.et: .* waits for .*t.1.et: "),
        ([[Node(0, "k", COMP, attributes={"num_ops": 3, "dtype": "Floot"})]], "dtype: got 'Floot', expected the name"),
        ([[Node(0, "k", COMP, attributes={"num_ops": 3, "duration_ns": 1 << 62, "dtype": "c10::Half"}),
           Node(1, "s", 8)]], "STORAGE_NODE"),
        ([[Node(0, "c", COLL, attributes={"comm_type": 0, "comm_size": 4, "pg_name": "7"})]],
         r"communicator group 7 is not in .*t.groups.json"),
        ([[]], "the traces have no nodes"),
    ],
)  # fmt: skip
def test_bad_traces_name_file_and_node(tmp_path, ranks, message):
    with pytest.raises((TraceError, StepError), match=message):
        _run(tmp_path, *ranks)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no metadata"),
        (b"\x05ab", "the last message has 2 of 5 bytes"),
        (b"\x00\x02\x08\x80", "node at position 0: a number ends early"),
        (b"\x00\x02\x0b\x00", "wire type 3"),
        (b"\x00\x03\x0a\x01a", "field 1 is no number"),
        (b"\x00\x02\x10\x01", "another type than in the schema"),
        (b"\x1f\x8bnope", "not an execution trace"),
        (b"\xff" * 12, "more than 64 bits"),
    ],
)
def test_files_that_are_no_traces(tmp_path, content, message):
    (tmp_path / "t.0.et").write_bytes(content)
    with pytest.raises(TraceError, match=message) as error:
        chakra.read(str(tmp_path / "t.%d.et"))
    assert "t.0.et" in str(error.value)


def test_bad_groups_and_templates(tmp_path):
    chakra.write(str(tmp_path / "t.%d.et"), [[_coll(0)]])
    bad = {'{"1": [0.7]}': "group 1: got", '{"1": "0"}': "group 1: got", "[]": "expected an object",
           '{"1": [5]}': "group 1", "{": "expected an object"}  # fmt: skip
    for content, message in bad.items():
        (tmp_path / "t.groups.json").write_text(content)
        with pytest.raises(TraceError, match=message):
            workloads.of_traces(str(tmp_path / "t.%d.et"), cluster=H100)
    with pytest.raises(TraceError, match="expected one %d"):
        chakra.read("t.et")
    with pytest.raises(TraceError, match="there are 1 traces, but the mesh has 4 ranks"):
        (tmp_path / "t.groups.json").unlink()
        workloads.of_traces(str(tmp_path / "t.%d.et"), cluster=H100, mesh={"a": 4})


def test_traces_that_would_be_too_large(monkeypatch, tmp_path):
    found = _step(AbstractMesh((2, 8), ("data", "model")))
    monkeypatch.setattr(chakra, "_MAX_NODES", 100)
    with pytest.raises(TraceError, match="exceed 100 nodes"):
        chakra.write_step(str(tmp_path / "t.%d.et"), found)


def test_the_commands_write_and_read_traces(tmp_path, capsys):
    plan, copy = (str(tmp_path / name) for name in ("plan.%d.et", "copy.%d.et"))
    command = ["collective", "psum", "--bytes", "1MiB", "--ranks", "4", "--cluster", "dgx-h100", "--algorithm", "ring"]
    assert cli.main([*command, "--write-chakra", plan]) == 0
    capsys.readouterr()
    step = ["step", "--cluster", "dgx-h100", "--json"]
    assert cli.main([*step, "--chakra", plan]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["mesh"] == {"rank": 4} and row["time_s"] > 6 * (1 << 18) / H100.levels[0].bytes_per_s
    chakra.write(str(tmp_path / "two.%d.et"), [[_comp(0, 5), _coll(1)]] * 2)
    assert cli.main([*step, "--chakra", str(tmp_path / "two.%d.et"), "--write-chakra", copy]) == 2
    assert "--write-chakra cannot write what --chakra reads" in capsys.readouterr().err
    for arguments, message in [
        ([], "expected one of TARGET, --hlo, --chakra, got 0"),
        (["x.py:f", "--chakra", plan], "got 2"),
        (["x.py:f"], "--mesh is missing"),
        (["--chakra", str(tmp_path / "none.%d.et")], "none.0.et: No such file"),
    ]:
        assert cli.main([*step, *arguments]) == 2
        assert message in capsys.readouterr().err


def test_time_limits_of_measured_kernels_are_their_times(tmp_path):
    own = [_comp(0, 500)]
    found = _run(tmp_path, own)
    assert found.band == (found.time_s, found.time_s) and "measured times" in found.why
    slow = dataclasses.replace(H100, faults=Cluster.load("dgx-h100", {"fault.rank[0]": "2"}).faults)
    assert workloads.of_traces(str(tmp_path / "t.%d.et"), cluster=slow).time_s == pytest.approx(2 * found.time_s)
