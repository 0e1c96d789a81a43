"""step_of_hlo(): compiled programs against their jaxprs, XLA's own counts, and texts with known contents."""

import json

import jax
import jax.numpy as jnp
import pytest
from hlo_texts import ADD, GLOBAL, HEAD, MESH, P0, REDUCE, SIZES
from hlo_texts import block as _block
from hlo_texts import text as _text
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.simulate import Cluster, StepError, cli, step, step_of_hlo
from jaxcomm.simulate.step import hlo, hlo_text
from jaxcomm.simulate.step.jaxpr import Reader
from jaxcomm.simulate.step.tasks import Kernel, Loop

H100 = Cluster.load("dgx-h100")


def _rows(found):
    return sorted((c.op, c.axes, c.ranks, c.bytes, c.count) for c in found.collectives)


def _struct(shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*spec)))


def test_a_compiled_program_has_the_collectives_of_its_jaxpr():
    """Operations, axes, bytes and counts, also in a loop; and the operations of products. XLA removes nothing here."""

    def f(x, w):
        lax = jax.lax

        def layer(h, _):
            return jnp.tanh(lax.psum(h @ w, "model")), None

        h, _ = lax.scan(layer, x, length=5)
        a = lax.all_gather(h, "data", tiled=True)
        b = lax.psum_scatter(a, "model", tiled=True)
        c = lax.all_to_all(b, "model", 0, 0, tiled=True)
        d = lax.ppermute(c, "model", [(i, (i + 1) % 4) for i in range(4)])
        return lax.pmax(lax.ppermute(d, ("data", "model"), [(i, 7 - i) for i in range(8)]), ("data", "model"))

    run = jax.jit(jax.shard_map(f, mesh=MESH, in_specs=(P(), P()), out_specs=P(), check_vma=False))
    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    text = run.lower(*args).compile().as_text()
    found, traced = step_of_hlo(text, cluster=H100, mesh=SIZES), step(run, args, mesh=MESH, cluster=H100)
    assert _rows(found) == _rows(traced) and len(_rows(found)) == 7
    assert found.flops == traced.flops == 5 * 2 * 64**3
    assert {c.site.split(":")[0] for c in found.collectives} == {"test_hlo.py"}
    assert found.communication_s == pytest.approx(traced.communication_s)
    assert any("no pairs of start and done" in note for note in found.notes)


