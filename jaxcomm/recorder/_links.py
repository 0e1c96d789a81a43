"""How fast data move between processes, as far as calls tell it, beside the cost model.

A plan says how many bytes pass between two processes. A call lasts at least as long as the slowest of these transfers,
so bytes / time of a call is a lower bound for the bandwidth of each pair of processes that its plan uses. A pair has
the best of its bounds. Pairs that have the same bound from the same calls cannot be told apart.
"""

import collections
import dataclasses
import statistics
from collections.abc import Iterator

from jaxcomm.recorder import _file, _runs
from jaxcomm.recorder._predict import Shape

# To read the plan of a group takes time: up to 0.2 s for 64 ranks.
_MOST_RANKS, _MOST_SITES = 64, 64


@dataclasses.dataclass(frozen=True)
class Link:
    """Pairs of processes.

    Attributes:
      pairs: several if their calls do not tell them apart.
      site, algorithm: of the calls that show the highest bandwidth.
      calls: number of these calls.
      bytes_per_s: bytes between the processes of each pair, in the direction with more, per second.
      predicted_bytes_per_s: the same for the predicted time of the call.
      waited: number of these calls in which a process of each pair waited for the other one when it looked last. It
        looks at calls that last.
    """

    pairs: tuple[tuple[int, int], ...]
    site: str
    algorithm: str
    calls: int
    bytes_per_s: float
    predicted_bytes_per_s: float
    waited: int

    def __str__(self) -> str:
        names = ", ".join(f"{one}-{other}" for one, other in self.pairs)
        return (
            f"processes {names}{' (not told apart)' if len(self.pairs) > 1 else ''}: at least "
            f"{self.bytes_per_s / 1e9:.3g} GB/s, predicted {self.predicted_bytes_per_s / 1e9:.3g} GB/s; {self.calls} "
            f"calls of {self.site}, {self.algorithm}{f', waited in {self.waited}' if self.waited else ''}"
        )


@dataclasses.dataclass
class _Calls:
    """Calls of one site, shape and group; bytes and waits by pair."""

    site: str
    algorithm: str
    number: int
    time_s: float
    predicted_s: float
    size_bytes: dict[tuple[int, int], int]
    waits: dict[tuple[int, int], int]


def find(run: _runs.Run) -> list[Link]:
    """The links between processes, those farthest below the prediction first."""
    alike = list(_alike(run))
    same = collections.defaultdict[tuple[int, int], list[tuple[int, int]]](list)
    for pair in sorted({pair for calls in alike for pair in calls.size_bytes}):
        users = [number for number, calls in enumerate(alike) if pair in calls.size_bytes]
        best = max(users, key=lambda number: alike[number].size_bytes[pair] / alike[number].time_s)
        same[best, alike[best].waits.get(pair, 0)].append(pair)
    links = []
    for (best, waited), pairs in same.items():
        calls = alike[best]
        least_bytes = min(calls.size_bytes[pair] for pair in pairs)
        bounds = least_bytes / calls.time_s, least_bytes / calls.predicted_s
        links.append(Link(tuple(pairs), calls.site, calls.algorithm, calls.number, *bounds, waited))
    return sorted(links, key=lambda link: (link.bytes_per_s / link.predicted_bytes_per_s, -link.waited))


def _alike(run: _runs.Run) -> Iterator[_Calls]:
    """The calls that all processes of a group have recorded and the cost model predicts."""
    node_of = {process: str(ring.header["node"]) for process, ring in run.rings.items()}
    matched = collections.defaultdict[int, dict[int, _file.Call]](dict)
    for process, ring in run.rings.items():
        for call in ring.calls:
            if call.phase == "done" and call.key:
                matched[call.key][process] = call
    alike = collections.defaultdict[tuple[_file.Group, str, str, Shape], list[dict[int, _file.Call]]](list)
    for calls in matched.values():
        call = next(iter(calls.values()))
        processes = set(call.group.processes)
        if len(processes) > 1 and processes <= calls.keys() and len(call.group.ranks) <= _MOST_RANKS:
            alike[call.group, call.site.text, call.site.algorithm, Shape.of_call(call, node_of)].append(calls)
    largest = sorted(alike.items(), key=lambda item: -item[0][-1].size_bytes)[:_MOST_SITES]
    for (group, site, algorithm, shape), of in largest:
        if not (predicted := shape.predicted(algorithm)):
            continue
        sent = collections.Counter[tuple[int, int]]()
        for ranks, size_bytes in shape.traffic(algorithm).items():
            source, to = (group.processes[rank] for rank in ranks)
            if source != to:
                sent[source, to] += size_bytes
        most = {(min(pair), max(pair)): max(sent[pair], sent[pair[::-1]]) for pair in sent}
        time_s = statistics.median(_moving_s(run, calls) for calls in of)
        waits = collections.Counter(pair for calls in of for pair in _waiting_pairs(calls))
        yield _Calls(site, algorithm, len(of), time_s, predicted[1], most, waits)


def _moving_s(run: _runs.Run, calls: dict[int, _file.Call]) -> float:
    """From the time when the last process had entered the call, until the last one left it."""
    entered = max(max(call.started_ns, call.running_ns) + run.offset_ns[process] for process, call in calls.items())
    return max(max(call.ended_ns + run.offset_ns[p] for p, call in calls.items()) - entered, 1) / 1e9


def _waiting_pairs(calls: dict[int, _file.Call]) -> set[tuple[int, int]]:
    """Processes of a call, one of which waited for the other when it looked last."""
    found = set()
    for process, call in calls.items():
        peer = call.group.process_of(call.waiting_peer) if call.waiting_peer is not None else None
        if peer is not None and peer != process:
            found.add((min(process, peer), max(process, peer)))
    return found
