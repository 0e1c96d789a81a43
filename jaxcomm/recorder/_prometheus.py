"""Counters of this process, as numbers and as a text file for Prometheus (node exporter's textfile format)."""

import dataclasses
import itertools
import pathlib
import time
import weakref
from typing import Any

from jaxcomm import _core
from jaxcomm._config import config
from jaxcomm.recorder import _file, _top

_EVERY_S = 15.0
_METRICS = {
    "calls": ("counter", "Collectives that have ended."),
    "failed": ("counter", "Collectives that have failed."),
    "bytes": ("counter", "Bytes of the operands of one rank."),
    "seconds": ("counter", "Time from the first arrival in this process to the end."),
    "waiting_seconds": ("counter", "The part of this time until all ranks of the host had arrived."),
}


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counters of a call site in one group, in this process.

    Attributes:
      op: the public function, such as "psum".
      site: file and line.
      algorithm: as selected for the latest program.
      ranks: the group.
      calls, failed: number of calls that have succeeded and failed.
      bytes: of the operands of one rank, in all successful calls.
      seconds: from the first arrival of a device of this process to the end, in all successful calls.
      waiting_seconds: the part of it until all ranks of this host had arrived.
    """

    op: str
    site: str
    algorithm: str
    ranks: tuple[int, ...]
    calls: int
    failed: int
    bytes: int
    seconds: float
    waiting_seconds: float


@dataclasses.dataclass(frozen=True)
class Transfers:
    """What an endpoint of jaxcomm.transfer in this process has done, and what it waits for.

    Attributes:
      endpoint: its name.
      counters: those of Endpoint.stats().
      traffic: as Endpoint.traffic(): bytes by path for each other endpoint.
      histograms: those of Endpoint.histograms().
      waiting: as Endpoint.waiting(): requests without an answer, the longest first. Each names the other endpoint.
    """

    endpoint: str
    counters: dict[str, int]
    traffic: dict[str, dict[str, int]]
    histograms: dict[str, list[int]]
    waiting: list[str]


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters of this process.

    Attributes:
      sites: one entry per call site and group.
      late_ranks: ranks for which calls of this process have waited for JAXCOMM_WARN_S, and still wait. In several
        processes, all must have their files in one folder.
      rejected: messages from strangers that this process has refused.
      transfers: one entry per endpoint, also if the recorder is off.
    """

    sites: tuple[Counters, ...]
    late_ranks: tuple[int, ...]
    rejected: int
    transfers: tuple[Transfers, ...] = ()


endpoints: "weakref.WeakSet[Any]" = weakref.WeakSet()  # of jaxcomm.transfer, which add themselves


def stats() -> Stats:
    """The counters of the flight recorder since the start of this process; none if it is off or its file is gone."""
    transfers = tuple(Transfers(e.name, e.stats(), e.traffic(), e.histograms(), e.waiting()) for e in list(endpoints))
    path = pathlib.Path(_core.recorder.path())
    try:
        ring = _file.read(path)
    except _file.Unreadable:
        if path.is_file():
            raise
        return Stats((), (), _core.recorder.rejected(), transfers)
    late = _top.late_ranks(ring, config().warn_s)
    return Stats(tuple(_counters(site) for site in ring.sites), late, _core.recorder.rejected(), transfers)


def waiting_transfers() -> list[str]:
    """The requests of all endpoints of this process that wait for another endpoint."""
    return [f"endpoint {each.name!r} waits: {line}" for each in list(endpoints) for line in each.waiting()]


def _counters(site: _file.Site) -> Counters:
    op, _, place = site.text.partition(" at ")
    ranks, seconds, waiting = site.group.ranks, site.time_ns / 1e9, site.waiting_ns / 1e9
    return Counters(op, place, site.algorithm, ranks, site.calls, site.failed, site.bytes, seconds, waiting)


