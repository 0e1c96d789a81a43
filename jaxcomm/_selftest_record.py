"""The results of ``python -m jaxcomm.selftest`` on GPUs: a file in the user's cache folder.

By default, a call runs jaxcomm's own kernels only if the record shows that such a call gave right values and was faster
than XLA's collective. A record counts for the GPUs, versions and settings that it names, and for no others.
"""

import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import jax

from jaxcomm import _native, _request
from jaxcomm._config import cache_folder, config, write
from jaxcomm._core import plan
from jaxcomm._processes import kv_store

_FORMAT = 3
_NICS = pathlib.Path("/sys/class/infiniband")
# Settings that change which kernels run, and how.
_SETTINGS = ("JAXCOMM_BULK_COPY", "JAXCOMM_MAX_SMS", "JAXCOMM_SYMMETRIC_BUFFERS", "NCCL_GIN_ENABLE", "NCCL_NVLS_ENABLE")

_FAILURE = "selftest/failure"  # key of the first failed test, as JSON
ANY_SIZE = 1 << 62  # bytes
# Features: what a row of the self-test belongs to. Each of plan.FEATURES is one, too: how kernels run a plan.
PROGRAMS = "programs"  # collectives in loops, gradients and over two axes
TYPES = "types"  # one collective with many element types
PLANS = "plans"  # one collective of one size, timed
SLICES = "ragged_all_to_all"
EXPERTS = "dispatch, combine"
ONE_EXCHANGE = "route_and_dispatch"
SUMS_BY_NODE = "sums by node"  # a test of EXPERTS: the hosts are the nodes that the kernels have found
STARTS = "started transfers"
GRAPHS = "CUDA graphs"
_LISTS = {SLICES: ("all_to_all_v",), EXPERTS: ("dispatch", "combine")}


@dataclasses.dataclass
class Row:
    """One test and its result.

    Attributes:
      feature: one of the names above.
      op: public name of the collective, or name of the program.
      dtype: element type, or several, with commas between them.
      bytes: of the operand of one rank; of dispatch: of a row for each choice of its tokens.
      ranks: number of ranks of a group.
      ranks_per_node: those of them on one host.
      wrong: elements that differ; None if the test raised.
      jaxcomm_us, xla_us: median times of one call; None if they were not measured.
      error: first line of the exception.
      ran: algorithms that ran jaxcomm's calls, as lowering resolved them.
    """

    feature: str
    op: str
    dtype: str
    bytes: int
    ranks: int
    ranks_per_node: int
    wrong: int | None = None
    jaxcomm_us: float | None = None
    xla_us: float | None = None
    error: str = ""
    ran: str = ""

    @property
    def right(self) -> bool:
        return self.wrong == 0 and not self.error

    @property
    def won(self) -> bool:
        """Whether values were right and jaxcomm was faster than XLA's collective."""
        times = self.jaxcomm_us, self.xla_us
        return self.right and times[0] is not None and times[1] is not None and times[0] < times[1]

    @property
    def test(self) -> tuple[Any, ...]:
        """Names the test, apart from its result."""
        return self.feature, self.op, self.dtype, self.bytes, self.ranks, self.ranks_per_node

    def line(self, default: str) -> str:
        """For people. `default`: which side was faster."""
        times = [f"{value:.1f}" if value is not None else "-" for value in (self.jaxcomm_us, self.xla_us)]
        wrong = "-" if self.wrong is None else str(self.wrong)
        dtype = self.dtype if "," not in self.dtype else f"{self.dtype.count(',') + 1} types"
        line = f"{self.op:20}{self.ranks:>6}{self.bytes:>11}{dtype:>10}{times[0]:>11}{times[1]:>11}{wrong:>7}"
        return f"{line}  {default:8} {self.ran}".rstrip() + (f"  {self.error}" if self.error else "")


# Of the lines of rows.
HEADER = (
    f"#{'op':19}{'ranks':>6}{'bytes':>11}{'type':>10}{'jaxcomm':>11}{'XLA':>11}{'wrong':>7}  faster   algorithms\n"
    f"#{'':19}{'':>6}{'':>11}{'':>10}{'(us)':>11}{'(us)':>11}{'':>7}"
)


def key() -> dict[str, str] | None:
    """The GPUs, versions and settings of this program; None without GPUs or without the CUDA module."""
    try:
        gpus = jax.devices("cuda")
        module = _native.cuda()
        nccl = module.nccl(_native.nccl_wheel())["version"]
    except (ImportError, RuntimeError):
        return None
    hosts = {getattr(gpu, "slice_index", None) if jax.process_count() > 1 else 0 for gpu in gpus}
    settings = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ]
    settings += [
        flag for flag in os.environ.get("XLA_FLAGS", "").split() if "command_buffer" in flag or "graph" in flag
    ]
    return {
        "gpus": ", ".join(sorted({gpu.device_kind for gpu in gpus})),
        "hosts": "one" if len(hosts) == 1 and None not in hosts else "several",
        "network": _network(),
        "driver": _native.kernel_driver() or str(module.driver_version()),
        "nccl": str(nccl),
        "built": " ".join(f"{name}={value}" for name, value in sorted(module.built().items())),
        "settings": " ".join(settings),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "jaxcomm": importlib.metadata.version("jaxcomm"),
    }


