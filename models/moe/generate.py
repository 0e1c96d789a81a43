"""Continues text with a trained model, and measures the speed: ``python -m models.moe.generate``."""

import argparse
import dataclasses
import pathlib
import sys
import time

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from ..lm import distributed
from ..lm.config import load
from ..lm.train import make_mesh
from .config import Config
from .decode import generate, make_decode
from .step import build
from .train import load_comm


def parse(argv):
    """Command line -> (config of the run, options)."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.generate", description=__doc__)
    parser.add_argument(
        "--out", default=f"runs/{Config.name}", help="folder of the training run (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="numbers of sequences to measure")
    parser.add_argument("--tokens", type=int, default=200, help="bytes to generate (default: %(default)s)")
    parser.add_argument("--prompt", help="text to continue; by default that of the training run")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest byte (default)")
    parser.add_argument("--layout", help="sizes of the mesh axes node x gpu; by default those of the training run")
    parser.add_argument("--comm", choices=("jaxcomm", "lax"), help="by default that of the training run")
    options = parser.parse_args(argv)
    if min(*options.batch, options.tokens) < 1:
        parser.error("--batch and --tokens: expected numbers of at least 1")
    given = {name: getattr(options, name) for name in ("prompt", "temperature", "layout", "comm")}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        config = load(Config, pathlib.Path(options.out) / "config.json", {})
        return dataclasses.replace(config, batch=config.experts, **given), options  # a multiple of the ranks
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))


def load_params(program, mesh, out, comm):
    """The parameters of the last checkpoint, partitioned over the mesh."""
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), program.specs)
    with ocp.CheckpointManager((pathlib.Path(out) / "checkpoints").absolute()) as checkpoints:
        if checkpoints.latest_step() is None:
            raise ValueError(f"--out: no checkpoint in {out}/checkpoints. Train a model first.")
        shapes = jax.eval_shape(program.init)
        return distributed.restore(checkpoints, checkpoints.latest_step(), shapes, shardings, comm)[0]


def main(argv=None):
    """Prints the speed for each batch size, and a text. Returns the texts."""
    config, options = parse(argv)
    try:
        mesh = make_mesh(config)
        comm = load_comm(config)
        program = build(config, mesh, comm)
        params, decode = load_params(program, mesh, options.out, comm), make_decode(config, mesh, program, comm)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    leads = jax.process_index() == 0
    texts = []
    for batch in options.batch:
        prompts = [config.prompt.encode()] * batch
        for _ in range(2):  # the first run compiles
            begin = time.perf_counter()
            texts = generate(decode, params, prompts, options.tokens, mesh, config.seed)
            seconds = time.perf_counter() - begin
        steps = len(texts[0]) - 1
        if leads:
            print(
                f"batch {batch}: {batch * steps / seconds:,.0f} tokens/s, {1e3 * seconds / steps:.2f} ms per step, on "
                f"{config.layout} {config.platform} devices",
                flush=True,
            )
    if leads:
        print(f"--- text ---\n{texts[0].decode(errors='replace')}\n--- end of text ---")
    return texts


if __name__ == "__main__":
    with distributed.prompt_failure():
        main()
