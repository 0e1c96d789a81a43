"""All scripts of parallel training against the same model on one device: gradients, losses, runs, options.

Guards against errors that training hides: a gradient that counts a rank twice or not at all, a part of the vocabulary
that is shifted, a continued run that differs.
"""

import contextlib
import dataclasses
import json
import re
import sys

import jax
import numpy as np
import plain
import pytest
import scripts
from scripts import tiny
from training import OTHERS, flags, metrics

from models.lm import config as config_lib
from models.lm import distributed
from models.lm import step as step_lib
from models.lm import train as train_lib
from models.moe import config as moe
from models.zero.parallel import Packing

full = pytest.mark.full
CONFIGS = {"moe": moe.Config, **{name: module.Config for name, module in scripts.SCRIPTS.items()}}
LAYOUTS = {
    "cp": [
        ("2x4", {"layers": 1}),
        *(pytest.param("2x4", {"attention": way, "order": "striped"}, marks=full) for way in ("ring", "ulysses")),
        *(pytest.param(layout, {"attention": "gather"}, marks=full) for layout in ("2x4", "4x2")),
        *(pytest.param(layout, {}, marks=full) for layout in ("1x8", "1x2")),
    ],
    # Each axis alone, then mixed.
    "mesh": [
        ("2x1x2x2", {"microbatches": 2, "balance": 0.5, "experts": 8}),
        *(
            pytest.param(layout, {"experts": 0, "microbatches": 2}, marks=full)
            for layout in ("2x1x1x1", "1x2x1x1", "1x1x2x1", "1x1x1x2", "1x1x1x4")
        ),
        *(
            pytest.param(layout, {"experts": experts, "microbatches": 2, "balance": 0.5}, marks=full)
            for layout, experts in (("2x2x1x2", 4), ("1x2x2x2", 8), ("2x1x2x2", 0))
        ),
        pytest.param("2x1x2x2", {"layers": 4, "rounds": 2, "microbatches": 4, "attention": "ulysses"}, marks=full),
    ],
    "pp": [
        ("2x2", {"layers": 4, "rounds": 2, "microbatches": 4, "batch": 16}),  # more microbatches than stages
        ("4x2", {"layers": 4, "rounds": 1, "microbatches": 8, "batch": 16, "schedule": "1f1b"}),
        *(
            pytest.param(layout, {"rounds": 1, "layers": 4, "microbatches": 8, "schedule": "1f1b"}, marks=full)
            for layout in ("4x1", "1x1")
        ),
        *(pytest.param("2x2", {"rounds": 1, "microbatches": count}, marks=full) for count in (2, 4)),
        *(pytest.param(layout, {"rounds": 1, "layers": 8, "microbatches": 8}, marks=full) for layout in ("8x1", "1x1")),
    ],
    "tp": [
        ("2x4", {"layers": 1}),
        *(pytest.param(layout, {"matmul": "ring"}, marks=full) for layout in ("2x4", "8x1", "1x4", "1x2")),
    ],
    "zero": [
        ("2x4", {"stage": 3, "layers": 3, "width": 6, "heads": 1, "hidden": 7}),  # vectors with padding
        pytest.param("2x4", {"stage": 3, "layers": 1}, marks=full),
        *(pytest.param("2x4", {"stage": stage}, marks=full) for stage in (0, 1, 2, 3)),
        *(pytest.param("1x2", {"stage": stage}, marks=full) for stage in (2, 3)),
    ],
}


def _cases(is_full=lambda script, options: False):
    for script, layouts in LAYOUTS.items():
        for case in layouts:
            values, marks = (case.values, case.marks) if hasattr(case, "marks") else (case, ())
            yield pytest.param(script, *values, marks=full if is_full(script, values[1]) else marks)


CASES = list(_cases())
# Programs that take long to compile train in the full size only: gradients of the default size cover their algorithm.
TRAINING_CASES = list(_cases(lambda script, options: script in ("cp", "mesh", "pp")))


def packed(script, config, tree):
    """Parameters or gradients as the script holds them."""
    if script in ("mesh", "pp"):
        return scripts.SCRIPTS[script].arrange(config, tree)
    if script != "zero":
        return tree
    ranks = config.ranks()
    blocks = [Packing(block, ranks).pack(block) for _, block in sorted(tree["blocks"].items())]
    vectors = {name: Packing(tree[name], ranks).pack(tree[name]) for name in ("embed", "head")}
    return {**vectors, "blocks": jax.numpy.stack(blocks)}


