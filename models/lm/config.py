"""Options that all scripts share: one frozen dataclass, from which the command line is generated.

A script subclasses Config: it names its mesh axes and may add fields, which become options, and checks. An option on
the command line that differs from its default is an error if it is known to have no effect with the others:
Config.without_effect names these.
"""

import argparse
import dataclasses
import json
import math
import pathlib
from typing import ClassVar

import jax


def option(default, text, **kwargs):
    """A dataclass field with its help text; ``kwargs`` go to ``argparse.add_argument``."""
    return dataclasses.field(default=default, metadata={"help": text, "argparse": kwargs})


@dataclasses.dataclass(frozen=True)
class Config:
    """All options of a training run. The defaults train in one to two minutes on two CPU cores."""

    name: ClassVar[str] = "lm"  # folder of the script
    about: ClassVar[str] = "Trains a transformer on bytes of text."
    axes: ClassVar[tuple[str, ...]] = ("data",)  # mesh axes, outermost first
    batch_axes: ClassVar[tuple[str, ...]] = ("data",)  # axes that share the sequences of a step
    # Options that may differ when a run is resumed: they do not change the losses (or only by rounding).
    free_on_resume: ClassVar[tuple[str, ...]] = (
        "comm", "psum", "out", "steps", "eval_every", "eval_batches", "save_every"
    )  # fmt: skip

    # Where to run.
    comm: str = option("jaxcomm", "library of the collectives", choices=("jaxcomm", "lax"))
    # "direct" adds in the order of the ranks, as XLA does on CPUs, so both libraries give the same sums.
    psum: str = option(
        "direct",
        'algorithm of the sums over ranks; "" selects it by size and topology, as on several hosts',
    )
    platform: str = option("cpu", "JAX platform; cpu creates the devices, an equal share in each process")
    layout: str = option("8", "sizes of the mesh axes, outermost first, for example 2x4")

    # Input and output.
    data: str = option("", "folder of text to learn; empty means the source of the Python standard library")
    heldout: float = option(0.05, "share of the files that is held out for evaluation")
    out: str = option("", "folder for checkpoint, metrics and loss curve; empty means runs/<name of the script>")

    # Model.
    layers: int = option(2, "transformer blocks")
    width: int = option(128, "size of a token vector")
    heads: int = option(8, "attention heads")
    hidden: int = option(256, "hidden units of a feed-forward layer")
    dtype: str = option(
        "float32",
        "type of parameters and activations in the forward pass; float64 needs JAX_ENABLE_X64=1",
        choices=("float32", "bfloat16", "float64"),
    )

    # Training.
    steps: int = option(400, "optimiser steps in total, including those before --resume")
    batch: int = option(16, "sequences per step over all devices")
    seq: int = option(128, "bytes per sequence")
    lr: float = option(4e-3, "peak learning rate")
    warmup: int = option(30, "steps of linear warm-up")
    decay_steps: int = option(400, "step at which the cosine reaches a twentieth of --lr, where it stays")
    weight_decay: float = option(0.05, "AdamW weight decay of matrices")
    # Clips spikes only. The last bit of the norm depends on how XLA compiles its sum, so clipped steps may differ by
    # rounding between --comm jaxcomm and lax (jax 0.12).
    clip: float = option(10.0, "largest global gradient norm")
    seed: int = option(0, "seed of weights, data order and samples")

    # Reporting.
    eval_every: int = option(100, "steps between evaluations; the last step is always evaluated")
    eval_batches: int = option(16, "batches of held-out text in one evaluation")
    save_every: int = option(100, "steps between checkpoints; the last step is always saved")

    def __post_init__(self):
        """Raises ValueError for invalid values, before anything is compiled. Subclasses extend it."""
        parts = self.layout.split("x")
        good = len(parts) == len(self.axes) and all(part.isdecimal() and int(part) > 0 for part in parts)
        example = "x".join("2" for _ in self.axes)
        self.check(good, "layout", f"the sizes of {' x '.join(self.axes)}, for example {example}")
        for name in ["layers", "width", "heads", "hidden", "batch", "seq", "steps", "decay_steps"]:
            self.check(getattr(self, name) >= 1, name, "at least 1")
        for name in ["eval_every", "eval_batches", "save_every"]:
            self.check(getattr(self, name) >= 1, name, "at least 1")
        for name in ["warmup", "weight_decay", "seed"]:
            self.check(getattr(self, name) >= 0, name, "at least 0")
        for name in ["lr", "clip"]:
            self.check(getattr(self, name) > 0, name, "above 0")
        for field in dataclasses.fields(self):
            choices = field.metadata["argparse"].get("choices")
            if choices:
                self.check(getattr(self, field.name) in choices, field.name, f"one of {', '.join(map(str, choices))}")
        self.check(0 < self.heldout < 1, "heldout", "between 0 and 1")
        self.check(self.width % (2 * self.heads) == 0, "width", f"a multiple of 2 * heads = {2 * self.heads}")
        self.check(self.warmup < self.decay_steps, "warmup", f"less than decay_steps = {self.decay_steps}")
        x64 = self.dtype != "float64" or jax.config.jax_enable_x64
        self.check(x64, "dtype", "float32 or bfloat16, because JAX_ENABLE_X64 is not set")
        self.check_divides(self.batch_axes, batch="sequences")

    def check(self, good, name, expected):
        if not good:
            raise ValueError(f"--{name}: got {getattr(self, name)!r}, expected {expected}")

    def check_divides(self, axes, **options):
        """Each of ``options`` must be a multiple of the number of ranks along ``axes``; its value says of what."""
        ranks = self.ranks(*axes)
        for name, what in options.items():
            where = f"{' x '.join(axes)} = {ranks} in --layout {self.layout}"
            self.check(getattr(self, name) % ranks == 0, name, f"a multiple of {where}, which share the {what}")

    def without_effect(self):
        """{name of an option: the reason why it has no effect}. Subclasses extend it."""
        if self.comm != "jaxcomm":
            return {"psum": f"--comm {self.comm}"}
        return {"psum": f"one rank in --layout {self.layout}"} if self.ranks() == 1 else {}

    def check_effect(self, given):
        """Raises ValueError if one of the options ``given`` on the command line has no effect.

        Defaults are accepted, so that a script can pass the same options with several layouts.
        """
        for name, reason in self.without_effect().items():
            if given.get(name, getattr(type(self), name)) != getattr(type(self), name):
                raise ValueError(f"--{name}: no effect with {reason}; remove it")

    def one_rank(self, axis, *options):
        """``without_effect`` of options that are for several ranks along an axis."""
        return dict.fromkeys(options, f"{axis} = 1 in --layout {self.layout}") if self.ranks(axis) == 1 else {}

    def ranks(self, *axes):
        """Number of ranks along ``axes``, or of all ranks."""
        return math.prod(self.sizes[axis] for axis in axes or self.axes)

    @property
    def sizes(self):
        """Sizes of the mesh axes by name."""
        return dict(zip(self.axes, map(int, self.layout.split("x")), strict=True))

    @property
    def folder(self):
        return pathlib.Path(self.out or f"runs/{self.name}")

    def save(self, path):
        pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def load(config_type, path, overrides):
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
    defaults = {field.name: field.default for field in dataclasses.fields(config_type)}
    saved = defaults | json.loads(path.read_text())
    for name, value in overrides.items():
        if name not in config_type.free_on_resume and value != saved[name]:
            raise ValueError(f"--{name}: got {value!r}, but the run to resume has {saved[name]!r}. Use another --out.")
    return config_type(**{**saved, **overrides})


def parse(config_type, argv=None):
    """Command line -> (config_type, resume). With ``--resume``, options not given are those of the earlier run."""
    parser = argparse.ArgumentParser(prog=f"python -m models.{config_type.name}.train", description=config_type.about)
    parser.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    for field in dataclasses.fields(config_type):
        text = f"{field.metadata['help']} (default: {field.default!r})".replace("%", "%%")
        # SUPPRESS: the result has only the options of the command line, so that --resume can tell them from defaults.
        parser.add_argument(
            f"--{field.name}", type=field.type, default=argparse.SUPPRESS, help=text, **field.metadata["argparse"]
        )
    given = vars(parser.parse_args(argv))
    resume = given.pop("resume")
    try:
        folder = pathlib.Path(given.get("out") or f"runs/{config_type.name}")
        config = load(config_type, folder / "config.json", given) if resume else config_type(**given)
        config.check_effect(given)
        return config, resume
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
