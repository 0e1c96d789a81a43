"""Trains the program of a script on text: devices, loop, checkpoints, plot, summary, command line."""

import collections
import functools
import json
import math
import os
import shutil
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from . import comm as comm_lib
from . import config as config_lib
from . import data, distributed


def make_mesh(config):
    """Returns the mesh of a configuration. Each process has an equal part, in the order of processes.

    On the platform cpu, creates the devices unless JAX has already started with enough of them.
    """
    processes = distributed.initialize()
    wanted = f"--layout {config.layout}: {config.ranks()} devices"
    count, rest = divmod(config.ranks(), processes)
    if rest:
        raise ValueError(f"{wanted} cannot be split evenly among {processes} processes")
    if config.platform == "cpu":
        # Number of XLA's threads; by default that of the process's devices or cores. It determines how matrix products
        # are split, and so their last bits (jax 0.12). The value here does not depend on the number of processes.
        os.environ.setdefault("PJRT_NPROC", str(max(config.ranks(), len(os.sched_getaffinity(0)))))
        try:
            jax.config.update("jax_num_cpu_devices", count)
            jax.config.update("jax_platforms", "cpu")
        except RuntimeError:
            pass  # JAX has started with another number, which is checked below
    devices = [[d for d in jax.devices(config.platform) if d.process_index == p] for p in range(processes)]
    fewest = min(map(len, devices))
    if fewest < count:
        raise ValueError(f"{wanted} need {count} in each of {processes} processes, but JAX has {fewest}")
    grid = np.array([part[:count] for part in devices]).reshape(tuple(config.sizes.values()))
    return Mesh(grid, config.axes, axis_types=(jax.sharding.AxisType.Auto,) * len(config.axes))