def _conv(a, b, padding="VALID", strides=(1, 1), **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(a, b, strides, padding, dimension_numbers=numbers, **options)


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (lambda a, b: a @ b, [(24, 40), (40, 56)]),
        (lambda a, b: jnp.einsum("bij,bkj->bik", a, b), [(3, 24, 40), (3, 56, 40)]),
        (lambda a, b: _conv(a, b, feature_group_count=2), [(2, 12, 12, 8), (3, 3, 4, 6)]),
        (lambda a, b: _conv(a, b, batch_group_count=4), [(8, 12, 12, 8), (3, 3, 8, 16)]),
        (lambda a, b: _conv(a, b, ((1, 2), (1, 2)), lhs_dilation=(2, 2)), [(2, 32, 32, 8), (3, 3, 8, 16)]),
        (lambda a, b: _conv(a, b, "SAME", rhs_dilation=(3, 2)), [(2, 8, 9, 8), (5, 7, 8, 16)]),
        (jax.grad(lambda a, b: _conv(a, b, "SAME", (2, 2)).sum(), (0, 1)), [(2, 32, 32, 8), (3, 3, 8, 16)]),
    ],
)
def test_operations_are_those_that_xla_counts(f, shapes):
    compiled = jax.jit(f).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
    reader = hlo._Reader(module := hlo_text.parse(compiled.as_text()), {"device": 1}, 1)
    works = [task.work for task in reader.block(module.entry).tasks]
    assert sum(work.flops for work in works) == pytest.approx(compiled.cost_analysis()["flops"], rel=0.02)
    jaxpr = jax.make_jaxpr(f)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    traced = [task.work for task in Reader(1).block(jaxpr).tasks]
    assert sum(work.flops for work in traced) == sum(work.flops for work in works)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[2,4]<=[2,2,2]T(2,0,1)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['x'=2,'y'=4] {'y'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['x'=2,'y'=2,'z'=2] {'z','x'}", [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("mesh['x'=8] {'x':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['x'=1,'y'=4,'z'=2],device_ids=([2,4]T(1,0)){'y'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['x'=2,'y'=2],device_ids=(0,2,1,3) {'y'}", [[0, 2], [1, 3]]),
        ("{}", [list(range(8))]),
        ("", [list(range(8))]),
    ],
)
def test_groups_in_every_form(text, expected):
    assert hlo_text.groups(text, 8).tolist() == expected


@pytest.mark.parametrize(
    ("groups", "place"),
    [
        ("[2,4]<=[8]", (("model",), None)),
        ("[4,2]<=[2,4]T(1,0)", (("data",), None)),
        ("{{7,6,5,4},{0,1,2,3}}", (("model",), None)),
        ("{}", (("data", "model"), None)),
        ("{{0,2},{1,3},{4,6},{5,7}}", (("data", "model"), ((0, 2), (1, 3), (4, 6), (5, 7)))),
    ],
)
def test_groups_are_named_by_the_axes_of_the_mesh(groups, place):
    line = f"ROOT %r = bf16[1024,1024]{{1,0}} all-reduce(%p), {GLOBAL}, replica_groups={groups}, to_apply=%add"
    _, block = _block(P0, line)
    (found,) = block.exchanges()
    assert (found.axes, found.groups) == place and (found.op, found.count, found.dtype) == (
        "psum", 1 << 20, "bfloat16",
    )  # fmt: skip


def test_ragged_and_several_operands():
    _, block = _block(
        P0,
        "%n = s32[4] constant({0, 1, 2, 3})",
        "%o = bf16[4096,1024] broadcast(%n), dimensions={}",
        "%x = bf16[4096,1024] ragged-all-to-all(%p, %o, %n, %n, %n, %n), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}",  # noqa: E501
        "%h = f32[64] constant({...})",
        f"ROOT %r = (bf16[1024,1024], /*index=1*/f32[64]) all-reduce(%p, %h), {GLOBAL}, replica_groups={{}}, to_apply=%add",  # noqa: E501
    )
    assert [(e.op, e.count, e.dtype) for e in block.exchanges()] == [
        ("ragged_all_to_all", 1 << 20, "bfloat16"), ("psum", 1 << 20, "bfloat16"), ("psum", 64, "float32"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pairs", "axes", "perm"),
    [
        ("{{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}", ("model",), ((0, 1), (1, 2), (2, 3))),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), ((0, 1),)),
        ("{{0,5}}", ("data", "model"), ((0, 5),)),
    ],
)
def test_permutations_name_the_fewest_axes(pairs, axes, perm):
    start = f"%s = (bf16[1024,1024], bf16[1024,1024]) collective-permute-start(%p), source_target_pairs={pairs}"
    _, block = _block(P0, start, "ROOT %d = bf16[1024,1024] collective-permute-done(%s)")
    (found,) = block.exchanges()
    assert (found.op, found.axes, found.perm, found.count) == ("ppermute", axes, perm, 1 << 20)


def test_branches_are_alternatives():
    branch = "\n%{} (q: bf16[1024,1024]) -> bf16[1024,1024] {{\n  %q = bf16[1024,1024] parameter(0)\n  ROOT %y = bf16[1024,1024] {}(%q)\n}}\n"  # noqa: E501
    more = ADD + branch.format("one", "negate") + branch.format("two", "copy")
    line = "%c = bf16[1024,1024] conditional(%k, %p, %p), branch_computations={%one, %two}"
    _, block = _block(P0, "%k = s32[] constant(0)", line, "ROOT %r = bf16[1024,1024] copy(%c)", more=more)
    loop, last = block.tasks
    assert isinstance(loop.work, Loop) and len(loop.work.blocks) == 2 and last.needs == (0,)


def test_fusions_move_what_they_use():
    """A slice of a stack is read in part, and an update in place writes the update only. Parameters have numbers."""
    more = (
        ADD
        + """
%fused (b: s32[], a: bf16[16,1024,1024]) -> bf16[1024,1024] {
  %b = s32[] parameter(1)
  %a = bf16[16,1024,1024] parameter(0)
  %z = s32[] constant(0)
  %d = bf16[1,1024,1024] dynamic-slice(%a, %b, %z, %z), dynamic_slice_sizes={1,1024,1024}
  ROOT %r = bf16[1024,1024] bitcast(%d)
}

%update (a: bf16[16,1024,1024], x: bf16[1024,1024], b: s32[]) -> bf16[16,1024,1024] {
  %a = bf16[16,1024,1024] parameter(0)
  %x = bf16[1024,1024] parameter(1)
  %b = s32[] parameter(2)
  %z = s32[] constant(0)
  %y = bf16[1,1024,1024] bitcast(%x)
  ROOT %u = bf16[16,1024,1024] dynamic-update-slice(%a, %y, %b, %z, %z)
}
"""
    )
    _, block = _block(
        "%w = bf16[16,1024,1024] parameter(0)",
        "%i = s32[] constant(3)",
        "%s = bf16[1024,1024] fusion(%w, %i), kind=kLoop, calls=%fused",
        "ROOT %u = bf16[16,1024,1024] fusion(%w, %s, %i), kind=kLoop, calls=%update",
        more=more,
    )
    size = 2 * 1024**2
    assert [t.work.bytes for t in block.tasks] == [2 * size + 4, 2 * size + 4]
    assert block.tasks[1].needs == (0,)


