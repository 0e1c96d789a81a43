"""Export of recorded calls in the format of PyTorch's flight recorder, version 2.10.

Its analyser reads pickled dumps (torch/distributed/flight_recorder/components/loader.py). The same content is written
as JSON for other tools. Ranks are devices. Dumps hold plain data only.
"""

import json
import pathlib
import pickle
from typing import Any

from jaxcomm.recorder import _file, _runs

_VERSION = "2.10"
# Names that the analyser knows. It takes an unknown name for an error.
_NAMES = {
    "psum": "all_reduce",
    "pmean": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "psum_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "pbroadcast": "broadcast",
    "barrier": "barrier",
}
_OTHER = "all_to_all"  # ppermute and the exchanges of experts: each rank may send to each other one


def export(run: _runs.Run, folder: pathlib.Path) -> int:
    """Writes rank_<n> and json/<n>.json for each device. Returns the number of ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    json_folder = folder / "json"
    json_folder.mkdir(exist_ok=True)
    ranks = {rank: process for process, ring in run.rings.items() for rank in _ranks(ring)}
    for rank, process in ranks.items():
        dump = _dump(run.rings[process], rank, run.offset_ns[process])
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
        (json_folder / f"{rank}.json").write_text(json.dumps(dump))
    return len(ranks)


def _ranks(ring: _file.Ring) -> list[int]:
    return sorted({rank for site in ring.sites for rank in site.group.ranks_of(ring.process)})


def _dump(ring: _file.Ring, rank: int, offset_ns: int) -> dict[str, Any]:
    groups = {f"{site.group.hash:016x}": site.group for site in ring.sites if rank in site.group.ranks}
    return {
        "version": _VERSION,
        "pg_config": {
            name: {"name": name, "desc": "undefined", "ranks": str(list(group.ranks))} for name, group in groups.items()
        },
        "pg_status": {},
        "entries": [_entry(call, offset_ns) for call in ring.calls if rank in call.group.ranks],
    }


def _entry(call: _file.Call, offset_ns: int) -> dict[str, Any]:
    op, _, place = call.site.text.partition(" at ")
    file, _, line = place.partition(" ")[0].rpartition(":")
    started = max(call.started_ns, call.running_ns)
    state = "completed" if call.phase == "done" else "started" if started else "scheduled"
    return {
        "frames": [{"name": op, "filename": file, "line": int(line) if line.isdigit() else 0}],
        "record_id": call.number,
        "pg_id": 0,
        "process_group": (f"{call.group.hash:016x}", "undefined"),
        "collective_seq_id": call.sequence,
        "p2p_seq_id": 0,
        "op_id": call.sequence,
        "profiling_name": f"nccl:{_NAMES.get(op.removesuffix('_start'), _OTHER)}",
        "time_created_ns": call.arrived_ns + offset_ns,
        "time_discovered_started_ns": started + offset_ns if started else None,
        "time_discovered_completed_ns": call.ended_ns + offset_ns if call.phase == "done" else None,
        "duration_ms": (call.ended_ns - started) / 1e6 if call.phase == "done" else None,
        "input_sizes": [[call.input_count]],
        "input_dtypes": [call.dtype],
        "output_sizes": [[call.output_count]],
        "output_dtypes": [call.dtype],
        "state": state,
        "retired": call.phase == "done",
        "timeout_ms": 0,
        "is_p2p": False,
    }