class Run:
    """State of a training run and its files in ``config.folder``: checkpoints, metrics.jsonl, loss.png.

    Each process has one Run, and all processes call the same methods in the same order. All processes must have access
    to the folder. Each writes its part of a checkpoint; the first process writes the other files.

    A script may subclass it, for other metrics and files.
    """

    files = ("checkpoints", "config.json", "loss.png", "metrics.jsonl")
    load_comm = staticmethod(comm_lib.load)

    def __init__(self, config, build, resume=False):
        self.begin = time.monotonic()
        self.config, self.out = config, config.folder
        self.mesh = make_mesh(config)
        self.leads = jax.process_index() == 0
        self.comm = comm = self.load_comm(config)
        self.train_text, self.heldout_text = data.load(config.data, config.heldout, config.seq + 1)
        self.program = build(config, self.mesh, comm)
        self.any_process = distributed.make_any(self.mesh, comm)
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.program.specs)

        if self.leads:
            self.out.mkdir(parents=True, exist_ok=True)
            if not resume:
                shutil.rmtree(self.out / "checkpoints", ignore_errors=True)
                for name in ("metrics.jsonl", "loss.png"):
                    (self.out / name).unlink(missing_ok=True)
            config.save(self.out / "config.json")
        multihost_utils.sync_global_devices("folder is ready")
        self.checkpoints = ocp.CheckpointManager(
            (self.out / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )
        self.step, self.records = 0, []
        if resume:
            self.restore(shardings)
        else:
            self.state = jax.jit(self.program.init, out_shardings=shardings)()

    def save(self):
        if self.checkpoints.latest_step() != self.step:
            self.checkpoints.save(self.step, args=ocp.args.PyTreeSave(self.state))
            self.checkpoints.wait_until_finished()  # the next step donates these arrays

    def restore(self, shardings):
        """Loads the last checkpoint and the metrics up to its step. Drops metrics that were logged later."""
        step = self.checkpoints.latest_step()
        if step is None:
            raise ValueError(f"--resume: no checkpoint in {self.out / 'checkpoints'}. Start without --resume.")
        shapes = jax.eval_shape(self.program.init)
        self.state = distributed.restore(self.checkpoints, step, shapes, shardings, self.comm)
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        self.step, self.records = step, [r for r in map(json.loads, lines) if r["step"] <= step]
        multihost_utils.sync_global_devices("metrics are read")
        if self.leads:
            (self.out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in self.records))

    def log(self, **record):
        self.records.append({"step": self.step, **record})
        if self.leads:
            with open(self.out / "metrics.jsonl", "a") as file:
                file.write(json.dumps(self.records[-1]) + "\n")

    def put(self, tokens, mesh=None):
        return distributed.put(tokens, NamedSharding(mesh or self.mesh, self.program.tokens))

    def advance(self):
        """One training step -> its metrics as Python numbers."""
        config = self.config
        tokens = data.train_batch(self.train_text, config.batch, config.seq + 1, config.seed, self.step)
        self.state, metrics = self.program.step(self.state, self.put(tokens))
        self.step += 1
        return {name: float(value) for name, value in metrics.items()}

    def evaluation(self):
        """The program, the mesh and the parameters of an evaluation."""
        return self.program, self.mesh, self.state[0]

    def evaluate(self):
        """Returns and logs the bits per byte and other metrics, always on the same held-out windows."""
        config = self.config
        batches = data.heldout_batches(self.heldout_text, config.batch, config.seq + 1, config.eval_batches)
        program, mesh, params = self.evaluation()
        found = [program.evaluate(params, self.put(tokens, mesh)) for tokens in batches]
        means = {f"heldout_{name}": float(np.mean([metrics[name] for metrics in found])) for name in found[0]}
        record = {"heldout_bits_per_byte": means.pop("heldout_loss") / math.log(2), **means}
        self.log(**record)
        return record

    def plot(self):
        """Writes loss.png: every training step and every evaluation, in bits per byte."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        fig, axis = plt.subplots(figsize=(7, 4))
        for name, scale, style in (("loss", math.log(2), "-"), ("heldout_bits_per_byte", 1, "o-")):
            points = [(record["step"], record[name] / scale) for record in self.records if name in record]
            if points:
                label = "held-out" if name.startswith("heldout") else "training"
                axis.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
        title = f"models/{self.config.name} --layout {self.config.layout} --comm {self.config.comm}"
        axis.set(xlabel="step", ylabel="bits per byte", title=title)
        axis.grid(alpha=0.3)
        axis.legend()
        fig.tight_layout()
        fig.savefig(self.out / "loss.png", dpi=120)
        plt.close(fig)

    def describe(self):
        """The model and its parallelism, for the first line of the output."""
        return f"models/{self.config.name}"

    def totals(self):
        """Results over all steps, beside those of every script."""
        return {}

    def finish(self):
        """Called after the last step, not after Ctrl-C. Returns results beside those of every script."""
        return {}

    def report(self, summary):
        """The last line of the output; a list of its parts."""
        bits = summary["train_loss"] / math.log(2)
        return [
            f"{summary['steps']} steps",
            f"training loss {summary['train_loss']:.3f} ({bits:.3f} bits per byte)",
            f"held-out {summary['heldout_bits_per_byte']:.3f} bits per byte",
            f"{summary['tokens_per_s']:,.0f} tokens/s",
            f"{summary['seconds']:.0f} s. Files: {self.out}/{{{','.join(self.files)}}}",
        ]


def train(run):
    """Trains up to ``run.config.steps`` and writes all files to ``run.out``.

    Returns:
      A dict with steps, train_loss (nats per byte, mean of the last 20 steps), tokens_per_s (of the median step) and
      seconds, and Run.totals(). After Ctrl-C it has interrupted, otherwise Run.evaluate() and Run.finish().
    """
    config = run.config
    say = functools.partial(print, flush=True) if run.leads else lambda *_: None
    layout = " x ".join(f"{axis} {size}" for axis, size in config.sizes.items())
    say(
        f"{run.describe()}: {layout} on {config.platform} devices in {jax.process_count()} processes, collectives of "
        f"{config.comm}; {len(run.train_text):,} bytes of text, {len(run.heldout_text):,} held out. The first step "
        "compiles."
    )
    rates = collections.deque((r["tokens_per_s"] for r in run.records if "loss" in r), maxlen=20)
    terminal, told = sys.stderr.isatty(), time.monotonic()
    bar = tqdm(total=config.steps, initial=run.step, unit="step", mininterval=0.5, disable=not (terminal and run.leads))
    stopped = False
    with distributed.Interrupt() as interrupt, bar:
        while run.step < config.steps and not (stopped := run.any_process(interrupt.asked)):
            start = time.monotonic()
            metrics = run.advance()
            rates.append(config.batch * config.seq / (time.monotonic() - start))
            run.log(**metrics, tokens_per_s=round(rates[-1], 1))
            if not math.isfinite(metrics["loss"]):
                raise FloatingPointError(f"loss {metrics['loss']} at step {run.step}: try a smaller --lr")
            progress = f"loss {metrics['loss']:.3f}, {np.median(rates):,.0f} tokens/s"
            bar.set_postfix_str(progress, refresh=False)
            bar.update()
            if not terminal and time.monotonic() - told > 10:  # whole lines, because launchers relay whole lines
                say(f"step {run.step}: {progress}")
                told = time.monotonic()
            if run.step < config.steps:
                if run.step % config.eval_every == 0:
                    bits = run.evaluate()["heldout_bits_per_byte"]
                    bar.clear()
                    say(f"step {run.step}: held-out {bits:.3f} bits per byte")
                if run.step % config.save_every == 0:
                    run.save()
    run.save()
    run.checkpoints.close()
    losses = [record["loss"] for record in run.records if "loss" in record]
    summary = {"steps": run.step, "train_loss": float(np.mean(losses[-20:])), "tokens_per_s": float(np.median(rates))}
    summary |= run.totals()
    summary |= {"interrupted": True} if stopped else {**run.evaluate(), **run.finish()}
    if run.leads:
        run.plot()
    return summary | {"seconds": time.monotonic() - run.begin}


def main(config_type, build, argv=None, run_type=Run):
    """Command line: trains, then prints the results. Returns the exit status.

    Raises:
      SystemExit: invalid options; the message names them.
    """
    config, resume = config_lib.parse(config_type, argv)
    try:
        run = run_type(config, build, resume)
    except (ValueError, OSError, ImportError) as error:  # options that are invalid for this data or machine
        sys.exit(f"error: {error}")
    summary = train(run)
    status = 130 if "interrupted" in summary else 0
    if not run.leads:
        return status
    if status:
        print(f"stopped after step {summary['steps']}; continue with --resume --out {config.folder}")
        return status
    print(", ".join(run.report(summary)))
    return 0


def run_command(config_type, build, run_type=Run):
    """The program ``python -m models.<name>.train``."""
    with distributed.prompt_failure():
        status = main(config_type, build, run_type=run_type)
    sys.exit(status)
