"""Predicted times of published training runs of GPT models: a check of step times.

Kernels follow the roofline of ``step``, collectives the times of NCCL that `predict` gives, and a layer is scheduled on
two streams. Nothing is fitted to these runs. Source of the program: Korthikanti et al., MLSys 2023 (arXiv:2205.05198);
of the pipeline: Narayanan et al., SC 2021 (arXiv:2104.04473).
"""

import dataclasses
import functools
import math
import pathlib
import tomllib

from jaxcomm.simulate.cluster.model import Cluster
from jaxcomm.simulate.nccl import predict as nccl
from jaxcomm.simulate.step.costs import Costs
from jaxcomm.simulate.step.schedule import execute
from jaxcomm.simulate.step.tasks import Block, Exchange, Kernel, Task

_TENSOR = 8  # ranks of tensor parallelism
_SEQUENCE, _VOCABULARY = 2048, 51200
_ITEM = 2  # bytes of float16
_LIBRARY = "nccl-2.12"  # of early 2022
TARGET = (0.05, 0.12)  # mean and largest error
# Bytes of memory for each parameter: norm of gradients 4, unscaling 8, clipping 8, Adam 28, parameters of 16 bits 6,
# zeroing 4.
_OPTIMIZER_BYTES = 58
# Bytes for each logit: cross entropy in float32, one kernel for each operation of PyTorch.
_LOSS_BYTES, _LOSS_GRADIENT_BYTES = 34, 14
# cuBLAS computes tiles of this size, one on each multiprocessor at a time: the last wave of tiles may be partly empty.
# Source: NVIDIA, Matrix Multiplication Background User's Guide, wave quantization. The product that gives
# flops_efficiency of dgx-a100 fills its waves.
_TILE, _MULTIPROCESSORS = (256, 128), 108
# NCCL's thread blocks on 8 A100 (the lines "24 coll channels" of its logs). Kernels beside them have so many fewer.
_CHANNELS = 24


