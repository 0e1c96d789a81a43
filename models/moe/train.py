"""Trains the mixture of experts of model.py on text: ``python -m models.moe.train``, in one process or several."""

import collections
import functools
import json
import math
import os
import pathlib
import shutil
import signal
import sys
import time
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from . import config as config_lib
from . import data, distributed
from .axes import AXES
from .decode import generate, make_decode
from .step import init_state, make_eval, make_step


def make_mesh(config):
    """Returns the (nodes, gpus) mesh. Each process has an equal part, in the order of processes.

    On the platform cpu, creates the devices unless JAX has already started with enough of them.
    """
    processes = distributed.initialize()
    count, rest = divmod(config.num_ranks, processes)
    if rest:
        raise ValueError(
            f"--nodes {config.nodes} --gpus {config.gpus}: {config.num_ranks} devices cannot be split evenly among "
            f"{processes} processes"
        )
    if config.platform == "cpu":
        # Number of XLA's threads; by default that of the process's devices or cores. It determines how matrix products
        # are split, and so their last bits (jax 0.12). The value here does not depend on the number of processes.
        os.environ.setdefault("PJRT_NPROC", str(max(config.num_ranks, len(os.sched_getaffinity(0)))))
        try:
            jax.config.update("jax_num_cpu_devices", count)
            jax.config.update("jax_platforms", "cpu")
        except RuntimeError:
            pass  # JAX has started with another number, which is checked below
    devices = [[d for d in jax.devices(config.platform) if d.process_index == p] for p in range(processes)]
    fewest = min(map(len, devices))
    if fewest < count:
        raise ValueError(
            f"--nodes {config.nodes} --gpus {config.gpus}: need {count} devices in each of {processes} processes, but "
            f"JAX has {fewest}"
        )
    grid = np.array([part[:count] for part in devices]).reshape(config.nodes, config.gpus)
    return Mesh(grid, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)


def load_comm(config):
    """Returns the module or object with the collectives: jax.lax, or jaxcomm's, imported only when chosen."""
    if config.comm == "lax":
        return jax.lax
    try:
        import jaxcomm
    except ImportError as error:
        raise ImportError(f"--comm jaxcomm: {error}. Install it with `make setup`, or use --comm lax.") from error
    known = ("", *jaxcomm.algorithms("psum"))
    if config.psum not in known:
        raise ValueError(f"--psum: got {config.psum!r}, expected one of {known}")
    algorithm = config.psum or None
    ranks = jaxcomm.topology().ranks
    if algorithm == "direct" and len(ranks) > 1:
        # Nodes can't read each other's memory. The order of summation is that of one process with the same --nodes.
        algorithm = "hierarchical" if len(set(ranks)) == 1 and ranks[0] > 1 else None
    psum = functools.partial(jaxcomm.psum, algorithm=algorithm)
    return types.SimpleNamespace(all_to_all=jaxcomm.all_to_all, psum=psum, moe=jaxcomm.moe)


class Run:
    """State of a training run and its files in ``config.out``: checkpoints, metrics.jsonl, loss.png.

    Each process has one Run, and all processes call the same methods in the same order. All processes must have access
    to the folder. Each writes its part of a checkpoint; the first process writes the other files.
    """

    def __init__(self, config, resume=False):
        self.begin = time.monotonic()
        self.config = config
        self.out = pathlib.Path(config.out)
        self.mesh = make_mesh(config)
        self.leads = jax.process_index() == 0
        self.comm = comm = load_comm(config)
        self.train_text, self.heldout_text = data.load(config.data, config.heldout, config.seq + 1)

        self.graphdef, specs, init = init_state(config)
        self.specs = specs[0]
        self.train_step = make_step(config, self.mesh, self.graphdef, specs, comm)
        self.evaluate_batch = make_eval(config, self.mesh, self.graphdef, specs, comm)
        self.any_process = distributed.make_any(self.mesh, comm)
        shardings = jax.tree.map(self.sharding, specs)

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
            self.restore(jax.eval_shape(init), shardings)
        else:
            self.state = jax.jit(init, out_shardings=shardings)()

    def sharding(self, spec):
        return NamedSharding(self.mesh, spec)

    def save(self):
        if self.checkpoints.latest_step() != self.step:
            self.checkpoints.save(self.step, args=ocp.args.StandardSave(self.state))
            self.checkpoints.wait_until_finished()  # the next step donates these arrays

    def restore(self, shapes, shardings):
        """Loads the last checkpoint and the metrics up to its step. Drops metrics that were logged later."""
        step = self.checkpoints.latest_step()
        if step is None:
            raise ValueError(f"--resume: no checkpoint in {self.out / 'checkpoints'}. Start without --resume.")
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
        self.state = self.checkpoints.restore(step, args=ocp.args.StandardRestore(target))
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

    def put(self, tokens):
        return distributed.put(tokens, self.sharding(P(AXES)))

    def advance(self):
        """One training step -> its metrics as Python numbers."""
        config = self.config
        tokens = data.train_batch(self.train_text, config.batch, config.seq + 1, config.seed, self.step)
        self.state, metrics = self.train_step(self.state, self.put(tokens))
        self.step += 1
        return {name: float(value) for name, value in metrics.items()}

    def evaluate(self):
        """Returns and logs bits per byte and the share of dropped choices, always on the same held-out windows."""
        config = self.config
        batches = data.heldout_batches(self.heldout_text, config.batch, config.seq + 1, config.eval_batches)
        results = [self.evaluate_batch(self.state[0], self.put(tokens)) for tokens in batches]
        loss, dropped = (float(np.mean([result[name] for result in results])) for name in ("loss", "dropped"))
        record = {"heldout_bits_per_byte": loss / math.log(2), "heldout_dropped": dropped}
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
        axis.set(xlabel="step", ylabel="bits per byte", title=f"models/moe, --comm {self.config.comm}")
        axis.grid(alpha=0.3)
        axis.legend()
        fig.tight_layout()
        fig.savefig(self.out / "loss.png", dpi=120)
        plt.close(fig)

    def sample(self):
        """Continues the prompt by ``config.sample`` bytes. All processes take part; the first writes the text."""
        config = self.config
        decode = make_decode(config, self.mesh, self.graphdef, self.specs, self.comm)
        (text,) = generate(decode, self.state[0], [config.prompt.encode()], config.sample, self.mesh, config.seed)
        if self.leads:
            (self.out / "sample.txt").write_bytes(text)
        return text


