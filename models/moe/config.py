"""Options of the mixture-of-experts example: one frozen dataclass, from which the command line is generated."""

import argparse
import dataclasses
import json
import pathlib


def option(default, text, **kwargs):
    """A dataclass field with its help text; ``kwargs`` go to ``argparse.add_argument``."""
    return dataclasses.field(default=default, metadata={"help": text, "argparse": kwargs})


@dataclasses.dataclass(frozen=True)
class Config:
    """All options of a training run. The defaults train in one to two minutes on two CPU cores."""

    # Where to run.
    comm: str = option("jaxcomm", "library of the collectives", choices=("jaxcomm", "lax"))
    # "direct" adds in the order of the ranks, as XLA does on CPUs, so the losses of both libraries are equal with
    # --moe capacity. With another order of summation, rounding errors make the losses differ after some hundred steps.
    psum: str = option(
        "direct",
        'algorithm of jaxcomm.psum; "" selects it by size and topology; on several hosts, "direct" becomes '
        '"hierarchical", because hosts cannot read each other\'s memory',
    )
    platform: str = option(
        "cpu",
        "JAX platform of the devices; cpu creates nodes * gpus CPU devices, an equal share in each process",
    )
    nodes: int = option(2, "outer mesh axis: nodes")
    gpus: int = option(4, "inner mesh axis: devices per node")

    # Input and output.
    data: str = option("", "folder of text to learn; empty means the source of the Python standard library")
    heldout: float = option(0.05, "share of the files that is held out for evaluation")
    out: str = option("runs/moe", "folder for checkpoint, metrics and loss curve; files of an earlier run are replaced")

    # Model.
    layers: int = option(2, "transformer blocks, each with attention and a mixture of experts")
    width: int = option(128, "size of a token vector")
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
    batch: int = option(16, "sequences per step over all devices")
    seq: int = option(128, "bytes per sequence")
    lr: float = option(4e-3, "peak learning rate")
    warmup: int = option(30, "steps of linear warm-up")
    # Independent of `steps`, so that 3 steps and 3 resumed steps have the same rates as 6 steps at once.
    decay_steps: int = option(1000, "step at which the cosine reaches a twentieth of --lr, where it stays")
    weight_decay: float = option(0.05, "AdamW weight decay of matrices")
    # Clips spikes only: the first steps have a norm of 8, later steps below 2. The last bit of the norm depends on how
    # XLA compiles its sum, so clipped steps may differ by rounding between --comm jaxcomm and lax (jax 0.12).
    clip: float = option(10.0, "largest global gradient norm")
    balance: float = option(0.01, "weight of the load-balancing loss")
    seed: int = option(0, "seed of weights, data order and sample")

    # Reporting.
    eval_every: int = option(250, "steps between evaluations; the last step is always evaluated")
    eval_batches: int = option(16, "batches of held-out text in one evaluation")
    save_every: int = option(250, "steps between checkpoints; the last step is always saved")
    sample: int = option(400, "bytes of text to generate at the end; 0 for none")
    prompt: str = option("import os\n\n\ndef ", "text that the sample continues")
    temperature: float = option(0.7, "sampling temperature; 0 always takes the likeliest byte")

    def __post_init__(self):
        """Raises ValueError for invalid values, before anything is compiled."""
        sizes = ["nodes", "gpus", "layers", "width", "heads", "experts", "hidden", "batch", "seq"]
        counts = ["steps", "decay_steps", "eval_every", "eval_batches", "save_every"]
        for name in sizes + counts:
            self._check(getattr(self, name) >= 1, name, "at least 1")
        for name in ["warmup", "sample", "temperature", "weight_decay", "balance", "seed"]:
            self._check(getattr(self, name) >= 0, name, "at least 0")
        for name in ["lr", "clip", "capacity", "eval_capacity"]:
            self._check(getattr(self, name) > 0, name, "above 0")
        for field in dataclasses.fields(self):
            choices = field.metadata["argparse"].get("choices")
            if choices:
                self._check(getattr(self, field.name) in choices, field.name, f"one of {', '.join(choices)}")
        ranks = f"{self.nodes} nodes x {self.gpus} gpus = {self.num_ranks} devices"
        self._check(0 < self.heldout < 1, "heldout", "between 0 and 1")
        self._check(self.experts >= 2, "experts", "at least 2, because each token chooses two")
        self._check(self.experts % self.num_ranks == 0, "experts", f"a multiple of {ranks}")
        self._check(self.batch % self.num_ranks == 0, "batch", f"a multiple of {ranks}")
        self._check(self.width % (2 * self.heads) == 0, "width", f"a multiple of 2 * heads = {2 * self.heads}")
        self._check(self.warmup < self.decay_steps, "warmup", f"less than decay_steps = {self.decay_steps}")
        self._check(self.prompt != "", "prompt", "at least one character")

    def _check(self, good, name, expected):
        if not good:
            raise ValueError(f"--{name}: got {getattr(self, name)!r}, expected {expected}")

    @property
    def num_ranks(self):
        return self.nodes * self.gpus

    def save(self, path):
        pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


# Options that may differ when a run is resumed: they do not change the losses (or only by rounding).
FREE_ON_RESUME = frozenset(
    "comm psum out steps eval_capacity eval_every eval_batches save_every sample prompt temperature".split()  # noqa: SIM905
)


def load(path, overrides):
    """Reads the options of an earlier run and replaces those in ``overrides``.

    Raises:
      FileNotFoundError: there is no earlier run.
      ValueError: an override would make the continuation a different run.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"--resume: {path} does not exist, so there is no run to continue. Start without --resume."
        )
    defaults = {field.name: field.default for field in dataclasses.fields(Config)} | {"moe": "capacity"}
    saved = defaults | json.loads(path.read_text())  # options that are newer than the run; runs before --moe drop
    for name, value in overrides.items():
        if name not in FREE_ON_RESUME and value != saved[name]:
            raise ValueError(f"--{name}: got {value!r}, but the run to resume has {saved[name]!r}. Use another --out.")
    return Config(**{**saved, **overrides})


def parse(argv=None):
    """Command line -> (Config, resume). With ``--resume``, options not given are those of the earlier run."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.train", description="Trains a mixture-of-experts transformer on bytes of text."
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    for field in dataclasses.fields(Config):
        text = f"{field.metadata['help']} (default: {field.default!r})".replace("%", "%%")
        # SUPPRESS: the result has only the options of the command line, so that --resume can tell them from defaults.
        parser.add_argument(
            f"--{field.name}", type=field.type, default=argparse.SUPPRESS, help=text, **field.metadata["argparse"]
        )
    given = vars(parser.parse_args(argv))
    resume = given.pop("resume")
    try:
        out = pathlib.Path(given.get("out", Config.out))
        return (load(out / "config.json", given) if resume else Config(**given)), resume
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
