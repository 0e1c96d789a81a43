"""Options of the mixture of experts, beside those that all scripts share (models/lm/config.py)."""

import dataclasses

from ..lm.config import Config as BaseConfig
from ..lm.config import option

AXES = ("node", "gpu")  # outermost first; every device is a data-parallel rank and holds experts


@dataclasses.dataclass(frozen=True)
class Config(BaseConfig):
    name = "moe"
    about = "Trains a mixture-of-experts transformer on bytes of text."
    axes = AXES
    batch_axes = AXES
    free_on_resume = (*BaseConfig.free_on_resume, "eval_capacity", "sample", "prompt", "temperature")

    # Where to run. "direct" adds in the order of the ranks, as XLA does on CPUs, so the losses of both libraries are
    # equal with --moe capacity. With another order, rounding errors make them differ after some hundred steps.
    psum: str = option(
        "direct",
        'algorithm of jaxcomm.psum; "" selects it by size and topology; on several hosts, "direct" becomes '
        '"hierarchical", because hosts cannot read each other\'s memory',
    )
    layout: str = option("2x4", "sizes of the mesh axes node x gpu")

    # Model.
    heads: int = option(4, "attention heads")
    experts: int = option(8, "experts per layer, sharded over all devices")
    hidden: int = option(384, "hidden units of one expert")
    moe: str = option(
        "dropless",
        '"dropless" computes every choice of an expert; "capacity" drops choices of experts without a free slot',
        choices=("dropless", "capacity"),
    )
    capacity: float = option(
        1.25, "slots per expert in training with --moe capacity, relative to a perfectly even load"
    )
    eval_capacity: float = option(2.0, "the same in evaluation")
    dtype: str = option("float32", "type of activations and of exchanged tokens", choices=("float32", "bfloat16"))

    # Training.
    steps: int = option(1000, "optimiser steps in total, including those before --resume")
    # Independent of `steps`, so that 3 steps and 3 resumed steps have the same rates as 6 steps at once.
    decay_steps: int = option(1000, "step at which the cosine reaches a twentieth of --lr, where it stays")
    balance: float = option(0.01, "weight of the load-balancing loss")

    # Reporting.
    eval_every: int = option(250, "steps between evaluations; the last step is always evaluated")
    save_every: int = option(250, "steps between checkpoints; the last step is always saved")
    sample: int = option(400, "bytes of text to generate at the end; 0 for none")
    prompt: str = option("import os\n\n\ndef ", "text that the sample continues")
    temperature: float = option(0.7, "sampling temperature; 0 always takes the likeliest byte")

    def __post_init__(self):
        super().__post_init__()
        for name in ["sample", "temperature", "balance"]:
            self.check(getattr(self, name) >= 0, name, "at least 0")
        for name in ["capacity", "eval_capacity"]:
            self.check(getattr(self, name) > 0, name, "above 0")
        self.check(self.experts >= 2, "experts", "at least 2, because each token chooses two")
        self.check_divides(AXES, experts="experts")
        self.check(self.prompt != "", "prompt", "at least one character")

    def without_effect(self):
        found = super().without_effect()
        if self.moe == "dropless":
            found |= dict.fromkeys(("capacity", "eval_capacity"), "--moe dropless")
        if self.sample == 0:
            found |= dict.fromkeys(("prompt", "temperature"), "--sample 0")
        return found