class Interrupt:
    """Ctrl-C sets a flag, so that the current step ends and can be saved. A second Ctrl-C stops at once."""

    def __enter__(self):
        self.asked = False
        try:
            self.old = signal.signal(signal.SIGINT, self.ask)
        except ValueError:  # signal handlers can be set in the main thread only
            self.old = None
        return self

    def ask(self, *_):
        self.asked = True
        signal.signal(signal.SIGINT, self.old)

    def __exit__(self, *_):
        if self.old is not None:
            signal.signal(signal.SIGINT, self.old)


def train(run):
    """Trains up to ``run.config.steps`` and writes all files to ``run.out``.

    Returns:
      A dict with steps, train_loss (nats per byte, mean of the last 20 steps), train_dropped (share of the choices of
      all steps), tokens_per_s (of the median step) and seconds. After Ctrl-C it has interrupted, otherwise
      heldout_bits_per_byte, heldout_dropped and sample (bytes).
    """
    config = run.config
    size = sum(x.size for x in jax.tree.leaves(run.state[0]))
    say = functools.partial(print, flush=True) if run.leads else lambda *_: None
    say(
        f"{size:,} parameters, {config.experts} experts per layer on {config.nodes} x {config.gpus} {config.platform} "
        f"devices in {jax.process_count()} processes, collectives of {config.comm}; {len(run.train_text):,} bytes of "
        f"text, {len(run.heldout_text):,} held out. The first step compiles."
    )
    rates = collections.deque((r["tokens_per_s"] for r in run.records if "loss" in r), maxlen=20)
    terminal, told = sys.stderr.isatty(), time.monotonic()
    bar = tqdm(total=config.steps, initial=run.step, unit="step", mininterval=0.5, disable=not (terminal and run.leads))
    stopped = False
    with Interrupt() as interrupt, bar:
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
    dropped = [record["dropped"] for record in run.records if "dropped" in record]
    summary = {"steps": run.step, "train_loss": float(np.mean(losses[-20:])), "train_dropped": float(np.mean(dropped))}
    summary["tokens_per_s"] = float(np.median(rates))
    if stopped:
        summary["interrupted"] = True
    else:
        summary |= run.evaluate()
        summary["sample"] = run.sample() if config.sample else b""
    if run.leads:
        run.plot()
    return summary | {"seconds": time.monotonic() - run.begin}


def main(argv=None):
    """Command line: trains, then prints the sample and one line of results. Returns the exit status.

    Raises:
      SystemExit: invalid options; the message names them.
    """
    config, resume = config_lib.parse(argv)
    try:
        run = Run(config, resume)
    except (ValueError, OSError, ImportError) as error:  # options that are invalid for this data or machine
        sys.exit(f"error: {error}")
    summary = train(run)
    status = 130 if "interrupted" in summary else 0
    if not run.leads:
        return status
    if status:
        print(f"stopped after step {summary['steps']}; continue with --resume --out {config.out}")
        return status
    if config.sample:
        print(f"--- sample ---\n{summary['sample'].decode(errors='replace')}\n--- end of sample ---")
    bits = summary["train_loss"] / math.log(2)
    print(
        f"{summary['steps']} steps, training loss {summary['train_loss']:.3f} ({bits:.3f} bits per byte), "
        f"held-out {summary['heldout_bits_per_byte']:.3f} bits per byte, {summary['train_dropped']:.2%} of the choices "
        f"dropped ({summary['heldout_dropped']:.2%} held-out), {summary['tokens_per_s']:,.0f} tokens/s, "
        f"{summary['seconds']:.0f} s. "
        f"Files: {config.out}/{{checkpoints,config.json,loss.png,metrics.jsonl,sample.txt}}"
    )
    return 0


if __name__ == "__main__":
    with distributed.prompt_failure():
        status = main()
    sys.exit(status)