def test_library_calls_have_the_operations_of_their_product():
    numbers = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}'  # noqa: E501
    config = f'backend_config={{"gemm_backend_config":{{"alpha_real":1,"dot_dimension_numbers":{numbers}}}}}'
    gemm = f'(bf16[1024,1024], s8[33554432]) custom-call(%p, %p), custom_call_target="__cublas$gemm", {config}'
    _, block = _block(P0, f"ROOT %g = {gemm}")
    (task,) = block.tasks
    assert isinstance(task.work, Kernel) and task.work.flops == 2.0 * 1024**3 and task.work.dtype == "bfloat16"
    assert (task.work.name, task.work.bytes) == ("__cublas$gemm", 3 * 2 * 1024**2 + 32 * 1024**2)
    of_batch = gemm.replace('["0"],"lhs_b', '["1"],"lhs_b').replace('batch_dimensions":[]', 'batch_dimensions":["0"]')
    (task,) = _block("%p = bf16[8,32,64] parameter(0)", f"ROOT %g = {of_batch}")[1].tasks
    assert task.work.flops == 2 * 8 * 32 * 64 * 64


def test_collectives_name_their_place():
    tables = 'FileNames\n1 "/home/b/train.py"\n2 "/home/b/model.py"\n\nFunctionNames\n1 "f"\n\nFileLocations\n'
    tables += "1 {file_name_id=1 function_name_id=1 line=3}\n2 {file_name_id=2 function_name_id=1 line=7 end_line=8}\n"
    tables += "\nStackFrames\n1 {file_location_id=1}\n2 {file_location_id=2 parent_frame_id=1}\n\n"
    source = 'source_file="/home/a/train.py" source_line=12'
    expected = {source: "train.py:12", "stack_frame_id=2": "model.py:7", "stack_frame_id=9": "jit(f)/psum"}
    for metadata, site in expected.items():
        line = f'{REDUCE}, metadata={{op_name="jit(f)/psum" {metadata}}}'
        (found,) = step_of_hlo(_text(P0, line).replace(HEAD, HEAD + tables), cluster=H100).collectives
        assert found.site == site


def test_types_have_their_bytes():
    """Types of less than a byte take whole bytes unless the layout packs them."""
    found = hlo_text.shapes(
        "(f8e4m3fn[8], s4[8]{0:E(4)}, s4[8], f4e2m1fn[<=8]{0}, pred[8], c64[8], u16[2,4]{1,0:T(8,128)}, f32[], token[])"
    )
    assert [shape.bytes for shape in found] == [8, 4, 8, 8, 8, 64, 16, 4, 0]
    names = ["float8_e4m3fn", "int4", "int4", "float4_e2m1fn", "bool", "complex64", "uint16", "float32"]
    assert [shape.dtype for shape in found[:-1]] == names
    assert all(jnp.dtype(name) for name in names)


