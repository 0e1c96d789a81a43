"""Tasks of one device: kernels, collectives and loops with their dependencies."""

import dataclasses
from collections.abc import Iterator


class StepError(ValueError):
    """A program that cannot be simulated. The text names the primitive or the mesh, and the call site."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Computation without a collective.

    Attributes:
      name: of the primitive, or "fusion".
      flops: multiplications and additions of products; 0 for everything else.
      bytes: read from and written to memory.
      dtype: element type of the product.
      site: call site.
    """

    name: str
    flops: float
    bytes: float
    dtype: str
    site: str


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective, over the named axes.

    Attributes:
      op: public name.
      axes, groups: mesh axes, outermost first, and axis_index_groups or None.
      count, dtype: elements of the operand of one rank, and their type.
      site: call site.
      asynchronous: whether computation may run at the same time.
      algorithm, max_sms: as in the op.
      perm, source: of a permute and of a broadcast.
    """

    op: str
    axes: tuple[str, ...]
    count: int
    dtype: str
    site: str
    asynchronous: bool
    groups: tuple[tuple[int, ...], ...] | None = None
    algorithm: str | None = None
    max_sms: int | None = None
    perm: tuple[tuple[int, int], ...] | None = None
    source: int = 0


@dataclasses.dataclass(frozen=True)
class Loop:
    """`trips` executions of a block, one after the other; or, with several blocks, of the slowest one."""

    name: str
    blocks: tuple["Block", ...]
    trips: int
    site: str


@dataclasses.dataclass(frozen=True)
class Task:
    work: Kernel | Exchange | Loop
    needs: tuple[int, ...]  # earlier tasks of the block


@dataclasses.dataclass(frozen=True)
class Block:
    tasks: tuple[Task, ...]

    def exchanges(self) -> Iterator[Exchange]:
        for task in self.tasks:
            if isinstance(task.work, Exchange):
                yield task.work
            elif isinstance(task.work, Loop):
                for block in task.work.blocks:
                    yield from block.exchanges()

    def then(self, other: "Block") -> "Block":
        """This block, and another one after its end."""
        first = len(self.tasks)
        ends = tuple(sorted(set(range(first)) - {need for task in self.tasks for need in task.needs}))
        return Block(
            self.tasks
            + tuple(Task(task.work, tuple(need + first for need in task.needs) or ends) for task in other.tasks)
        )
