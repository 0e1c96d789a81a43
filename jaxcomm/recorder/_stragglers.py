"""Who arrives last at the calls that all processes of a group have recorded, and how long the others waited for it."""

import collections
import dataclasses

from jaxcomm.recorder import _runs


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A process at a call site.

    Attributes:
      site: op, file and line.
      process: number of the process.
      last: number of calls at which the process arrived last.
      calls: number of calls of the site that could be compared.
      waiting_s: time that the other processes waited for it, added up.
    """

    site: str
    process: int
    last: int
    calls: int
    waiting_s: float


def find(run: _runs.Run) -> list[Straggler]:
    """The processes that arrived last at least once, the one with the most waiting first."""
    arrivals: dict[int, dict[int, tuple[int, str, int]]] = collections.defaultdict(dict)
    for process, ring in run.rings.items():
        for call in ring.calls:
            if call.phase == "done" and call.key:
                time = call.started_ns + run.offset_ns[process]
                size = len(set(call.group.processes))
                arrivals[call.key][process] = time, call.site.text, size
    last: collections.Counter[tuple[str, int]] = collections.Counter()
    compared: collections.Counter[str] = collections.Counter()
    waiting: collections.Counter[tuple[str, int]] = collections.Counter()
    for of in arrivals.values():
        latest = max(of, key=lambda process: of[process][0])
        time, site, size = of[latest]
        if size == 1 or len(of) < size:
            continue
        compared[site] += 1
        last[site, latest] += 1
        waiting[site, latest] += sum(time - other for other, _, _ in of.values())
    found = [
        Straggler(site, process, last[site, process], compared[site], waiting[site, process] / 1e9)
        for site, process in last
    ]
    return sorted(found, key=lambda straggler: -straggler.waiting_s)