def _network() -> str:
    """Names of the RDMA devices of this host."""
    try:
        return " ".join(sorted(device.name for device in _NICS.iterdir()))
    except OSError:
        return ""


def first_failure(row: Row) -> Row:
    """The test that failed first in any process, with the process in its error. `row`: a test that failed here.

    The processes that miss one whose test has raised fail in the same test or in a later one.
    """
    own = dataclasses.replace(row, error=f"process {jax.process_index()}: {row.error}")
    try:
        return Row(**json.loads(kv_store.kv_agree(_FAILURE, json.dumps(dataclasses.asdict(own)))))
    except RuntimeError:  # process 0 has ended
        return own


def failure_elsewhere(failed: bool) -> Row | None:
    """Called by each process after its tests. In process 0: what first_failure() is in another process, if any.

    Args:
      failed: whether a test has raised in this process, which then knows the first failure.

    Raises:
      RuntimeError: a process has not ended its tests within JAXCOMM_TIMEOUT_S.
    """
    if not jax.distributed.is_initialized():
        return None
    if jax.process_index() > 0:
        kv_store.kv_set(f"selftest/end/{jax.process_index()}", "")
        return None
    if failed:
        return None
    for process in range(1, jax.process_count()):
        kv_store.kv_wait(f"selftest/end/{process}", config().timeout_s)
    found = json.loads(kv_store.kv_agree(_FAILURE, "null"))
    return Row(**found) if found else None


def path() -> pathlib.Path | None:
    folder = cache_folder()
    return folder / "selftest.json" if folder else None


def _records() -> tuple[list[dict[str, Any]], str]:
    """The records of the file, each with "key" and "rows"; or the reason why the file cannot be used."""
    try:
        if (file := path()) is None or not file.exists():
            return [], ""
        found = json.loads(file.read_text())
        if found["format"] != _FORMAT:
            raise ValueError("another version of jaxcomm has written it")
        return [{"key": dict(r["key"]), "rows": [Row(**row) for row in r["rows"]]} for r in found["records"]], ""
    except (KeyError, OSError, TypeError, ValueError) as error:
        return [], f"{path()} cannot be used: {error}"


def rows_of(own: dict[str, str]) -> tuple[list[Row], str]:
    """The recorded rows of a key; if there are none, also the reason why a record that exists does not count."""
    records, why = _records()
    for record in records:
        if record["key"] == own:
            return record["rows"], ""
    if records:
        known = records[-1]["key"]
        differences = [
            f"{name} {known.get(name, '')!r} instead of {value!r}"
            for name, value in own.items()
            if known.get(name) != value
        ]
        why = f"{path()} was recorded with {', '.join(differences)}"
    return [], why


def save(own: dict[str, str], rows: Iterable[Row]) -> pathlib.Path | None:
    """Adds rows to the record of a key; they replace earlier results of the same tests.

    Returns:
      The file; None if the user has no cache folder.

    Raises:
      OSError: the file can't be written.
    """
    if (file := path()) is None:
        return None
    merged = {row.test: row for row in (*rows_of(own)[0], *rows)}
    records = [record for record in _records()[0] if record["key"] != own]
    records.append({"key": own, "rows": list(merged.values())})
    made = [{"key": r["key"], "rows": [dataclasses.asdict(row) for row in r["rows"]]} for r in records]
    write(file, json.dumps({"format": _FORMAT, "records": made}, indent=1))
    return file


@functools.cache
def own_rows() -> tuple[Row, ...]:
    """The recorded rows of this program's GPUs, versions and settings. The same in all processes of the program."""
    own = key()
    found, why = rows_of(own) if own is not None else ([], "")
    if why:
        logging.getLogger("jaxcomm").warning("jaxcomm: the self-test's record does not count here: %s", why)
    text = kv_store.kv_agree("selftest/rows", json.dumps([dataclasses.asdict(row) for row in found]))
    return tuple(Row(**row) for row in json.loads(text))


