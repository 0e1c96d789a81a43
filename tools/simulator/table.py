"""Rows that a prediction of NCCL or RCCL is asked for."""

import dataclasses

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "collective_permute",
    "ep_dispatch",
    "ep_combine",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One point. Bytes are per rank, in the convention of nccl-tests; None where a table leaves them out."""

    line: int
    repo: str
    hardware: str
    interconnect: str
    op: str
    dtype: str
    ranks: int
    ranks_per_node: int
    bytes: float | None
    notes: dict[str, str]

    @property
    def library(self) -> str:
        return self.notes.get("lib", "")

    @property
    def size(self) -> float:
        """Position inside the series: bytes, else tokens, else 1."""
        return self.bytes or float(self.notes.get("tokens", "1"))


@dataclasses.dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.rows)
