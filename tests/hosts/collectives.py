"""Program of test_collectives.py for every process. Process 0 prints a JSON line."""

import json
import os
import pathlib
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.extend(str(pathlib.Path(__file__).parents[1] / folder) for folder in ("", "ops", "moe"))
import ragged
import reference
import resharding
from oracle import KINDS, ids_of

import jaxcomm


def place(x, sharding):
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


ROWS = P("i")


def program(body, mesh, x, spec=ROWS):
    """Returns a function without arguments that runs the op on x, a row per rank, and waits for its result."""
    placed = place(x, NamedSharding(mesh, spec))
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return lambda: jax.block_until_ready(f(placed))


def same(result, want):
    """Whether the rows of this process equal those of the oracle."""
    return all(np.array_equal(np.asarray(shard.data), want[shard.index]) for shard in result.addressable_shards)


# Algorithms that a group of all ranks refuses: those of GPUs, and those for several nodes or for one.
ON_GPUS = {"all_gather": "multimem", "psum": "multimem", "pmax": "multimem", "psum_scatter": "multimem"}
ON_SEVERAL_NODES = dict.fromkeys(
    ("all_to_all", "all_gather", "psum", "pmax", "psum_scatter", "pbroadcast", "barrier"), "hierarchical"
)
ON_ONE_NODE = {"all_to_all": "ll", "all_gather": "ll", "psum": "direct one_shot root ll ll_two_shot",
               "pmax": "direct one_shot root ll ll_two_shot", "psum_scatter": "direct ll",
               "pbroadcast": "scatter_all_gather"}  # fmt: skip
# Operations with algorithm="xla_hierarchical".
COMPOSED = ("all_to_all", "all_gather", "psum", "pmax", "psum_scatter", "pbroadcast")


def supports(op, body, algorithm, mesh, x):
    """Whether the algorithm supports a group of all ranks. The lowering checks it."""
    f = jax.shard_map(lambda x: body(x, algorithm), mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=False)
    try:
        algorithm is None or jax.jit(f).lower(jax.ShapeDtypeStruct(x.shape, x.dtype))
    except ValueError as error:
        assert op in str(error), error
        return False
    return True


