"""Program of test_collectives.py for every process. Process 0 prints a JSON line."""

import json
import os
import pathlib
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import resharding

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
    x = np.random.default_rng(3).integers(-64, 64, (n, count)).astype(np.float32)
    blocks, weights = x.reshape(n, n, -1), np.float32([[2, -3]])
    cases = {
        "all_to_all": (lambda x, a: jaxcomm.all_to_all(x.reshape(n, -1), "i", 0, 0, algorithm=a).reshape(1, -1),
                       blocks.swapaxes(0, 1).reshape(n, -1)),
        "all_gather": (lambda x, a: jaxcomm.all_gather(x[0], "i", algorithm=a).reshape(1, -1),
                       np.tile(x.reshape(1, -1), (n, 1))),
        "psum": (lambda x, a: jaxcomm.psum(x, "i", algorithm=a), np.tile(x.sum(0), (n, 1))),
        "pmax": (lambda x, a: jaxcomm.pmax(x, "i", algorithm=a), np.tile(x.max(0), (n, 1))),
        "psum_scatter": (lambda x, a: jaxcomm.psum_scatter(x.reshape(n, -1), "i", tiled=True, algorithm=a),
                         blocks.sum(0)),
        "ppermute": (lambda x, a: jaxcomm.ppermute(x, "i", [(r, (r + 1) % n) for r in range(n)], algorithm=a),
                     np.roll(x, 1, 0)),
        "pbroadcast": (lambda x, a: jaxcomm.pbroadcast(x, "i", n - 1, algorithm=a), np.tile(x[-1:], (n, 1))),
        "barrier": (lambda x, a: jaxcomm.barrier(x, "i", algorithm=a), x),
        "all_gather_matmul": (
            lambda x, a: jaxcomm.all_gather_matmul(x.T, weights, "i", algorithm=a).reshape(1, -1),
            np.tile((x.reshape(-1, 1) @ weights).reshape(1, -1), (n, 1))),
        "matmul_psum_scatter": (
            lambda x, a: jaxcomm.matmul_psum_scatter(x.T, weights, "i", algorithm=a).reshape(1, -1),
            (x.sum(0).reshape(-1, 1) @ weights).reshape(n, -1)),
    }  # fmt: skip
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
    pairs = np.empty((n, 2, 4 * n), np.float32)
    for group in groups:
        pairs[group] = x[group]
    f = program(lambda x: jaxcomm.all_gather(x[0], "i", axis_index_groups=groups).reshape(1, 2, -1), mesh, x)
    assert same(f(), pairs), "all_gather in groups"
    total = np.empty_like(x)
    for group in groups:
        total[group] = x[group].sum(0)
    assert same(program(lambda x: jaxcomm.psum(x, "i", axis_index_groups=groups), mesh, x)(), total), "psum in groups"

    grid = jax.sharding.Mesh(mesh.devices.reshape(2, -1), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for axes in (("a", "b"), ("b", "a"), ("b",)):
        rows = x.reshape(2, n // 2, -1)
        order = rows if axes[0] == "a" else rows.swapaxes(0, 1)
        want = np.tile(order.reshape(1, n, -1), (n, 1, 1)) if len(axes) == 2 else np.repeat(rows, n // 2, 0)
        f = program(lambda x, axes=axes: jaxcomm.all_gather(x[0], axes)[None], grid, x, P(("a", "b")))
        assert same(f(), want), f"all_gather over {axes}"

    small = rng.integers(-3, 4, (n, 37)).astype(np.int8)
    for dtype in ("int8", "bfloat16", "complex64"):
        f = program(lambda x, dtype=dtype: jaxcomm.psum(x.astype(dtype), "i").real.astype(np.int8), mesh, small)
        assert same(f(), np.tile(small.sum(0, dtype=np.int8), (n, 1))), dtype
    assert same(program(lambda x: jaxcomm.psum(x, "i"), mesh, x[:, :0])(), x[:, :0]), "empty"

    placed = place(x, NamedSharding(mesh, P("i")))
    step = jax.shard_map(lambda x: jaxcomm.ppermute(x, "i", [(r, (r + 1) % n) for r in range(n)]), mesh=mesh,
                         in_specs=P("i"), out_specs=P("i"))  # fmt: skip
    step = jax.jit(step, donate_argnums=0)
    for _ in range(2 * n + 1):
        placed = step(placed)
    assert same(placed, np.roll(x, 1, 0)), "donated"


def slices(mesh, rng):
    """Vectors of ragged_all_to_all, (n, N) each: two slices per pair, a part of them empty, received in any order."""
    n = mesh.size
    sizes = rng.integers(0, 5, (n, n, 2)) * rng.integers(0, 2, (n, n, 2))
    inputs = np.cumsum(sizes.reshape(n, -1), 1) - sizes.reshape(n, -1)
    received = sizes.swapaxes(0, 1).reshape(n, -1)
    order = rng.permuted(np.tile(np.arange(2 * n), (n, 1)), axis=1)
    outputs = np.empty_like(received)
    for rank in range(n):
        outputs[rank, order[rank]] = np.cumsum(received[rank, order[rank]]) - received[rank, order[rank]]
    outputs = outputs.reshape(n, n, 2).swapaxes(0, 1).reshape(n, -1)
    return [v.astype(np.int32) for v in (inputs, sizes.reshape(n, -1), outputs, received)]


def ragged(mesh, everything):
    """ragged_all_to_all with short and long rows, its gradient, and an error that all processes get.

    By default, the selected algorithm has the short rows, and each other the long ones.
    """
    n, rng, spec = mesh.size, np.random.default_rng(5), P("i")
    vectors = slices(mesh, rng)

    def program(algorithm):
        def call(x, y, *v):
            f = lambda x, y: jaxcomm.ragged_all_to_all(x, y, *v, axis_name="i", algorithm=algorithm)  # noqa: E731
            result, back = jax.vjp(f, x, y)
            return result, *back(2 * result)

        body = lambda *xs: [y[None] for y in call(*(x[0] for x in xs))]  # noqa: E731
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    for algorithm in (None, *jaxcomm.algorithms("ragged_all_to_all")):
        for width in (1, 4000) if everything else (4000 if algorithm else 1,):
            x, start = (rng.integers(-99, 99, (n, r, width)).astype(np.float32) for r in (16 * n, 9 * n))
            want, sent, kept = start.copy(), 0 * x, 2 * start
            for r in range(n):
                for i, (row, size, at) in enumerate(zip(*(v[r] for v in vectors[:3]), strict=True)):
                    want[i // 2, at : at + size] = x[r, row : row + size]
                    sent[r, row : row + size] = 2 * x[r, row : row + size]
                    kept[i // 2, at : at + size] = 0
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


def routings(n, rng):
    """Tables of ids, (n, 6, 3): any experts, one for all, those of one rank, a rank without choices, none at all."""
    ids = rng.integers(-1, 2 * n, (n, 6, 3)).astype(np.int32)
    silent = ids.copy()
    silent[n // 2] = -1
    return ids, np.full_like(ids, 2 * n - 1), np.abs(ids) % 2, silent, np.full_like(ids, -1), ids[:, :, :1] + 0 * ids


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
        for ids in routings(n, rng):
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
    ragged(mesh, everything)
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
