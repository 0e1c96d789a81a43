"""models/mesh: packing of the parameters, collectives of a step, balancing loss."""

import jax
import numpy as np
import pytest
import scripts
from scripts import tiny

from models.mesh import parallel as mesh
from models.mesh import train
from models.moe.model import MoE

full = pytest.mark.full


def expected(config):
    """Collectives of a step with --attention gather and --matmul unfused.

    An axis of size 1 has none, but experts on one rank call dispatch and combine.

    Each loop body is there twice: forward, and recomputed in the backward pass.
    """
    pipe, data, context, tensor = (size > 1 for size in config.sizes.values())
    state, others = data or context, data or context or tensor
    experts = config.experts > 0
    counts = {
        "permute": 2 * pipe,
        # Parameters (embedding, layers, head); keys and values; the products of tensor parallelism in a layer with
        # attention and MLP, in the head and behind the embedding; the counts of rows of each expert.
        "all_gather": 3 * state + 2 * context + (12 - 4 * experts) * tensor + 2 * experts * others,
        "reduce_scatter": 3 * state + context + (9 - 3 * experts) * tensor,
        # Gradients: matrices of embedding and head, other parameters of layers, other parameters of the head. Norm.
        # Largest score, sum and target of the cross entropy. Loss, balancing loss.
        "all_reduce": (pipe + others + (pipe or others))
        + (pipe + others + (pipe or others))
        + 4 * tensor
        + (pipe or state)
        + experts * (pipe or others),
        **dict.fromkeys(("moe_check", "moe_count", "moe_place"), 2 * experts),
        "moe_slices": 6 * experts,  # of dispatch and combine
        "dispatch": 3 * experts,  # also the derivative of combine
        "combine": 3 * experts,
    }
    return {name: count for name, count in counts.items() if count}


MOE = ("moe_check", "moe_count", "moe_place", "moe_slices")


@pytest.mark.parametrize(
    ("layout", "experts"),
    [
        ("1x1x1x1", 0),
        ("2x1x2x2", 4),
        pytest.param("2x1x1x1", 2, marks=full),
        *(pytest.param(layout, 0, marks=full) for layout in ("2x1x1x1", "1x2x1x1", "1x1x2x1", "1x1x1x2", "2x1x2x2")),
        *(pytest.param(layout, 8, marks=full) for layout in ("1x2x2x2", "2x2x1x2")),
    ],
)
def test_collectives_of_a_step(layout, experts):
    config = tiny("mesh", layout=layout, experts=experts, microbatches=2, attention="gather", matmul="unfused")
    program = scripts.program(config)
    found = scripts.collectives(program.step, jax.eval_shape(program.init), scripts.tokens(config))
    assert found == expected(config)


def test_an_evaluation_has_one_sum_of_losses():
    """The prediction's; that of the balancing loss is not needed."""
    config = tiny("mesh", layout="1x2x1x1", experts=2, microbatches=1)
    program = scripts.program(config)
    found = scripts.collectives(program.evaluate, jax.eval_shape(program.init)[0], scripts.tokens(config))
    assert found.pop("all_reduce") == 1
    assert set(found) == {"all_gather", "dispatch", "combine", *MOE}


@pytest.mark.parametrize("experts", [0, 4])
def test_parameters_are_packed_by_ranks_of_tensor(experts):
    """Each rank of "tensor" finds its heads, hidden units and scores in its vector; nothing is lost."""
    config = tiny("mesh", layout="1x1x2x2", experts=experts, rounds=2, layers=4, microbatches=2)
    _, shapes, _ = scripts.structure(config)
    rng = np.random.default_rng(4)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    packed = mesh.arrange(config, params)
    groups = mesh.groups_of(config)
    layer = jax.tree.map(lambda x: x[1, 0, 1], packed["blocks"])  # 3: in round 1, the second of the stage
    for rank in range(2):
        own = {**layer, "parts": layer["parts"][rank]}
        found, wanted = groups["blocks"].unpack(own), params["blocks"][3]
        np.testing.assert_array_equal(found["attention"]["q"], wanted["attention"]["q"][:, 2 * rank : 2 * rank + 2])
        np.testing.assert_array_equal(found["attention"]["out"], wanted["attention"]["out"][2 * rank : 2 * rank + 2])
        np.testing.assert_array_equal(found["mlp_norm"]["scale"], wanted["mlp_norm"]["scale"])
        own_mlp = wanted["mlp"] if experts else {"down": wanted["mlp"]["down"][12 * rank : 12 * rank + 12]}
        for name, value in own_mlp.items():
            np.testing.assert_array_equal(found["mlp"][name], value)
        head = groups["head"].unpack({**packed["head"], "parts": packed["head"]["parts"][rank]})
        np.testing.assert_array_equal(head["scores"], params["head"]["scores"][:, 128 * rank : 128 * rank + 128])


@pytest.mark.parametrize("experts", [0, 4])
def test_each_rank_holds_its_share_of_the_state(experts):
    """Matrices and optimiser state in 8 parts; an expert on one rank of its stage."""
    config = tiny("mesh", layout="2x1x2x2", experts=experts, microbatches=2)
    program = scripts.program(config)
    shapes, specs = jax.eval_shape(program.init), program.specs
    names = {}
    for (path, x), spec in zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(specs), strict=True):
        axes = scripts.step_lib.sharded_axes(spec)
        names.setdefault(jax.tree_util.keystr(path[-1:]), set()).add((x.ndim > 2, config.ranks(*axes) if axes else 1))
    assert names["['parts']"] == {(True, 8), (False, 4)}  # of layers; of embedding and head
    assert names["['scale']"] == {(True, 2), (False, 1)}
    if experts:
        assert names["['up']"] == names["['down']"] == {(True, 8)}
        assert names["['router']"] == {(True, 2)}


@pytest.mark.parametrize(("experts", "rounds"), [(4, 1), pytest.param(0, 2, marks=full)])
def test_an_evaluation_without_the_pipeline_has_the_same_loss(tmp_path, experts, rounds):
    options = {"layout": "2x1x1x2", "layers": 4, "rounds": rounds, "experts": experts, "microbatches": 2, "steps": 1}
    found = {}
    for layout in ("", "1x2x1x2"):
        config = tiny("mesh", eval_layout=layout, out=str(tmp_path / f"run {layout}"), eval_batches=1, **options)
        run = train.Run(config)
        assert np.isfinite(run.advance()["loss"])
        found[layout] = run.evaluate()["heldout_bits_per_byte"]
        run.checkpoints.close()
    assert found[""] == pytest.approx(found["1x2x1x2"], rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "text"), [("1x2x2x1", "tensor 2"), ("1x1x1x2", "4 ranks"), ("2x1x1x2", "one for each stage")]
)
def test_a_layout_of_evaluations_has_the_same_ranks(layout, text):
    with pytest.raises(ValueError, match=text):
        tiny("mesh", layout="2x1x1x2", microbatches=2, eval_layout=layout)


def test_layers_are_mixtures_only_with_experts():
    for experts in (0, 4):
        model = jax.eval_shape(
            lambda experts=experts: mesh.Transformer(tiny("mesh", experts=experts), scripts.nnx.Rngs(0))
        )
        assert all(isinstance(block.mlp, MoE) == bool(experts) for block in model.blocks)