_SELF = "\n%c (q: bf16[8]) -> bf16[8] {\n  %q = bf16[8] parameter(0)\n  ROOT %x = bf16[8] call(%q), to_apply=%c\n}\n"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "x.hlo: not HLO text: a line with HloModule is missing"),
        (HEAD, {}, "x.hlo: not HLO text: a computation is missing"),
        (_text(P0, REDUCE)[:-3], {}, "the end of main is missing"),
        (_text(P0, "ROOT %r = bf16[4] add(%p"), {}, r"x.hlo: line 11: a bracket is not closed"),
        (_text(P0, "what is this"), {}, "x.hlo: line 11: expected NAME = TYPE"),
        (_text(P0, "ROOT %r = bf16[4] negate(%q)"), {}, "x.hlo: line 11: negate r: the operand q is not defined"),
        (_text(P0, "ROOT %r = bf16[1024,1024] negate(%p)"), {}, "the program has no collective"),
        (_text(P0, REDUCE), {"mesh": {"a": 4}}, "the program has 8 devices, but the mesh has 4 ranks"),
        (_text(P0, REDUCE.replace("={}", "={{0,1},{2}}")), {}, "line 11: all-reduce r: groups of different sizes"),
        (_text(P0, REDUCE.replace("={}", "={{0,8}}")), {}, "line 11: all-reduce r: expected distinct devices below 8"),
        (_text(P0, REDUCE.replace("={}", "=@mesh")), {}, "line 11: all-reduce r: expected lists of devices"),
        (_text(P0, REDUCE.replace("={}", "=mesh['x'=8] {'y'}")), {}, "line 11: all-reduce r: the mesh .* no axis 'y'"),
        (_text(P0, REDUCE.replace("={}", "=mesh['x'=8] {'x':(3)2}")), {}, r"axis 'x' of size 8 has no part \(3\)2"),
        (_text(P0, "ROOT %r = bf16[4] send(%p)"), {}, "line 11: send r is not modelled"),
        (_text(P0, "ROOT %r = bf16[4,4] collective-permute(%p), source_target_pairs={{0,8}}"), {}, "devices below 8"),
        (_text(P0, 'ROOT %r = bf16[4,4] custom-call(%p), custom_call_target="Sharding"'), {}, "is not partitioned"),
        (_text(P0, REDUCE.replace("={}", "=[3,4]<=[8]")), {}, "line 11: all-reduce r: cannot reshape"),
        (_text(P0, REDUCE.replace("={}", "=mesh['x'=4],device_ids=(0,1) {'x'}")), {}, "expected 4 devices of a mesh"),
        (_text(P0, REDUCE.replace("%add", "%none")), {}, "line 11: all-reduce r: the computation none is missing"),
        (_text(P0, "%c = bf16[4] fusion(%p), kind=kLoop", REDUCE), {}, "fusion c: expected an attribute calls"),
        (_text(P0, "%c = bf16[4] call(%p), to_apply=%c", REDUCE, more=ADD + _SELF), {}, "computation c calls itself"),
        (_text(P0, "%c = bf16[8] dot(%p)", REDUCE), {}, "line 11: dot c: expected two operands"),
        (_text(P0, "%c = bf16[8,8] convolution(%p, %p), dim_labels=b0f_0io->b0f", REDUCE), {}, "11: .* do not fit"),
        (_text(P0, "%c = foo7[8] negate(%p)", REDUCE), {}, "line 11: the type foo7 is not known"),
        (_text("%p = bf16[8] parameter(x)", REDUCE), {}, "line 10: invalid literal for int"),
        (_text(P0, "%n = bf16[8] negate(%q)", "%q = bf16[8] negate(%p)", REDUCE), {}, "q is not defined before it"),
        (_text(P0, REDUCE).replace("partitions=8", "partitions=0"), {}, "at least one partition"),
        (_text(P0, REDUCE) * 2, {}, "x.hlo: line 13: another HloModule"),
    ],
)  # fmt: skip
def test_bad_texts_name_file_and_line(text, options, message):
    with pytest.raises(StepError, match=message):
        step_of_hlo(text, cluster=H100, file="x.hlo", **options)


def test_groups_of_replicas_are_groups_of_devices():
    """A program of pmap: replicas only. Groups of both are not modelled."""
    line = REDUCE.replace(GLOBAL + ", ", "").replace("={}", "={{0,1,2,3},{4,5,6,7}}")
    text = _text(P0, line).replace("num_partitions=8", "replica_count=8")
    assert _rows(step_of_hlo(text, cluster=H100, mesh=SIZES)) == [("psum", ("model",), 4, 2 << 20, 1)]
    with pytest.raises(StepError, match="groups of replicas in a program with partitions"):
        step_of_hlo(text.replace("replica_count=8", "replica_count=2, num_partitions=4"), cluster=H100)


def test_the_command_reads_a_file(tmp_path, capsys):
    (tmp_path / "x.hlo").write_text(_text(P0, REDUCE))
    command = ["step", "--hlo", str(tmp_path / "x.hlo"), "--cluster", "dgx-h100"]
    assert cli.main([*command, "--what-if", "nvlink.bandwidth=225GB/s", "--trace", str(tmp_path / "t.json")]) == 0
    out = capsys.readouterr().out
    assert "(device 8)" in out and "psum" in out and "compared" in out
    last = step_of_hlo(_text(P0, REDUCE), cluster=Cluster.load("dgx-h100", {"nvlink.bandwidth": "225GB/s"}))
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["time_s"] == last.time_s
    assert cli.main([*command, "--mesh", "a=3"]) == 2
    assert "x.hlo: the program has 8 devices" in capsys.readouterr().err