def _waves(m: float, n: float, batch: float = 1.0) -> float:
    """The work of whole waves, divided by that of the product."""
    tiles = batch * math.ceil(m / _TILE[0]) * math.ceil(n / _TILE[1])
    covered = tiles * _TILE[0] * _TILE[1] / (batch * m * n)
    return covered * math.ceil(tiles / _MULTIPROCESSORS) * _MULTIPROCESSORS / tiles


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run. `selective`: selective recomputation and sequence parallelism; else full recomputation."""

    name: str
    selective: bool
    layers: int
    hidden: int
    heads: int
    stages: int
    interleaving: int
    batch: int
    microbatch: int
    published_s: float

    @property
    def ranks(self) -> int:
        return _TENSOR * self.stages


def runs() -> list[Run]:
    text = pathlib.Path(__file__).with_name("megatron.toml").read_text(encoding="utf-8")
    found = []
    for name, row in tomllib.loads(text).items():
        times = {False: row.pop("full_s"), True: row.pop("selective_s")}
        found += [Run(name, selective, **row, published_s=time_s) for selective, time_s in times.items()]
    return found


class _Layers:
    """Tasks of parts of a model, on one rank and for one microbatch."""

    def __init__(self, run: Run):
        self.run, self.tasks = run, list[Task]()
        rows = _SEQUENCE * run.microbatch
        self.rows, self.h = rows, run.hidden
        self.x = float(_ITEM * rows * run.hidden)  # bytes of the activations of a whole layer
        self.scores = float(_ITEM * run.heads * run.microbatch * _SEQUENCE**2 / _TENSOR)
        self.shared = self.x / (_TENSOR if run.selective else 1)  # outside of the products

    def _add(self, work: Kernel | Exchange, needs: tuple[int, ...] | None = None) -> int:
        number = len(self.tasks)
        self.tasks.append(Task(work, needs if needs is not None else (number - 1,) if number else ()))
        return number

    def memory(self, name: str, size: float) -> int:
        return self._add(Kernel(name, 0.0, size, "", ""))

    def product(self, m: float, k: float, n: float, needs: tuple[int, ...] | None = None, out: int = _ITEM) -> int:
        """m x k times k x n; `out`: bytes of an element of the result."""
        size = _ITEM * (m * k + k * n) + out * m * n
        return self._add(Kernel("product", 2.0 * m * k * n * _waves(m, n), size, "float16", ""), needs)

    def exchange(self, op: str, size: float, needs: tuple[int, ...] | None = None) -> int:
        """`size`: bytes of the operand. Each starts as soon as its operand is there."""
        made = Exchange(op, ("model",), int(size) // _ITEM, "float16", "", asynchronous=True)
        return self._add(made, needs)

    def weights(self, m: float, k: float, n: float, needs: tuple[int, ...]) -> int:
        """Gradient of weights k x n, added to a sum in float32."""
        return self.product(k, m, n, needs, out=8)

    def gather(self) -> None:
        if self.run.selective:
            self.exchange("all_gather", self.x / _TENSOR)

    def reduce(self) -> None:
        self.exchange("psum_scatter" if self.run.selective else "psum", self.x)

    def attention(self) -> None:
        """Scores, causal softmax, dropout, values. A causal kernel reads half of the scores and writes all."""
        r, s, b = self.run, _SEQUENCE, self.run.microbatch * self.run.heads / _TENSOR
        width = r.hidden / r.heads
        for inner, outer in ((width, s), (s, width)):
            size = _ITEM * b * (s * inner + inner * outer + s * outer)
            if inner == s:
                self.memory("softmax", 1.5 * self.scores)
                self.memory("dropout", 2.5 * self.scores)
            flops = 2.0 * b * s * inner * outer * _waves(s, outer, b)
            self._add(Kernel("product", flops, size, "float16", ""))

    def attention_gradient(self) -> None:
        r, s, b = self.run, _SEQUENCE, self.run.microbatch * self.run.heads / _TENSOR
        flops, size = 2.0 * b * s * s * r.hidden / r.heads, self.scores + 2 * self.x / _TENSOR
        for name in ("values", "probabilities", "dropout", "softmax", "queries", "keys"):
            if name in ("dropout", "softmax"):
                self.memory(name, 2.5 * self.scores)
            else:
                columns = s if name == "probabilities" else r.hidden / r.heads
                self._add(Kernel(name, flops * _waves(s, columns, b), size, "float16", ""))

    def forward(self) -> None:
        h, part, rows = self.h, self.h / _TENSOR, self.rows
        self.memory("norm", 2 * self.shared)
        self.gather()
        self.product(rows, h, 3 * part)
        self.attention()
        self.product(rows, part, h)
        self.reduce()
        self.memory("bias, dropout, sum", 3.5 * self.shared)
        self.memory("norm", 2 * self.shared)
        self.gather()
        self.product(rows, h, 4 * part)
        self.memory("gelu", 8 * self.x / _TENSOR)
        self.product(rows, 4 * part, h)
        self.reduce()
        self.memory("bias, dropout, sum", 3.5 * self.shared)

    def _rows_gradient(self, k: float) -> None:
        """Adds the gradients of a product that reads k columns of each rank and writes whole rows."""
        self.memory("bias, dropout, sum", 3.5 * self.shared)
        self.gather()
        last = len(self.tasks) - 1
        self.product(self.rows, self.h, k, (last,))
        self.weights(self.rows, k, self.h, (last,))

    def _columns_gradient(self, n: float) -> None:
        """Adds the gradients of a product that writes n columns of each rank. Transfers run beside the products."""
        last = len(self.tasks) - 1
        gathered = (self.exchange("all_gather", self.x / _TENSOR, (last,)),) if self.run.selective else ()
        made = self.product(self.rows, n, self.h, (last,))
        reduced = self.exchange("psum_scatter" if self.run.selective else "psum", self.x, (made,))
        weights = self.weights(self.rows, self.h, n, (made, *gathered))
        self._add(Kernel("norm", 0.0, 8 * self.shared, "", ""), (reduced, weights))

    def backward(self) -> None:
        part = self.h / _TENSOR
        if self.run.selective:
            self.attention()
        else:
            self.forward()
        self._rows_gradient(4 * part)
        self.memory("gelu", 12 * self.x / _TENSOR)
        self._columns_gradient(4 * part)
        self._rows_gradient(part)
        self.attention_gradient()
        self._columns_gradient(3 * part)

    def head(self) -> None:
        """Norm, logits and loss of the last stage, forward and backward."""
        part, logits = _VOCABULARY / _TENSOR, self.rows * _VOCABULARY / _TENSOR
        self.memory("norm", 2 * self.shared)
        self.gather()
        self.product(self.rows, self.h, part)
        self.memory("loss", _LOSS_BYTES * logits)
        self.memory("loss", _LOSS_GRADIENT_BYTES * logits)
        self._columns_gradient(part)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Seconds of an iteration, and its parts.

    Attributes:
      layers_s: of all microbatches in a stage without the head.
      head_s: more in the last stage, which the others wait for.
      bubble_s, messages_s, optimizer_s: of the pipeline; between stages; of the optimizer.
      exposed_s: communication of tensor parallelism without computation, part of the first two.
    """

    run: Run
    time_s: float
    layers_s: float
    head_s: float
    bubble_s: float
    messages_s: float
    optimizer_s: float
    exposed_s: float

    @property
    def error(self) -> float:
        return self.time_s / self.run.published_s - 1


