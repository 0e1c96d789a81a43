"""Steps of execution traces: the tasks of each rank, for `graphs`."""

import json
import math
import pathlib

import jax

from jaxcomm._lowering import replica_groups
from jaxcomm.simulate import chakra, graphs, steps
from jaxcomm.simulate.chakra import Node, TraceError
from jaxcomm.simulate.cluster import Cluster
from jaxcomm.simulate.predictions import Step
from jaxcomm.simulate.tasks import Exchange, Kernel

_OPS = {0: "psum", 2: "all_gather", 5: "pbroadcast", 6: "all_to_all", 7: "psum_scatter", 8: "psum_scatter",
        9: "barrier"}  # fmt: skip


# Names of PyTorch.
_DTYPES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64",
           "short": "int16", "char": "int8", "byte": "uint8"}  # fmt: skip


def _dtype(name: str, where: str) -> str:
    """The name in NumPy."""
    found = name.removeprefix("c10::").removeprefix("torch.").lower()
    found = _DTYPES.get(found, found)
    try:
        return found and str(jax.numpy.dtype(found))
    except TypeError:
        raise TraceError(f"{where}: dtype: got {name!r}, expected the name of an element type") from None


class _Reader:
    """The jobs of the nodes of a rank."""

    def __init__(self, mesh: dict[str, int], groups: dict[str, tuple[int, ...]], groups_at: pathlib.Path):
        self.mesh, self.groups, self.groups_at = mesh, groups, groups_at
        self.everyone = tuple(range(math.prod(mesh.values())))
        self.notes: dict[str, int] = {}

    def jobs(self, rank: int, nodes: list[Node], file: str) -> list[graphs.Job]:
        place = {node.id: index for index, node in enumerate(nodes)}
        made = []
        for node in nodes:
            needs = tuple(sorted({place[need] for need in (*node.control, *node.data)}))
            made.append(self._job(rank, node, needs, f"{file}: {node}"))
        return made

    def note(self, text: str) -> None:
        self.notes[text] = self.notes.get(text, 0) + 1

    def _number(self, node: Node, name: str, where: str, default: int | None = None) -> int:
        value = node.attributes.get(name, default)
        if value is None:
            raise TraceError(f"{where}: has no attribute {name}")
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
            value = int(value)
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise TraceError(f"{where}: {name}: got {value!r}, expected a number of at least 0")
        return int(value)

    def _job(self, rank: int, node: Node, needs: tuple[int, ...], where: str) -> graphs.Job:
        if node.kind in (chakra.INVALID, chakra.METADATA):
            return graphs.Job(None, needs, where=where)
        if node.kind in (chakra.COMP, chakra.MEM_LOAD, chakra.MEM_STORE):
            return self._kernel(node, needs, where)
        if node.kind in (chakra.SEND, chakra.RECV):
            send = node.kind == chakra.SEND
            own, other = ("comm_src", "comm_dst") if send else ("comm_dst", "comm_src")
            if self._number(node, own, where, rank) != rank:
                raise TraceError(f"{where}: {own} is {node.attributes[own]}, but the file is that of rank {rank}")
            size = self._number(node, "comm_size", where)
            work = Exchange(
                "send" if send else "recv", (), None, size, "uint8", None, None, None, 0, True, node.name
            )  # fmt: skip
            peer, tag = self._number(node, other, where), self._number(node, "comm_tag", where, 0)
            return graphs.Job(work, needs, peer=peer, tag=tag, where=where)
        if node.kind == chakra.COLL:
            return self._collective(rank, node, needs, where)
        kind = chakra.KINDS[node.kind] if node.kind < len(chakra.KINDS) else f"type {node.kind}"
        raise TraceError(f"{where}: {kind} is not modelled")

    def _kernel(self, node: Node, needs: tuple[int, ...], where: str) -> graphs.Job:
        """A recorded duration, else the roofline of the operations and bytes."""
        flops, size = (self._number(node, name, where, 0) for name in ("num_ops", "tensor_size"))
        time_s = self._number(node, "duration_ns", where, node.micros * 1000) * 1e-9
        if not time_s and not flops and not size:
            return graphs.Job(None, needs, where=where)
        if node.kind != chakra.COMP and not time_s:
            self.note("a load or store of memory takes the time of the device's own memory")
        host = bool(node.attributes.get("is_cpu_op", False))
        if host and not time_s:
            raise TraceError(f"{where}: a task of the processor without a duration")
        if host:
            self.note("tasks of the processor run beside those of the device, one after the other")
        dtype = _dtype(str(node.attributes.get("dtype", "")), where)
        kernel = Kernel(node.name, float(flops), float(size), dtype, where, time_s or None)
        return graphs.Job(kernel, needs, host=host, where=where)

    def _collective(self, rank: int, node: Node, needs: tuple[int, ...], where: str) -> graphs.Job:
        kind = self._number(node, "comm_type", where)
        if kind not in _OPS:
            name = chakra.COLLECTIVES[kind] if kind < len(chakra.COLLECTIVES) else f"comm_type {kind}"
            raise TraceError(f"{where}: {name} is not modelled")
        size = self._number(node, "comm_size", where, 0 if _OPS[kind] == "barrier" else None)
        group = self._group(rank, node, where)
        site = node.name.removeprefix(f"{_OPS[kind]} at ") or f"node {node.id}"
        work = Exchange(_OPS[kind], tuple(self.mesh), (group,), size, "uint8", None, None, None, 0, True, site)
        return graphs.Job(work, needs, group=group, where=where)

    def _group(self, rank: int, node: Node, where: str) -> tuple[int, ...]:
        """The ranks of the node's communicator; else those that its network dimensions span."""
        name = str(node.attributes.get("pg_name", "") or "0")
        if name in self.groups:
            return self.groups[name]
        if name != "0":
            raise TraceError(f"{where}: communicator group {name} is not in {self.groups_at}")
        dims = node.attributes.get("involved_dim", [True])
        if not isinstance(dims, list) or not all(isinstance(used, bool) for used in dims):
            raise TraceError(f"{where}: involved_dim: got {dims!r}, expected a list of booleans")
        if all(dims):
            return self.everyone
        sizes = tuple(self.mesh.values())[::-1]
        if not any(dims) or len(dims) != len(sizes):
            raise TraceError(f"{where}: involved_dim {dims} needs communicator groups, or a mesh of these dimensions")
        axes = tuple(axis for axis, used in zip(tuple(self.mesh)[::-1], dims, strict=True) if used)[::-1]
        rows = replica_groups(tuple(self.mesh), tuple(self.mesh.values()), axes, None)
        return tuple(int(r) for r in next(row for row in rows if rank in row))