@pytest.mark.parametrize(("script", "layout", "options"), CASES)
def test_gradients_equal_those_of_one_device(script, layout, options):
    """In float64, where an error of the algorithm is much larger than rounding."""
    with jax.enable_x64(True):
        config = tiny(script, layout=layout, dtype="float64", **options)
        params, loss, wanted = scripts.gradients_of_one_device(config)
        params, wanted = (packed(script, config, tree) for tree in (params, wanted))
        found, grads = scripts.program(config).gradients(params, scripts.tokens(config))
        assert float(found) == pytest.approx(float(loss), rel=1e-12)
        leaves = jax.tree_util.tree_leaves_with_path(wanted)
        for (path, want), got in zip(leaves, jax.tree.leaves(grads), strict=True):
            error = np.abs(np.asarray(got) - np.asarray(want)).max() / np.abs(want).max()
            assert error < 1e-10, jax.tree_util.keystr(path)


@pytest.mark.parametrize("script", ["mesh", "pp"])
def test_all_parameters_but_scales_decay(script):
    """In scripts that stack or pack parameters. models/zero decays parts of vectors on its own."""
    config = tiny(script, rounds=1, microbatches=4, layers=4)
    _, shapes, _ = scripts.structure(config)
    optimizer = step_lib.make_optimizer(config)

    @jax.jit
    def without_gradient():
        params = packed(script, config, jax.tree.map(lambda x: jax.numpy.ones(x.shape), shapes))
        return optimizer.update(jax.tree.map(jax.numpy.zeros_like, params), optimizer.init(params), params)[0]

    for path, update in jax.tree_util.tree_leaves_with_path(without_gradient()):
        assert (path[-1].key == "scale") == (np.abs(update).max() == 0), jax.tree_util.keystr(path)


def test_the_rate_has_a_warm_up_and_a_cosine():
    """test_moe_step.py has AdamW. One device trains with the same rate, so comparisons with it show no mistakes."""
    config = tiny("tp", lr=0.5, warmup=3, decay_steps=9)
    rates = [float(step_lib.learning_rate(config)(step)) for step in range(12)]
    np.testing.assert_allclose(rates, [plain.rate(config, step) for step in range(12)], rtol=1e-5)


@pytest.mark.parametrize(("script", "layout", "options"), TRAINING_CASES)
def test_training_follows_that_of_one_device(script, layout, options):
    """20 steps, of which some are clipped; also the update and the evaluation are compared."""
    config = tiny(script, layout=layout, clip=1.0, **options)
    losses, norms, _ = scripts.train(config, 20)
    wanted, wanted_norms = scripts.train_one_device(20, config)
    assert min(wanted_norms) < config.clip < max(wanted_norms)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    # Rounding grows from step to step, in the gradients first.
    np.testing.assert_allclose(norms[:10], wanted_norms[:10], rtol=1e-3)
    np.testing.assert_allclose(norms, wanted_norms, rtol=1e-2)
    found = scripts.program(config).evaluate(scripts.first_state(config)[0], scripts.tokens(config))["loss"]
    assert float(found) == pytest.approx(wanted[0], rel=1e-5)


