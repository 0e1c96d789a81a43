"""Order, asynchronous operations, loops and types of HLO texts, against what their schedules say and against jaxprs."""

import jax
import jax.numpy as jnp
import pytest
from hlo_texts import ADD, GLOBAL, MESH, P0, SIZES, block, text
from jax.sharding import PartitionSpec as P

from jaxcomm.simulate import Cluster, StepError, step, step_of_hlo

H100 = Cluster.load("dgx-h100")
START = f"%s = bf16[1024,1024] all-reduce-start(%p), {GLOBAL}, replica_groups={{}}, to_apply=%add"
DONE = "%e = bf16[1024,1024] all-reduce-done(%s)"
DOT = "%d = bf16[1024,1024] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
END = "ROOT %t = (bf16[1024,1024], bf16[1024,1024]) tuple(%e, %d)"


def _tasks(*lines, **options):
    return [(type(t.work).__name__, t.needs) for t in block(*lines, **options)[1].tasks]


def test_the_order_of_a_scheduled_text_counts():
    """The product runs beside the exchange only if it stands between start and done."""
    times = []
    for lines in ([START, DOT, DONE], [START, DONE, DOT], [DOT, START, DONE]):
        found = step_of_hlo(text(P0, *lines, END), cluster=H100)
        times.append(found.time_s)
        kernel_s, exchange_s = found.compute_s, found.communication_s
    assert times[0] == pytest.approx(max(kernel_s, exchange_s))
    assert times[1:] == [pytest.approx(kernel_s + exchange_s)] * 2
    free = text(P0, DOT, START, DONE, END).replace("is_scheduled=true, ", "")
    assert step_of_hlo(free, cluster=H100).time_s == pytest.approx(times[0])
    later = START.replace("%s =", "%u =")
    assert _tasks(P0, START, DOT, DONE, later)[2][1] == (0, 1)  # waits for the product as well as for the exchange


def test_control_dependencies_count():
    """The start has been issued when the product runs, which does not mean that its work has ended."""
    lines = [P0, START, DONE, DOT + ", control-predecessors={%e}", END]
    loose = text(*lines).replace("is_scheduled=true, ", "")
    found = step_of_hlo(loose, cluster=H100)
    assert found.time_s == pytest.approx(found.compute_s + found.communication_s)
    issued = step_of_hlo(loose.replace("{%e}", "{%s}"), cluster=H100)
    assert issued.time_s == pytest.approx(max(found.compute_s, found.communication_s))


CALLED = ADD + (
    f"\n%ac (q: bf16[1024,1024]) -> bf16[1024,1024] {{\n  %q = bf16[1024,1024] parameter(0)\n"
    f"  ROOT %x = bf16[1024,1024] all-reduce(%q), {GLOBAL}, replica_groups={{}}, to_apply=%add\n}}\n"
    "\n%fu (q: bf16[1024,1024]) -> bf16[1024,1024] {\n  %q = bf16[1024,1024] parameter(0)\n"
    "  ROOT %x = bf16[1024,1024] dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
)
_STARTED = "%s = ((bf16[1024,1024]), bf16[1024,1024], s32[]) {}"


@pytest.mark.parametrize(
    "start", ["call-start(%p), to_apply=%ac", "async-start(%p), calls=%ac", "custom-call-start(%p), to_apply=%ac"]
)
def test_started_computations_run(start):
    """Their collectives run beside the product."""
    if start.startswith("custom"):
        start = 'custom-call-start(%p), custom_call_target="x"'
    done = f"%e = bf16[1024,1024] {start.split('(')[0].replace('-start', '-done')}(%s)"
    _, found = block(P0, _STARTED.format(start), DOT, done, END, more=CALLED)
    first, second = found.tasks
    assert first.needs == second.needs == ()
    if start.startswith("custom"):
        assert (first.work.name, first.work.bytes) == ("x", 2 * 2 * 1024**2)
    else:
        assert (first.work.op, first.work.count, first.work.asynchronous) == ("psum", 1 << 20, True)
    done = done.replace("%e", "%c")
    assert _tasks(P0, _STARTED.format(start), done, DOT.replace("(%p, %p)", "(%p, %c)"), more=CALLED)[1][1] == (0,)


def test_a_started_fusion_is_its_kernel():
    start = _STARTED.format("fusion-start(%p), kind=kCustom, calls=%fu")
    lines = [P0, start, "%e = bf16[1024,1024] fusion-done(%s)"]
    (task,) = block(*lines, more=CALLED)[1].tasks
    assert (task.work.flops, task.work.bytes) == (2.0 * 1024**3, 2 * 2 * 1024**2)
    (task,) = block(P0, "%k = bf16[1024,1024] strange(%p)")[1].tasks
    assert (task.work.name, task.work.flops, task.work.bytes) == ("strange", 0, 2 * 2 * 1024**2)
    with pytest.raises(StepError, match=r"custom-call s: jaxcomm_permute .*use TARGET"):
        block(P0, _STARTED.format('custom-call-start(%p), custom_call_target="jaxcomm_permute"'))


def test_a_combined_permutation_sends_all_operands():
    """In place, the other operands are the result and offsets."""
    pairs = "source_target_pairs={{0,1},{1,0}}"
    small = "%q = bf16[1024]{0} parameter(1)"
    line = f"%s = (bf16[1024,1024], bf16[1024]) collective-permute(%p, %q), {pairs}"
    assert [e.count for e in block(P0, small, line)[1].exchanges()] == [(1 << 20) + 1024]
    assert [e.count for e in block(P0, small, line + ", slice_sizes={{1024}}")[1].exchanges()] == [1 << 20]