def _groups(path: pathlib.Path, ranks: int) -> dict[str, tuple[int, ...]]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {str(name): tuple(row) for name, row in content.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}: expected an object of lists of ranks by name: {error}") from None
    for name, row in found.items():
        ids = all(type(rank) is int and 0 <= rank < ranks for rank in row)
        if not row or not ids or len(set(row)) < len(row):
            raise TraceError(f"{path}: group {name}: got {list(row)}, expected distinct ranks below {ranks}")
    return found


def of_traces(
    template: str,
    *,
    cluster: Cluster,
    mesh: dict[str, int] | None = None,
    fidelity: str = "folded",
    groups_at: str | None = None,
) -> Step:
    """Predicts the time of execution traces (Chakra) on a cluster.

    Computation takes the durations of the traces, or a roofline where they have none. Collectives and messages take the
    time that they have on the cluster.

    Args:
      template: the files, with %d in place of the rank.
      cluster: the cluster; rank r of the traces is its rank r.
      mesh: sizes by axis, outermost first; the dimensions of collectives without a communicator group.
      fidelity: as in ``step``.
      groups_at: JSON file of communicator groups; by default the one that ``chakra.write_step`` writes.

    Raises:
      TraceError: a trace that cannot be read, or has nodes that are not modelled.
      StepError: collectives or messages of different ranks that do not match.
      ClusterError: a cluster that is too small, or groups that do not fit its levels.
      OSError: there is no file of rank 0.
    """
    nodes = chakra.read(template)
    mesh = mesh or {"rank": len(nodes)}
    if math.prod(mesh.values()) != len(nodes):
        raise TraceError(
            f"{template}: there are {len(nodes)} traces, but the mesh has {math.prod(mesh.values())} ranks"
        )
    path = pathlib.Path(groups_at) if groups_at else chakra.groups_file(template)
    reader = _Reader(mesh, _groups(path, len(nodes)), path)
    jobs = [reader.jobs(rank, own, template.replace("%d", str(rank))) for rank, own in enumerate(nodes)]
    if not any(jobs):
        raise TraceError(f"{template}: the traces have no nodes")
    if any(job.work.op in steps.MESSAGES for own in jobs for job in own if isinstance(job.work, Exchange)):
        for fault in cluster.faults:
            if fault.slow and not fault.planes:
                raise steps.StepError(f"{template}: fault {fault}: faults of links and ranks do not act on messages")
    costs = steps.Costs(cluster, mesh, fidelity)
    timeline, last = graphs.execute(jobs, costs.duration, costs.whole)
    limits = [graphs.end_s(jobs, costs.end(end), costs.whole) for end in (False, True)]
    reader.note(f"the table shows rank {last}, which ends last")
    if any(job.work.op == "send" for own in jobs for job in own if isinstance(job.work, Exchange)):
        reader.note("messages of a rank follow each other, and share no link with those of other ranks")
    return steps.summary(costs, timeline, (limits[0], limits[1]), reader.notes)