def test_one_process_needs_no_jaxcomm(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxcomm.distributed", None)
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    assert distributed.initialize() == 1
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    with pytest.raises(ImportError):
        distributed.initialize()
    monkeypatch.setitem(sys.modules, "jaxcomm", None)
    scripts.comm_lib.load(tiny("zero", comm="lax"))
    with pytest.raises(ImportError, match=r"--comm jaxcomm: .*Install it with `make setup`, or use --comm lax"):
        scripts.comm_lib.load(tiny("zero"))


# Runs.


def command(script, *arguments, **options):
    module = scripts.SCRIPTS[script]
    given = [f"--{name}={value}" for name, value in options.items()]
    return train_lib.main(module.Config, module.build, [*given, *arguments])


ONE_DEVICE = {"layout": "1x1"}
CONTINUED = [
    ("tp", {"layout": "2x4"}, {"layout": "4x2"}, ONE_DEVICE),
    *(pytest.param("tp", {"layout": "2x4"}, {"layout": layout}, ONE_DEVICE, marks=full) for layout in ("8x1", "1x2")),
    *(pytest.param(script, {}, {}, {}, marks=full) for script in ("tp", "cp", "zero")),
    pytest.param("pp", {"layout": "2x2", "rounds": 1, "layers": 2, "microbatches": 2}, {}, {}, marks=full),
    pytest.param("mesh", {"layout": "2x1x1x2", "layers": 2, "microbatches": 2, "experts": 2}, {}, {}, marks=full),
]


@pytest.mark.parametrize(("script", "options", "then", "alone"), CONTINUED)
def test_a_run_continues(script, options, then, alone, tmp_path, text_folder):
    """Three steps, then three, also on another mesh: the losses of a run of six steps, also on one device."""
    options = {**OTHERS, **options, "data": text_folder, "eval_every": 10}
    for steps, arguments in ((3, []), (6, ["--resume", *flags(**then)])):
        assert command(script, *arguments, **{**options, "steps": steps}, out=tmp_path / "parts") == 0
    assert command(script, **{**options, **alone}, out=tmp_path / "whole") == 0
    found, wanted = (
        [record["loss"] for record in metrics(tmp_path / name) if "loss" in record] for name in ("parts", "whole")
    )
    assert len(found) == 6
    np.testing.assert_allclose(found, wanted, rtol=1e-5 if then else 0)
    saved = json.loads((tmp_path / "parts" / "config.json").read_text())
    assert saved.items() >= {"steps": 6, **then}.items()


@pytest.mark.parametrize("script", [*LAYOUTS, "moe"])
def test_the_readme_names_the_defaults(script):
    from training import ROOT

    text = (ROOT / "models" / script / "README.md").read_text()
    config = CONFIGS[script]()
    _, shapes, _ = scripts.structure(config)
    millions = sum(x.size for x in jax.tree.leaves(shapes)) / 1e6
    assert f"{config.steps} steps of {config.batch * config.seq} bytes, {millions:.1f} million parameters" in text
    assert script == "moe" or f"`--layout {config.layout}`" in text


# Options.

BAD = [
    ("tp", ["--layout", "8"], "--layout: got '8', expected the sizes of data x tensor, for example 2x2"),
    ("tp", ["--layout", "2x0"], "--layout: got '2x0'"),
    ("tp", ["--heads", "2"], "got 2, expected a multiple of tensor = 4 in --layout 2x4, which share the heads"),
    ("tp", ["--hidden", "6"], "--hidden: got 6"),
    ("tp", ["--seq", "30"], "--seq: got 30"),
    ("tp", ["--batch", "3"], "--batch: got 3, expected a multiple of data = 2 in --layout 2x4"),
    ("tp", ["--layout", "1x3", "--heads", "6", "--width", "24", "--hidden", "24", "--seq", "12"], "got '1x3'"),
    ("tp", ["--dtype", "float64"], "JAX_ENABLE_X64 is not set"),
    ("tp", ["--matmul", "fast"], "invalid choice: 'fast'"),
    ("tp", ["--steps", "0"], "--steps: got 0, expected at least 1"),
    ("tp", ["--lr", "-1"], "--lr: got -1.0, expected above 0"),
    ("cp", ["--seq", "124"], "--seq: got 124, expected a multiple of 8, the chunks of --order zigzag"),
    ("cp", ["--seq", "30", "--order", "striped"], "--seq: got 30, expected a multiple of context = 4"),
    ("cp", ["--attention", "ulysses", "--heads", "2"], "--heads: got 2, expected a multiple of context = 4"),
    ("mesh", ["--layers", "3"], "--layers: got 3, expected a multiple of 2 stages in --layout 2x1x2x2 x 1 rounds"),
    ("mesh", ["--microbatches", "1"], "--microbatches: got 1, expected at least 2, one for each stage"),
    ("mesh", ["--batch", "6"], "--batch: got 6, expected a multiple of 4, the microbatches of all groups"),
    ("mesh", ["--heads", "1"], "--heads: got 1, expected a multiple of tensor = 2 in --layout 2x1x2x2"),
    ("mesh", ["--hidden", "5"], "--hidden: got 5, expected a multiple of tensor = 2"),
    ("mesh", ["--seq", "6"], "--seq: got 6, expected a multiple of 4, the chunks of --order zigzag"),
    ("mesh", ["--seq", "10", "--order", "striped"], "--seq: got 10, expected a multiple of context x tensor = 4"),
    ("mesh", ["--attention", "ulysses", "--heads", "2"], "--heads: got 2, expected a multiple of context x tensor = 4"),
    ("mesh", ["--experts", "6"], "--experts: got 6, expected a multiple of data x context x tensor = 4"),
    ("mesh", ["--experts", "1"], "--experts: got 1, expected 0, or at least 2"),
    ("mesh", ["--balance", "-1"], "--balance: got -1.0, expected at least 0"),
    *(("mesh", ["--layout", "2x1x1x2", "--eval_layout", layout], text)
      for layout, text in (("1x2x2x1", "tensor 2"), ("1x1x1x2", "4 ranks"), ("2x1x1x2", "one for each stage"))),
    ("pp", ["--layers", "12"], "--layers: got 12, expected a multiple of 4 stages in --layout 4x2 x 2 rounds"),
    ("pp", ["--microbatches", "2"], "--microbatches: got 2, expected at least 4, one for each stage"),
    ("pp", ["--batch", "24"], "--batch: got 24, expected a multiple of 16, the microbatches of all groups"),
    ("pp", ["--rounds", "0"], "--rounds: got 0, expected at least 1"),
    ("pp", ["--schedule", "1f1b"], "--rounds: got 2, expected 1 with --schedule 1f1b"),
    # No effect.
    ("zero", ["--psum", "ring", "--comm", "lax"], "--psum: no effect with --comm lax; remove it"),
    ("zero", ["--psum", "ring", "--layout", "1x1"], "--psum: no effect with one rank in --layout 1x1; remove it"),
    ("tp", ["--matmul", "ring", "--comm", "lax"], "--matmul: no effect with --comm lax; remove it"),
    ("tp", ["--matmul", "ring", "--layout", "8x1"], "--matmul: no effect with tensor = 1 in --layout 8x1; remove it"),
    ("cp", ["--attention", "gather", "--layout", "8x1"], "--attention: no effect with context = 1 in --layout 8x1"),
    ("cp", ["--order", "striped", "--layout", "8x1"], "--order: no effect with context = 1 in --layout 8x1"),
    ("mesh", ["--balance", "0.1", "--experts", "0"], "--balance: no effect with --experts 0"),
    ("mesh", ["--order", "striped", "--layout", "2x2x1x1"], "--order: no effect with context = 1 in --layout 2x2x1x1"),
    ("mesh", ["--attention", "gather", "--layout", "2x2x1x1"], "--attention: no effect with context = 1"),
    ("mesh", ["--matmul", "ring", "--layout", "2x1x2x1"], "--matmul: no effect with tensor = 1"),
    ("mesh", ["--matmul", "ring", "--comm", "lax", "--attention", "gather"], "--matmul: no effect with --comm lax"),
    ("mesh", ["--comm", "lax"], "--attention: got 'ring', expected gather or ulysses with --comm lax"),
    ("moe", ["--experts", "12"], "--experts: got 12, expected a multiple of node x gpu = 8 in --layout 2x4"),
    ("moe", ["--heads", "3"], "--width: got 128, expected a multiple of 2 * heads = 6"),
    ("moe", ["--capacity", "2"], "--capacity: no effect with --moe dropless; remove it"),
    ("moe", ["--eval_capacity", "3"], "--eval_capacity: no effect with --moe dropless; remove it"),
    ("moe", ["--temperature", "1", "--sample", "0"], "--temperature: no effect with --sample 0; remove it"),
    ("moe", ["--prompt", "x", "--sample", "0"], "--prompt: no effect with --sample 0; remove it"),
    ("zero", ["--resume", "--out", "does/not/exist"], "no run to continue"),
    # An effect, and defaults.
    ("tp", ["--matmul", "ring"], None),
    ("cp", ["--attention", "gather", "--order", "striped"], None),
    ("mesh", ["--layout", "2x1x1x1", "--experts", "0"], None),
    ("mesh", ["--balance", "0.1", "--attention", "ulysses", "--matmul", "ring", "--psum", "ring"], None),
    ("mesh", ["--comm", "lax", "--layout", "2x2x1x1"], None),
    ("moe", ["--moe", "capacity", "--capacity", "2", "--eval_capacity", "3"], None),
    ("cp", ["--layout", "8x1", "--attention", "ring", "--order", "zigzag"], None),
    ("tp", ["--layout", "1x1", "--matmul", "", "--psum", "direct"], None),
    ("mesh", ["--experts", "0", "--balance", "0.01"], None),
]  # fmt: skip


COUNTS = ("layers", "heads", "hidden", "batch", "seq", "steps", "eval_every", "eval_batches", "save_every")
NUMBERS = {  # out of range, and the first in range
    **dict.fromkeys(COUNTS, (0, 1)), "width": (7, 8), "experts": (1, 2), "decay_steps": (0, 31), "prompt": ("", "x"),
    **dict.fromkeys(("weight_decay", "temperature", "balance", "warmup", "seed", "sample"), (-1, 0)),
    **dict.fromkeys(("lr", "clip", "capacity", "eval_capacity", "heldout"), (0, 1e-9)),
}  # fmt: skip


def test_numbers_out_of_range_are_named():
    for name, (bad, good) in [*NUMBERS.items(), ("heldout", (1, 0.999)), ("warmup", (1000, 999))]:
        moe.Config(layout="1x1", **{name: good})
        with pytest.raises(ValueError, match=f"--{name}: got {bad!r}, expected "):
            moe.Config(layout="1x1", **{name: bad})


@pytest.mark.parametrize(("script", "argv", "message"), BAD)
def test_bad_options_are_named(script, argv, message, capsys):
    with pytest.raises(SystemExit) if message else contextlib.nullcontext():
        config_lib.parse(CONFIGS[script], argv)
    assert (message or "") in capsys.readouterr().err.replace("\n", " ")


def test_options_of_an_earlier_run_may_lose_their_effect(tmp_path):
    """A run with --matmul ring continues with --comm lax."""
    tiny("tp", out=str(tmp_path), matmul="ring").save(tmp_path / "config.json")
    argv = ["--resume", "--out", str(tmp_path), "--comm", "lax"]
    config, _ = config_lib.parse(scripts.tp.Config, argv)
    assert (config.comm, config.matmul) == ("lax", "ring")
    with pytest.raises(SystemExit):
        config_lib.parse(scripts.tp.Config, [*argv, "--matmul", "ring"])


def test_too_few_devices_are_named(monkeypatch):
    with pytest.raises(ValueError, match="--layout 4x4: 16 devices need 16 in each of 1 processes, but JAX has 8"):
        train_lib.make_mesh(tiny("zero", layout="4x4", batch=16))
    monkeypatch.setattr(distributed, "initialize", lambda: 3)
    with pytest.raises(ValueError, match="--layout 2x4: 8 devices cannot be split evenly among 3 processes"):
        train_lib.make_mesh(tiny("zero"))


def test_unknown_algorithm_is_named():
    with pytest.raises(ValueError, match="--psum: got 'fast', expected one of"):
        scripts.comm_lib.load(tiny("zero", psum="fast"))


# What does not change the losses.
FREE = {"comm", "psum", "out", "steps", "eval_every", "eval_batches", "save_every"}
FREE_OF_SCRIPT = {
    "cp": {"attention", "order"}, "mesh": {"attention", "eval_layout", "matmul"}, "pp": {"microbatches", "schedule"},
    "tp": {"layout", "matmul"}, "zero": {"stage"}, "moe": {"eval_capacity", "sample", "prompt", "temperature"},
}  # fmt: skip


@pytest.mark.parametrize("script", FREE_OF_SCRIPT)
def test_resume_refuses_another_model(script, tmp_path):
    config = CONFIGS[script](out=str(tmp_path))
    config.save(tmp_path / "config.json")
    for name in {field.name for field in dataclasses.fields(config)} - FREE - FREE_OF_SCRIPT[script]:
        message = f"--{name}: got None, but the run to resume has {getattr(config, name)!r}. Use another --out."
        with pytest.raises(ValueError, match=re.escape(message)):
            config_lib.load(type(config), tmp_path / "config.json", {name: None})
    (tmp_path / "config.json").write_text(json.dumps(dict.fromkeys(FREE | FREE_OF_SCRIPT[script])))
    free = {name: getattr(config, name) for name in FREE | FREE_OF_SCRIPT[script]} | {"steps": 7}
    assert config_lib.load(type(config), tmp_path / "config.json", free) == dataclasses.replace(config, **free)


def test_resume_needs_a_checkpoint(tmp_path, text_folder):
    config = tiny("zero", out=str(tmp_path), data=str(text_folder))
    config.save(tmp_path / "config.json")
    with pytest.raises(SystemExit, match=r"error: --resume: no checkpoint in .*/checkpoints. Start without --resume"):
        command("zero", "--resume", out=tmp_path)