def test_a_result_needs_only_its_part_of_a_tuple():
    one = START.replace("%s =", "%a =")
    pair = "%u = (bf16[1024,1024], bf16[1024,1024]) tuple(%f, %p)"
    part = "%g = bf16[1024,1024] get-tuple-element(%u), index="
    for index, needs in ((0, (0,)), (1, ())):
        lines = [P0, one, DONE.replace("%e", "%f").replace("%s", "%a"), pair, part + str(index)]
        module = text(*lines, DOT.replace("(%p, %p)", "(%g, %g)")).replace("is_scheduled=true, ", "")
        found = step_of_hlo(module, cluster=H100)
        ends = found.compute_s + found.communication_s if needs else max(found.compute_s, found.communication_s)
        assert found.time_s == pytest.approx(ends)


def test_groups_without_global_ids_are_groups_of_replicas():
    """One replica: each group has all partitions."""
    line = "ROOT %r = bf16[1024,1024] all-reduce(%p), channel_id=1, replica_groups={{0}}, to_apply=%add"
    (found,) = block(P0, line)[1].exchanges()
    assert (found.axes, found.groups) == (("data", "model"), None)


def test_slices_outside_of_fusions_move_their_part():
    stack = "%w = bf16[16,1024,1024] parameter(0)"
    update = "%x = bf16[1,1024,1024] parameter(1)"
    size = 2 * 1024**2
    for line, moved in (
        ("%s = bf16[1,1024,1024] slice(%w), slice={[0:1],[0:1024],[0:1024]}", 2 * size),
        ("%s = bf16[1,1024,1024] dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={1,1024,1024}", 2 * size + 3 * 4),
        ("%s = bf16[4,1024,1024] gather(%w, %l), offset_dims={1,2}", 2 * 4 * size + 16),
        ("%s = bf16[16,1024,1024] scatter(%w, %l, %x), to_apply=%add", 3 * size + 16),
        ("%s = (bf16[1,1024,1024], bf16[1,1024,1024], u32[]) copy-start(%x)", 2 * size),
        ("%s = bf16[16,1024,1024] dynamic-update-slice(%w, %x, %i, %i, %i)", 2 * size),
        ("%s = bf16[16,1024,1024] negate(%w)", 32 * size),
        ("%s = s32[] add(%i, %i)", None),
    ):
        _, found = block(stack, update, "%i = s32[] constant(0)", "%l = s32[4] parameter(2)", line)
        assert [task.work.bytes for task in found.tasks] == ([] if moved is None else [moved])


def test_a_ragged_product_has_the_weights_of_one_group():
    lines = ["%w = bf16[4,1024,512] parameter(1)", "%n = s32[4] constant({1,2,3,4})"]
    _, found = block(P0, *lines, "%r = bf16[1024,512] ragged-dot(%p, %w, %n), lhs_contracting_dims={1}")
    assert found.tasks[0].work.flops == 2.0 * 1024 * 1024 * 512


def test_packed_types_take_their_bits():
    lines = [
        "%a = s4[1000]{0:E(4)} parameter(0)",
        f"%g = s4[8000]{{0:E(4)}} all-gather(%a), {GLOBAL}, replica_groups={{}}",
    ]
    (found,) = block(*lines)[1].exchanges()
    assert (found.count, found.dtype) == (500, "uint8")


def test_collectives_of_a_condition_count():
    """The condition of a while loop runs once more than its body: in HLO and in the jaxpr."""

    def f(x):
        def more(c):
            return jax.lax.psum(jnp.abs(c[1]).sum() + c[1] * 2, "data")[0, 0] < 3.0

        return jax.lax.while_loop(more, lambda c: (c[0] + 1, jnp.sin(c[1]) * 2), (0, x))[1]

    run = jax.jit(jax.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False))
    args = [jax.ShapeDtypeStruct((512, 512), jnp.float32)]
    compiled = run.lower(*args).compile().as_text()
    for found in (
        step_of_hlo(compiled, cluster=H100, mesh=SIZES, while_trips=5),
        step(run, args, mesh=MESH, cluster=H100, while_trips=5),
    ):
        assert [(c.op, c.axes, c.bytes) for c in found.collectives] == [("psum", ("data",), 4 * 512 * 512)] * len(
            found.collectives
        )
        assert sum(c.count for c in found.collectives) == 6 and any("set while_trips" in note for note in found.notes)


def test_a_program_in_bfloat16_keeps_its_types():
    """XLA:CPU converts operands of products and reductions to float32; the jaxpr has bfloat16."""

    def f(x, w):
        h = jnp.tanh(jax.lax.psum(x @ w, "model"))
        return jax.lax.psum_scatter(h @ w, "data", tiled=True)

    run = jax.jit(jax.shard_map(f, mesh=MESH, in_specs=(P(), P()), out_specs=P(), check_vma=False))
    args = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 2
    found = step_of_hlo(run.lower(*args).compile().as_text(), cluster=H100, mesh=SIZES)
    traced = step(run, args, mesh=MESH, cluster=H100)
    assert [(c.op, c.bytes) for c in found.collectives] == [(c.op, c.bytes) for c in traced.collectives]
    assert found.communication_s == pytest.approx(traced.communication_s) and found.flops == traced.flops
    assert found.compute_s == pytest.approx(traced.compute_s, rel=0.15)
    assert any("before the conversion" in note for note in found.notes)