def text(found: Stats, process: int) -> str:
    """The counters in Prometheus' text format. Call sites of equal op, place and group are added."""
    sums: dict[tuple[str, str, int], dict[str, float]] = {}
    for site in found.sites:
        row = sums.setdefault((site.op, site.site, len(site.ranks)), dict.fromkeys(_METRICS, 0))
        for name in _METRICS:
            row[name] += getattr(site, name)
    lines = []
    for name, (kind, meaning) in _METRICS.items():
        lines += [f"# HELP jaxcomm_{name}_total {meaning}", f"# TYPE jaxcomm_{name}_total {kind}"]
        for (op, place, size), row in sorted(sums.items()):
            labels = f'process="{process}",op="{_escaped(op)}",site="{_escaped(place)}",group_size="{size}"'
            lines.append(f"jaxcomm_{name}_total{{{labels}}} {row[name]:.15g}")
    for name, kind, meaning, value in (
        ("late_ranks", "gauge", "Ranks for which calls have waited for JAXCOMM_WARN_S.", len(found.late_ranks)),
        ("rejected_messages_total", "counter", "Messages from strangers.", found.rejected),
    ):
        lines += [f"# HELP jaxcomm_{name} {meaning}", f"# TYPE jaxcomm_{name} {kind}"]
        lines.append(f'jaxcomm_{name}{{process="{process}"}} {value}')
    lines += _transfers_text(found.transfers, process)
    return "\n".join([*lines, ""])


def _transfers_text(transfers: tuple[Transfers, ...], process: int) -> list[str]:
    lines = []
    labels = [f'process="{process}",endpoint="{_escaped(each.endpoint)}"' for each in transfers]
    histograms = sorted({name for each in transfers for name in each.histograms})
    sums = {f"{name}_us" for name in histograms}
    for name in sorted({name for each in transfers for name in each.counters} - sums):
        kind = "gauge" if name == "leases" else "counter"
        suffix, unit = "" if kind == "gauge" else "_total", 1e-6 if name.endswith("_us") else 1
        metric = f"jaxcomm_transfer_{name.replace('_us', '_seconds')}{suffix}"
        lines += [f"# HELP {metric} Of jaxcomm.transfer, by endpoint.", f"# TYPE {metric} {kind}"]
        lines += [
            f"{metric}{{{of}}} {each.counters[name] * unit:.15g}" for each, of in zip(transfers, labels, strict=True)
        ]
    for name in sorted({name for each in transfers for by_path in each.traffic.values() for name in by_path}):
        metric = f"jaxcomm_transfer_peer_{name}_total"
        lines += [f"# HELP {metric} Of jaxcomm.transfer, by both endpoints.", f"# TYPE {metric} counter"]
        for each, of in zip(transfers, labels, strict=True):
            for peer, by_path in sorted(each.traffic.items()):
                lines.append(f'{metric}{{{of},peer="{_escaped(peer)}"}} {by_path[name]}')
    for name in histograms:
        metric = f"jaxcomm_transfer_{name}_seconds"
        lines += [f"# HELP {metric} Successful requests of jaxcomm.transfer.", f"# TYPE {metric} histogram"]
        for each, of in zip(transfers, labels, strict=True):
            below = list(itertools.accumulate(each.histograms[name]))
            limits = [f"{2**i / 1e6:.15g}" for i in range(len(below) - 1)] + ["+Inf"]
            lines += [f'{metric}_bucket{{{of},le="{le}"}} {n}' for le, n in zip(limits, below, strict=True)]
            lines.append(f"{metric}_sum{{{of}}} {each.counters[f'{name}_us'] / 1e6:.15g}")
            lines.append(f"{metric}_count{{{of}}} {below[-1]}")
    return lines


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Writer:
    """Writes the text file beside the ring, as node exporter reads it: the old or the new content."""

    def __init__(self, ring: pathlib.Path) -> None:
        self._ring, self._due = ring, time.monotonic() + _EVERY_S
        self._process = int(ring.name.split("-")[1])

    def write_if_due(self) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _EVERY_S
            self.write()

    def write(self) -> None:
        file = self._ring.with_name(self._ring.name + ".prom")
        part = file.with_name(file.name + ".part")
        try:
            part.write_text(text(stats(), self._process))
            part.replace(file)
        except OSError:
            pass  # a full disk must not disturb the program