def every_op(mesh, count, all_algorithms):
    """Every supported algorithm, or the selected one, against NumPy. Integers, so that sums are exact."""
    n = mesh.size
    x = np.random.default_rng(3).integers(-64, 64, (n, n, count // n)).astype(np.float32)
    options = {
        "all_to_all": {"split_axis": 0, "concat_axis": 0, "tiled": True}, "all_gather": {}, "psum": {}, "pmax": {},
        "psum_scatter": {"tiled": True}, "ppermute": {"perm": [(r, (r + 1) % n) for r in range(n)]},
        "pbroadcast": {"source": n - 1}, "barrier": {},
    }  # fmt: skip
    cases = {
        op: (
            lambda x, a, op=op, given=given: getattr(jaxcomm, op)(x[0], "i", **given, algorithm=a)[None],
            np.stack(getattr(reference, op)(list(x), **given)),
        )
        for op, given in options.items()
    }
    weights, columns = np.float32([[2, -3]]), x.reshape(n, -1, 1)
    for op, gathered in (("all_gather_matmul", [columns.reshape(1, -1, 1)] * n), ("matmul_psum_scatter", [columns])):
        cases[op] = (
            lambda x, a, op=op: getattr(jaxcomm, op)(x.reshape(-1, 1), weights, "i", algorithm=a)[None],
            np.concatenate([(rows @ weights).sum(0) for rows in gathered]).reshape(n, -1, 2),
        )
    algorithms = {op: (None, *(jaxcomm.algorithms(op) if all_algorithms else ())) for op in cases}
    for op in COMPOSED if all_algorithms else ():
        algorithms[op] += ("xla_hierarchical",)
    calls = [(op, a) for op in cases for a in algorithms[op]]
    refused = {call for call in calls if not supports(call[0], cases[call[0]][0], call[1], mesh, x)}
    calls = [call for call in calls if call not in refused]
    # One program with all calls: every process compiles, and a program has a cost of its own.
    run = program(lambda x: [cases[op][0](x, algorithm) for op, algorithm in calls], mesh, x)
    for _ in range(3):
        for (op, algorithm), result in zip(calls, run(), strict=True):
            assert same(result, cases[op][1]), (op, algorithm, count)
    return refused


def groups_and_orders(mesh):
    """Groups across processes, axes in both orders, other element types, donated and empty operands."""
    n, rng = mesh.size, np.random.default_rng(4)
    x = rng.integers(-9, 9, (n, 4 * n)).astype(np.float32)
    # Adjacent ranks are in different groups, and ranks have another order than devices.
    groups = [list(range(first, n, n // 2))[::-1] for first in range(n // 2)]
    grid = jax.sharding.Mesh(mesh.devices.reshape(2, -1), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    both = ("a", "b")
    for op, axes, of, operand in (
        ("all_gather", both, groups, x), ("psum", both, groups, x), ("psum", both, None, x[:, :0]),
        *(("all_gather", axes, None, x) for axes in (both, ("b", "a"), ("b",))),
        *(("psum", both, None, x.astype(jax.numpy.dtype(dtype))) for dtype in ("int8", "bfloat16", "complex64")),
    ):  # fmt: skip
        f = lambda x, op=op, axes=axes, of=of: getattr(jaxcomm, op)(x[0], axes, axis_index_groups=of)[None]  # noqa: E731
        rows = operand.reshape(2, n // 2, -1)
        want = reference.on_mesh(getattr(reference, op), rows, grid.shape, axes, of)
        got = program(f, grid, operand, P(both))()
        assert same(got, want.reshape(n, *want.shape[2:])), (op, axes, of, operand.dtype, operand.shape)

    placed, pairs = place(x, NamedSharding(mesh, ROWS)), [(r, (r + 1) % n) for r in range(n)]
    step = jax.shard_map(lambda x: jaxcomm.ppermute(x, "i", pairs), mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    step = jax.jit(step, donate_argnums=0)
    for _ in range(2 * n + 1):
        placed = step(placed)
    assert same(placed, np.roll(x, 1, 0)), "donated"


def slices(mesh, everything):
    """ragged_all_to_all with short and long rows, its gradient, and an error that all processes get.

    By default, the selected algorithm has the short rows, and each other the long ones.
    """
    n, rng, spec = mesh.size, np.random.default_rng(5), P("i")
    vectors, rows, to_rows = ragged.slices(rng, n, 2)
    numbers = np.arange(n * rows).reshape(n, rows)  # of all rows of all operands
    source = np.stack(reference.ragged_all_to_all(numbers, np.full((n, to_rows), -1), *vectors[:3]))
    is_sent, is_kept = np.isin(numbers, source)[..., None], (source < 0)[..., None]

    def program(algorithm):
        def call(x, y, *v):
            f = lambda x, y: jaxcomm.ragged_all_to_all(x, y, *v, axis_name="i", algorithm=algorithm)  # noqa: E731
            result, back = jax.vjp(f, x, y)
            return result, *back(2 * result)

        body = lambda *xs: [y[None] for y in call(*(x[0] for x in xs))]  # noqa: E731
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    for algorithm in (None, *jaxcomm.algorithms("ragged_all_to_all")):
        for width in (1, 4000) if everything else (4000 if algorithm else 1,):
            x, start = (rng.integers(-99, 99, (n, r, width)).astype(np.float32) for r in (rows, to_rows))
            want = np.stack(reference.ragged_all_to_all(x, start, *vectors[:3]))
            sent, kept = 2 * x * is_sent, 2 * start * is_kept
            run, arguments = program(algorithm), [place(a, NamedSharding(mesh, spec)) for a in (x, start, *vectors)]
            for _ in range(3):
                got = run(*arguments)
                assert all(map(same, got, (want, sent, kept))), ("ragged_all_to_all", algorithm, width)
    wrong = [v.copy() for v in vectors]
    wrong[1][0, 2 * n - 1] += 1
    message = f"rank 0 to rank {n - 1}: send_sizes is {wrong[1][0, 2 * n - 1]} at rank 0 and recv_sizes is"
    try:
        jax.block_until_ready(run(*arguments[:2], *(place(v, NamedSharding(mesh, spec)) for v in wrong)))
    except jax.errors.JaxRuntimeError as error:
        assert message in str(error), error
    else:
        raise AssertionError("no error")
    assert all(map(same, run(*arguments), (want, sent, kept))), "after an error"


def experts(mesh, everything):
    """A token's rows go to its experts and back, each times a number of the expert; and the gradient of that."""
    n, spec = mesh.size, P("i")
    rng = np.random.default_rng(6)
    x = rng.integers(-9, 9, (n, 6, 5)).astype(np.float32)
    weights = rng.integers(1, 4, (n, 6, 3)).astype(np.float32)

    def body(ids, x, weights, reduce, algorithm):
        r = jaxcomm.moe.route(ids[0], "i", num_experts=2 * n, align=4, capacity=n * 18 + 6, reduce=reduce)

        def layer(x):
            rows, tokens = jaxcomm.moe.dispatch((x, x.astype(np.int8)), r, algorithm=algorithm)
            expert = jax.numpy.repeat(jax.numpy.arange(2), r.group_sizes, total_repeat_length=len(rows))
            number = 1.0 + expert + 2 * jax.lax.axis_index("i")
            rows = (rows + tokens.astype(x.dtype)) / 2 * number[:, None].astype(x.dtype)
            return jaxcomm.moe.combine(rows, r, weights[0], algorithm=algorithm)

        y, back = jax.vjp(layer, x[0])
        each = jaxcomm.moe.combine(jaxcomm.moe.dispatch(x[0], r), r, per_choice=True)
        return y[None], 2 * back(y)[0][None], each[None]

    checked, variants = 0, [("home", None), ("node", "direct"), ("node", "hierarchical")]
    for reduce, algorithm in [*variants, *([("node", None)] if everything else [])]:
        wrapped = lambda *a, options=(reduce, algorithm): body(*a, *options)  # noqa: E731
        run = jax.jit(jax.shard_map(wrapped, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        for ids in (ids_of(kind, rng, n, 6, 3, 2 * n) for kind in KINDS):
            factor = np.where(ids >= 0, weights * (ids + 1), 0).sum(2)[..., None].astype(np.float32)
            each = np.where(ids[..., None] >= 0, x[:, :, None], 0).astype(np.float32)
            try:
                got = run(*(place(a, NamedSharding(mesh, spec)) for a in (ids, x, weights)))
            except ValueError as error:
                assert algorithm == "hierarchical" and "needs several nodes" in str(error), error
                break
            assert all(map(same, got, (factor * x, factor**2 * x, each))), ("moe", reduce, algorithm, ids)
            checked += 1
    return checked


def has_two_levels(mesh):
    """Whether xla_hierarchical is lowered to several collectives."""
    f = jax.shard_map(
        lambda x: jaxcomm.psum(x, "i", algorithm="xla_hierarchical"), mesh=mesh, in_specs=ROWS, out_specs=P()
    )
    return "reduce_scatter" in jax.jit(f).lower(np.ones(mesh.size, np.int32)).as_text()


def values(mesh):
    """In the other sizes than the default, every algorithm has operands of all sizes."""
    everything = os.environ["SIZE"] != "default"
    refused = every_op(mesh, mesh.size, everything) | every_op(mesh, 1000 * mesh.size, True)
    if mesh.size % 2 == 0:
        groups_and_orders(mesh)
    slices(mesh, everything)
    experts(mesh, everything)
    for seed in range(8 if everything else 1):
        resharding.check_random(seed, 12, max_bytes=[None, 200][seed % 2])
    nodes = jaxcomm.topology().nodes
    others = ON_ONE_NODE if len(nodes) > 1 else ON_SEVERAL_NODES
    expected = {(op, a) for table in (ON_GPUS, others) for op in table for a in table[op].split()}
    assert expected <= refused, expected - refused
    ranks = {sum(d.process_index in node for d in jax.devices()) for node in nodes}
    assert has_two_levels(mesh) == (len(nodes) > 1 and len(ranks) == 1 and ranks != {1})
    regular = len(ranks) == 1 and mesh.size & (mesh.size - 1) == 0
    assert refused == expected or not regular, refused - expected
    return True


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(os.environ["DEVICES"]))
    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"], int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    checked = values(mesh)
    if jax.process_index() == 0:
        print(json.dumps({"checked": checked}), flush=True)
