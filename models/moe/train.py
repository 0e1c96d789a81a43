"""Trains the mixture of experts of model.py on text: ``python -m models.moe.train``, in one process or several.

The loop is that of all scripts, models/lm/train.py. Here are the metrics of the routing, and the sample at the end.
"""

import functools

import jax
import numpy as np

from ..lm import comm as comm_lib
from ..lm import train as lm
from .config import Config
from .decode import generate, make_decode
from .step import build

# All sums are over all ranks. On several nodes, their order is that of one process with the same --layout.
load_comm = functools.partial(comm_lib.load, sums=("psum",), between_nodes="hierarchical")


class Run(lm.Run):
    """A run with the share of dropped choices in its metrics, and with sample.txt."""

    files = (*lm.Run.files, "sample.txt")
    load_comm = staticmethod(load_comm)

    def __init__(self, config, build=build, resume=False):
        super().__init__(config, build, resume)

    def sample(self):
        """Continues the prompt by ``config.sample`` bytes. All processes take part; the first writes the text."""
        config = self.config
        decode = make_decode(config, self.mesh, self.program, self.comm)
        (text,) = generate(decode, self.state[0], [config.prompt.encode()], config.sample, self.mesh, config.seed)
        if self.leads:
            (self.out / "sample.txt").write_bytes(text)
        return text

    def describe(self):
        size = sum(x.size for x in jax.tree.leaves(self.state[0]))
        return f"{size:,} parameters, {self.config.experts} experts per layer"

    def totals(self):
        """Share of the choices of all steps that were dropped."""
        dropped = [record["dropped"] for record in self.records if "dropped" in record]
        return {"train_dropped": float(np.mean(dropped))}

    def finish(self):
        return {"sample": self.sample() if self.config.sample else b""}

    def report(self, summary):
        """Prints the sample. Returns the parts of the last line, with the share of dropped choices."""
        if self.config.sample:
            print(f"--- sample ---\n{summary['sample'].decode(errors='replace')}\n--- end of sample ---")
        *parts, speed, seconds = super().report(summary)
        dropped = f"{summary['train_dropped']:.2%} of the choices dropped ({summary['heldout_dropped']:.2%} held-out)"
        return [*parts, dropped, speed, seconds]


if __name__ == "__main__":
    lm.run_command(Config, build, Run)