def predict(run: Run, cluster: Cluster) -> Predicted:
    """The time of an iteration. The slowest stage sets the pace: the last one, which has the head."""
    costs = Costs(cluster, {"model": _TENSOR})

    @functools.cache
    def collective(op: str, size: int) -> float:
        return nccl.predict(op, size, _TENSOR, cluster, _LIBRARY).time_s

    def duration(work: Kernel | Exchange) -> float:
        return costs.kernel(work) if isinstance(work, Kernel) else collective(work.op, work.count * _ITEM)

    def part(*names: str) -> tuple[float, float]:
        made = _Layers(run)
        for name in names:
            getattr(made, name)()
        timeline = execute(Block(tuple(made.tasks)), duration)
        beside_s = timeline.communication_s - timeline.exposed_s
        return timeline.time_s + beside_s * _CHANNELS / _MULTIPROCESSORS, timeline.exposed_s

    microbatches, per_stage = run.batch // run.microbatch, run.layers // run.stages
    layer_s, exposed_s = part("forward", "backward")
    head_s, head_exposed_s = part("head")
    message_s = 0.0
    if run.stages > 1:
        level = cluster.levels[1]
        size = _Layers(run).x / _TENSOR
        message_s = size / level.bytes_per_s + level.overhead_s + level.latency_s
        if not run.selective:  # each rank sends a part, and the next stage gathers them
            message_s += collective("all_gather", int(size))
        message_s *= 2 * run.interleaving
    stage_s = per_stage * layer_s
    parameters = (12 * run.hidden**2 * per_stage + _VOCABULARY * run.hidden) / _TENSOR
    optimizer_s = costs.kernel(Kernel("optimizer", 0.0, _OPTIMIZER_BYTES * parameters, "", ""))
    bubble_s = (run.stages - 1) / run.interleaving * (stage_s + message_s)
    parts = (microbatches * stage_s, microbatches * head_s, bubble_s, microbatches * message_s, optimizer_s)
    alone_s = microbatches * (per_stage * exposed_s + head_exposed_s)
    return Predicted(run, sum(parts), *parts, alone_s)


def table(found: list[Predicted]) -> tuple[str, bool]:
    """Times and errors as Markdown, and whether they meet the target."""
    lines = [
        "| model | GPUs | recomputation | published, s | predicted, s | error, % | tensor parallelism, % | head, % | "
        "pipeline, % |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found:
        shares = (row.exposed_s, row.head_s, row.bubble_s + row.messages_s)
        cells = " | ".join(f"{100 * share / row.time_s:.1f}" for share in shares)
        kind = "selective" if row.run.selective else "full"
        lines.append(
            f"| {row.run.name} | {row.run.ranks} | {kind} | {row.run.published_s:.2f} | {row.time_s:.2f} | "
            f"{100 * row.error:+.1f} | {cells} |"
        )
    errors = [abs(row.error) for row in found]
    mean, worst = sum(errors) / len(errors), max(errors)
    met = mean <= TARGET[0] and worst <= TARGET[1]
    lines += [
        "",
        f"Mean error {100 * mean:.1f} %, largest {100 * worst:.1f} %. The target of {100 * TARGET[0]:.0f} % and "
        f"{100 * TARGET[1]:.0f} % is {'met' if met else 'missed'}.",
    ]
    return "\n".join(lines) + "\n", met
