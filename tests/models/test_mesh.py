"""models/mesh: shares of the state, evaluation."""

import jax
import numpy as np
import pytest
import scripts
from scripts import tiny

from models.mesh import train

full = pytest.mark.full


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