def ranges(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The calls that jaxcomm runs by default: the fields of plan.Measured by name. `rows`: those of one key.

    A range of sizes begins and ends with a measured size. At both, and at every size that was measured between them,
    one plan won. XLA's collectives run all other sizes: below the smallest, above the largest, and between two sizes
    that XLA or different plans won. Between hosts, plans count only if the kernels have found the hosts to be the
    nodes. Sums of a type that was not timed follow those of float32, up to the size at which their values were right. A
    wrong value excludes its collective altogether; in a program of several collectives it excludes all of them.
    """
    rows = list(rows)
    if any(row.feature == PROGRAMS and not row.right for row in rows):
        return []
    wrong = {_collective(row) for row in rows if not row.right}
    hosts_are_nodes = {(row.ranks, row.ranks_per_node) for row in rows if row.op == SUMS_BY_NODE and row.right}
    types: dict[str, dict[str, int]] = {}  # of sums: the bytes at which a type's values were right
    sizes: dict[tuple[str, str, int, int], list[Row]] = {}
    for row in rows:
        name = _collective(row)
        if name is None or name in wrong:
            continue
        reduces = _request.ROWS[name].reduces
        if row.feature == TYPES and reduces:
            types.setdefault(name, {}).update(dict.fromkeys(row.dtype.split(","), row.bytes))
        elif row.xla_us is not None and (
            row.feature != PLANS
            or row.ranks_per_node == row.ranks
            or (row.ranks, row.ranks_per_node) in hosts_are_nodes
        ):
            dtype = row.dtype if reduces else "float32"
            sizes.setdefault((name, dtype, row.ranks, row.ranks_per_node), []).append(row)
    found = []
    for (name, dtype, ranks, ranks_per_node), timed in sizes.items():
        group = {"collective": name, "num_ranks": ranks, "ranks_per_node": ranks_per_node}
        most = {dtype: ANY_SIZE}
        if dtype == "float32":
            timed_dtypes = {key[1] for key in sizes if key[0] == name and key[2:] == (ranks, ranks_per_node)}
            most |= {other: bytes_ for other, bytes_ in types.get(name, {}).items() if other not in timed_dtypes}
        for begin, end, algorithm in _won(name, timed):
            for name_of_type, limit in sorted(most.items()):
                if begin <= limit:
                    limits = {"dtype": name_of_type, "min_bytes": begin, "max_bytes": min(end, limit)}
                    found.append(group | limits | {"algorithm": algorithm})
    return found


def _collective(row: Row) -> str | None:
    """Native name of the collective that a row tests; None if it tests several."""
    if row.feature in (TYPES, PLANS):
        return _request.native_name(row.op)
    return {SLICES: "all_to_all_v", EXPERTS: "dispatch"}.get(row.feature)


def _won(name: str, timed: Iterable[Row]) -> list[tuple[int, int, str]]:
    """Ranges of bytes that one plan won, and the plan; "" for a collective with one kernel."""
    has_plans = _request.ROWS[name].elements not in ("slices", "tokens")
    names = [algorithm for algorithm, _ in plan.algorithms(name)] if has_plans else [""]
    winners: dict[int, set[str]] = {}  # "xla": it won, or it is not known which plan ran
    for row in timed:
        ran = row.ran if has_plans else ""
        winners.setdefault(row.bytes, set()).add(ran if row.won and ran in names else "xla")
    found: list[tuple[int, int, str]] = []
    before = {"xla"}
    for size, winner in sorted(winners.items()):
        if len(winner) == 1 and winner != {"xla"}:
            begin = found.pop()[0] if winner == before else size
            found.append((begin, size, min(winner)))
        before = winner
    return [(0, ANY_SIZE, algorithm) for _, _, algorithm in found] if name == "barrier" else found


@functools.cache
def measured() -> list[plan.Measured]:
    """The calls for which a self-test has measured one plan as faster here. The same in all processes."""
    return [plan.Measured(**found) for found in ranges(own_rows())]


def passed() -> list[str]:
    """Those of plan.FEATURES that have given right values here. The same in all processes."""
    return [feature for feature in plan.FEATURES if _all_right(row for row in own_rows() if row.feature == feature)]


def _all_right(rows: Iterable[Row]) -> bool:
    results = [row.right for row in rows]
    return bool(results) and all(results)


@functools.cache
def measured_one_exchange() -> bool:
    """Whether it has measured the kernel of route_and_dispatch as faster. The same in all processes."""
    results = [row.won for row in own_rows() if row.feature == ONE_EXCHANGE]
    return bool(results) and all(results) and passed_in_graphs()


def passed_in_graphs() -> bool:
    """Whether calls in CUDA graphs have given right values here. The same in all processes."""
    # Calls between hosts stay out of graphs.
    return _all_right(row for row in own_rows() if row.feature == GRAPHS and row.ranks_per_node == row.ranks)


def passed_between_nodes(collective: str) -> bool:
    """As put_between_nodes(), here. The same in all processes."""
    return put_between_nodes(own_rows(), collective)


def put_between_nodes(rows: Iterable[Row], collective: str) -> bool:
    """Whether kernels of a collective (native name) have put over the network between hosts."""
    features = (EXPERTS,) if _request.ROWS[collective].elements == "tokens" else (PROGRAMS, TYPES, PLANS)
    return _all_right(row for row in rows if row.feature in features and row.ranks_per_node < row.ranks)
