"""Generation in models/moe: expert parallel and with a cache, against one device that computes the whole text anew."""

import dataclasses
import pathlib
import types

import jax
import numpy as np
import plain
import pytest
from training import TINY, flags

from models.lm.train import make_mesh
from models.moe import decode, generate, train

CONFIG = dataclasses.replace(TINY, layers=2)
GREEDY = [("jaxcomm", 0.0), ("lax", 0.0)]
PROMPTS = [b"def f(x):", b"a", b"class", b"import os, sys, a, b, c, d, e, f, g", b"a", b"0", b"x", b"yy", b"zzz", b"a"]


def continued(config, prompts, count, seed=0):
    """Parameters, which depend on config.seed, and texts, sampled with seed."""
    mesh, comm = make_mesh(config), train.load_comm(config)
    program = train.build(config, mesh, comm)
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), program.specs[0])
    params = jax.jit(lambda: program.init()[0], out_shardings=shardings)()
    run = decode.make_decode(config, mesh, program, comm)
    return jax.device_put(jax.device_get(params), jax.devices()[0]), decode.generate(
        run, params, prompts, count, mesh, seed
    )


@pytest.mark.parametrize(
    ("comm", "temperature"), [("jaxcomm", 1e-3), *(pytest.param(*x, marks=pytest.mark.full) for x in GREEDY)]
)
def test_greedy_text_is_that_of_one_device(comm, temperature):
    """Also with almost no temperature. Prompts of different lengths, more text than the window, and an uneven batch."""
    params, texts = continued(dataclasses.replace(CONFIG, comm=comm, temperature=temperature), PROMPTS, 12)
    longest = max(map(len, PROMPTS))
    assert longest > 2 * CONFIG.seq and len(PROMPTS) % CONFIG.ranks()
    likeliest = jax.jit(lambda tokens: plain.scores(params, tokens, CONFIG, None, CONFIG.seq)[0].argmax(-1))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text.startswith(prompt) and len(text) == longest + 12
        tokens = np.frombuffer(text, np.uint8).astype(np.int32)
        best = np.asarray(likeliest(tokens[None, :-1]))[0]
        np.testing.assert_array_equal(tokens[len(prompt) :], best[len(prompt) - 1 :])


def test_sampled_text_does_not_depend_on_the_mesh():
    config = dataclasses.replace(CONFIG, temperature=1.0)
    texts = continued(config, [b"def"] * 9, 20)[1]
    assert len(set(texts)) == 9
    alone = dataclasses.replace(config, layout="1x1")
    assert continued(alone, [b"def"] * 9, 20)[1] == texts
    assert continued(config, [b"def"] * 9, 20, seed=1)[1] != texts


def test_the_command_continues_a_run_and_prints_the_speed(alone, capsys, monkeypatch):
    """The second text of each batch takes 3 s, and the first one, which compiles, 1 s and 100 s."""
    out, _, summary = alone
    times = iter([0, 1, 1, 4, 4, 104, 104, 107])
    monkeypatch.setattr(generate, "time", types.SimpleNamespace(perf_counter=lambda: next(times)))
    options = ["--out", str(out), "--tokens", str(TINY.sample), "--temperature", str(TINY.temperature)]
    texts = generate.main([*options, "--batch", "1", "9"])
    assert len(texts) == 9 and texts[0] == summary["sample"]
    steps, text = len(TINY.prompt) + TINY.sample - 1, texts[0].decode(errors="replace")
    speeds = [
        f"batch {n}: {n * steps / 3:.0f} tokens/s, {1000 * 3 / steps:.2f} ms per step, on 2x4 cpu devices\n"
        for n in (1, 9)
    ]
    assert capsys.readouterr().out == f"{speeds[0]}{speeds[1]}--- text ---\n{text}\n--- end of text ---\n"


def test_options_replace_those_of_the_run(tmp_path):
    dataclasses.replace(TINY, batch=16).save(tmp_path / "config.json")
    given = {"prompt": "x", "temperature": 0.5, "layout": "1x4", "comm": "lax"}
    config, options = generate.parse([*flags(out=tmp_path, **given), "--batch", "2", "3"])
    assert (options.batch, options.tokens, options.out) == ([2, 3], 200, str(tmp_path))
    assert config == dataclasses.replace(TINY, batch=TINY.experts, **given)
    assert generate.parse(flags(out=tmp_path))[0] == dataclasses.replace(TINY, batch=TINY.experts, temperature=0.0)


def test_wrong_options_are_named(tmp_path, capsys):
    for options, message in (
        (["--out", str(tmp_path)], "config.json does not exist"),
        (["--tokens", "0"], "--batch and --tokens: expected numbers of at least 1"),
    ):
        with pytest.raises(SystemExit):
            generate.parse(options)
        assert message in capsys.readouterr().err
    TINY.save(pathlib.Path(tmp_path) / "config.json")
    with pytest.raises(SystemExit, match=r"error: --out: no checkpoint in .*/checkpoints"):
        generate.main(["--out", str(tmp_path)])
