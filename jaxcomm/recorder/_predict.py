"""Predicted times of recorded calls, by the cost model that also selects their algorithms."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxcomm import _cost_params, _request
from jaxcomm._core import plan
from jaxcomm._measure.collectives import COLLECTIVES
from jaxcomm.recorder import _file

_NATIVE = _request.NATIVE | _request.STARTS | _request.MOE | {"moe.route": "all_gather"}
_BUS_FACTORS = {collective.native: collective.bus_factor for collective in COLLECTIVES.values()}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the time of a call depends on, as the recorder knows it.

    Attributes:
      op: public name.
      ranks_of_nodes: ranks of the group on each node; empty if the files of other processes do not say it.
      processes: number of processes of the group.
    """

    op: str
    dtype: str
    item_bytes: int
    input_count: int
    output_count: int
    ranks_of_nodes: tuple[int, ...]
    processes: int

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "Shape":
        """From its fields as JSON has them."""
        names = [field.name for field in dataclasses.fields(Shape)]
        return Shape(**{name: fields[name] for name in names} | {"ranks_of_nodes": tuple(fields["ranks_of_nodes"])})

    @staticmethod
    def of_call(call: _file.Call, node_of: Mapping[int, str]) -> "Shape":
        """node_of: nodes of processes, as far as known."""
        op, processes = call.site.text.partition(" at ")[0], call.group.processes
        known = len(set(processes)) == 1 or all(process in node_of for process in processes)
        nodes = collections.Counter(node_of.get(process, "") for process in processes) if known else {}
        counts = call.input_count, call.output_count
        return Shape(op, call.dtype, call.item_bytes, *counts, tuple(nodes.values()), len(set(processes)))

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_of_nodes)

    @property
    def starts(self) -> str:
        """The function that starts this op beside computations; "" if there is none."""
        return name if (name := f"{self.op}_start") in _request.STARTS else ""

    @property
    def size_bytes(self) -> int:
        """Bytes that a rank at least reads or writes: its larger buffer. Buffers of rows may be empty in part."""
        row = _request.ROWS.get(_NATIVE.get(self.op, ""))
        larger = row is not None and row.elements == "array"
        return (max if larger else min)(self.input_count, self.output_count) * self.item_bytes

    def bus_bytes(self) -> float | None:
        """Bytes of busbw in nccl-tests; None if the op has no such bandwidth."""
        factor = _BUS_FACTORS.get(_NATIVE.get(self.op, ""))
        return factor(self.num_ranks) * self.size_bytes if factor and self.ranks_of_nodes else None

    def predicted(self, algorithm: str = "") -> tuple[str, float] | None:
        """The algorithm, "" for the fastest, and its predicted time in seconds.

        Permutations are predicted as a shift by one, and broadcasts from the first rank. None: the cost model does not
        predict this call.
        """
        found = self._resolution(algorithm)
        return (found.algorithm, found.call_cost(None).time_s) if found else None

    def traffic(self, algorithm: str) -> Mapping[tuple[int, int], int]:
        """Bytes between ranks of the group, (from, to), by the plan. Empty without a prediction, and if it would need
        the pairs of a permutation or the root of a broadcast, which are not recorded.
        """
        found = self._resolution(algorithm)
        sent = collections.Counter[tuple[int, int]]()
        if found is None or _NATIVE[self.op] in ("permute", "broadcast"):
            return sent
        for own in plan.build(found.call_request, found.algorithm):
            all_sources = own.sources
            for step in own.steps:
                reduces = step.kind == "reduce"
                first = step.first_source
                sources = all_sources[first : first + step.num_sources] if reduces else [step.src]
                if step.kind in ("copy", "put", "get", "reduce"):
                    for source in sources:
                        if source.rank != step.dst.rank:
                            sent[source.rank, step.dst.rank] += step.count * found.item_bytes
        return sent

    def _resolution(self, algorithm: str) -> plan.Resolution | None:
        native = _NATIVE.get(self.op)
        nodes = self.ranks_of_nodes
        if native is None or _request.ROWS[native].elements != "array" or len(set(nodes)) != 1:
            return None
        _cost_params.load()
        n = self.num_ranks
        scope = "network" if len(nodes) > 1 else "node" if self.processes > 1 else "process"
        attributes = {
            "group_size": n,
            "root": 0,
            "source_of": [(rank - 1) % n for rank in range(n)] if native == "permute" else [],
            "asynchronous": int(self.op in _request.STARTS),
            "algorithm": algorithm,
            "ranks_per_node": nodes[0],
            "max_sms": 0,
        }
        able = plan.Capabilities("cpu", machine=plan.machine_of(scope, n, nodes[0]))
        counts = self.input_count, self.output_count
        try:
            return plan.resolve(native, attributes, self.dtype, *counts, plan.Placement(scope, nodes[0]), able)
        except (ValueError, NotImplementedError):
            return None
