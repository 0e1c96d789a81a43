"""collective(): the time of one collective on a cluster, from the same plan that jaxcomm executes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm import _check, _request, _reshard
from jaxcomm._core import plan, sim
from jaxcomm.simulate.cluster import ecmp, faults, groups
from jaxcomm.simulate.cluster.model import Cluster

# Errors of a prediction that rests on no measurement of jaxcomm: a factor of four each way, a guess.
_GUESS = 4.0
# Share of the time from which a bound is called the reason of the time.
_REASON = 0.5
_MAX_STEPS = 100_000_000
# With faults, few ranks have equal roles, and their transfers do not end at the same times.
_MAX_BROKEN = 1_000_000
FIDELITIES = ("bounds", "folded", "full")


@dataclasses.dataclass(frozen=True)
class Simulated:
    """The predicted time of a collective. ``str()`` gives a summary.

    Attributes:
      op: public name.
      cluster: name of the cluster.
      groups: ranks in one group of each level.
      ranks, bytes: size of the group; bytes of the operand of one rank.
      algorithm, reason: plan, and the reason for its selection; "" with fidelity "bounds".
      channels: thread blocks of each rank.
      time_s: predicted time; None with fidelity "bounds".
      interval: (low, high), seconds, meant to hold 80 % of the measured times.
      bound_alpha_s: time of this plan without bytes. Of any algorithm with fidelity "bounds".
      bound_beta_s: time of the bytes on the busiest link. Of any algorithm with fidelity "bounds".
      bottleneck: that link.
      utilisation: share of the time in which the busiest link of each name is busy.
      wait_s: mean time of a rank waiting for signals.
      why: what limits the time.
      origins: number of parameters of each origin.
      ranks_simulated: ranks that were simulated; each represents as many others.
      steps: number of simulated steps.
      notes: faults and collisions that the time contains.
      timeline: transfers and waits (with an empty name) of the simulated ranks, as far as ``max_entries`` allows.
    """

    op: str
    cluster: str
    groups: dict[str, int]
    ranks: int
    bytes: int
    origins: dict[str, int]
    bound_alpha_s: float
    bound_beta_s: float
    bottleneck: str
    why: str
    algorithm: str = ""
    reason: str = ""
    channels: int = 0
    time_s: float | None = None
    interval: tuple[float, float] | None = None
    utilisation: dict[str, float] = dataclasses.field(default_factory=dict)
    wait_s: float = 0.0
    ranks_simulated: int = 0
    steps: int = 0
    notes: tuple[str, ...] = ()
    timeline: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        lines = [f"{self.op} of {self.bytes} bytes per rank among {self.ranks} ranks on {self.cluster}"]
        lines += ["groups      " + ", ".join(f"{name} {size}" for name, size in self.groups.items())]
        if self.time_s is not None and self.interval is not None:
            low, high = self.interval
            lines += [
                f"time        {time_text(self.time_s)}, interval {time_text(low)} to {time_text(high)}",
                f"algorithm   {self.algorithm}, {self.channels} channel(s): {self.reason}",
            ]
        whose = "of this plan" if self.time_s is not None else "of any algorithm"
        lines += [
            f"bounds {whose}: {time_text(self.bound_alpha_s)} without bytes, "
            f"{time_text(self.bound_beta_s)} for the bytes" + (f" on {self.bottleneck}" if self.bottleneck else ""),
            f"limited by  {self.why}",
        ]
        lines += [f"assumed     {note}" for note in self.notes]
        lines += [f"  {name:24} busy {share:6.1%}" for name, share in list(self.utilisation.items())[:4]]
        counts = ", ".join(f"{count} {origin}" for origin, count in self.origins.items())
        lines.append(
            f"parameters  This prediction rests on no measurement of jaxcomm ({counts}). The interval is a guess."
        )
        return "\n".join(lines)


def time_text(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def _limits(time_s: float, alpha_s: float, beta_s: float, bottleneck: str) -> dict[str, Any]:
    """The fields of both bounds, and the reason of the time that follows from them."""
    why = "neither alone"
    if beta_s >= _REASON * time_s and beta_s >= alpha_s:
        why = bottleneck
    elif alpha_s >= _REASON * time_s:
        why = "latency and overhead of dependent steps"
    name = bottleneck or "no link"
    why += f": bytes on {name} {beta_s / time_s:.0%} of the time, dependent steps {alpha_s / time_s:.0%}"
    return {"bound_alpha_s": alpha_s, "bound_beta_s": beta_s, "bottleneck": bottleneck, "why": why}


def resolve(
    op: str,
    x: Any,
    n: int,
    cluster: Cluster,
    *,
    algorithm: str | None = None,
    source: int = 0,
    perm: Sequence[tuple[int, int]] | None = None,
    max_sms: int | None = None,
    symmetric_buffers: bool = False,
) -> tuple[Any, Any, int]:
    """The Resolution of a call on the cluster, the engine's cluster with as many channels, and bytes of the operand."""
    row = _request.ROWS[_request.native_name(op)]
    inner = min(cluster.levels[0].ranks, n)
    call = attributes, dtype, counts = _request.call_of(
        op, x, n, source=source, perm=perm, algorithm=algorithm, max_sms=max_sms, ranks_per_node=inner
    )
    operand, result = (count * (0 if row.input == "none" else np.dtype(x.dtype).itemsize) for count in counts)
    if (largest := max(operand, result)) > cluster.memory_bytes:
        what = "result has" if result > operand else "operand has"
        raise ValueError(
            f"{op}: the {what} {largest / 1e9:,.4g} GB per rank, but a device of {cluster.name} has "
            f"{cluster.memory_bytes / 1e9:,.4g} GB (device.memory)"
        )
    most = min(max_sms or cluster.channels, cluster.channels)
    native = cluster.native(plan.num_channels(row.name, attributes, dtype, *counts, most))
    machine = sim.machine_of(native, n)
    if cluster.ll is not None:
        machine.ll = machine.ll_two_shot = cluster.ll
    able = plan.Capabilities(
        "cuda",
        setting="plans",
        tested_between_nodes=True,
        in_place=symmetric_buffers,
        max_channels=cluster.channels,
        machine=machine,
    )
    placement = plan.Placement(ranks_per_node=inner, found=algorithm is not None, gin=True)
    found = _request.planned(op, row.name, call, placement, able)
    if not found.ll:
        native = cluster.native(found.num_channels)
    native.arena = not symmetric_buffers
    return found, native, operand


def _of_boxes(call: Any, cluster: Cluster, algorithm: str | None) -> tuple[Any, Any, int]:
    """As resolve(), of a reshard. The plan is that of CPUs, with the links of the cluster."""
    attributes, dtype, counts = call
    n, inner = attributes["group_size"], min(cluster.levels[0].ranks, attributes["group_size"])
    native = cluster.native(cluster.channels)
    native.arena = False
    scope = "node" if inner == n else "network"
    request = plan.reshard_request(scope, n, inner, attributes["sources"], attributes["destinations"])
    item_bytes = np.dtype(dtype).itemsize
    found = plan.select(request, algorithm or "", item_bytes, sim.machine_of(native, n))
    return found, native, counts[0] * item_bytes


def _surviving(
    op: str, x: Any, n: int, sizes: tuple[int, ...], cluster: Cluster, source: int, perm: Any
) -> tuple[Any, int, tuple[int, ...], Cluster, int]:
    """Operand, ranks, cluster and source without the ranks that are lost."""
    for fault in cluster.faults:
        if fault.slow == 0 and fault.index >= n:
            raise ValueError(f"{op}: {cluster.name}: fault {fault}: the index must be below {n}")
    try:
        left, broken = faults.survive(cluster.faults, n, cluster.levels[0].ranks)
    except ValueError as error:
        raise ValueError(f"{op}: {cluster.name}: {error}") from None
    if left == n:
        return x, n, sizes, dataclasses.replace(cluster, faults=broken), source
    if perm is not None:
        raise ValueError(f"{op}: perm names ranks of a group of {n}, of which {n - left} are lost")
    if op == "pbroadcast":
        losses = [fault for fault in cluster.faults if fault.slow == 0]
        _, numbered = faults.survive((*losses, faults.Fault(index=source)), n, cluster.levels[0].ranks)
        if not numbered:
            raise ValueError(f"{op}: {cluster.name}: source {source} is lost")
        source = numbered[0].index
    if _request.splits_operand(op):
        x = jax.ShapeDtypeStruct((-(-math.prod(x.shape) // left) * left,), x.dtype)
    return x, left, (left,), dataclasses.replace(cluster, faults=broken), source


def _weakest(machine: Any, cluster: Cluster) -> Any:
    """The machine of the rank with the weakest links: LL messages of all ranks wait for it."""
    share = min([f.capacity for f in cluster.faults if f.level == cluster.levels[0].name and not f.planes], default=1.0)
    slow = max([f.slow for f in cluster.faults if not f.level], default=1.0)
    for name in ("ll", "ll_two_shot"):
        if (row := getattr(machine, name)) is not None:
            overhead_s, rate, latency_s = row
            setattr(machine, name, (overhead_s * slow, rate * min(share, 1 / slow), latency_s))
    return machine


def collective(
    op: str,
    x: Any,
    axis_sizes: int | Sequence[int] | None,
    *,
    cluster: Cluster,
    algorithm: str | None = None,
    source: int = 0,
    perm: Sequence[tuple[int, int]] | None = None,
    shardings: tuple[Any, Any] | None = None,
    max_sms: int | None = None,
    fidelity: str = "folded",
    max_steps: int | None = None,
    max_entries: int = 0,
    symmetric_buffers: bool = False,
) -> Simulated:
    """Predicts the time of a collective on a cluster, from the plan that jaxcomm would execute there.

    Ranks are numbered along the levels of the cluster: the first level holds consecutive ranks.

    Args:
      op: public name, such as "psum".
      x: operand of one rank: an array or a jax.ShapeDtypeStruct. Ignored for "barrier". The global array of "reshard".
      axis_sizes: size of the named axis, or of each axis of the tuple. Only the product matters.
      cluster: the cluster; its first level takes the place of a node.
      algorithm: as in the op, except "xla" and "xla_hierarchical". None means that of lowest cost in the cost model.
      source: rank that broadcasts (pbroadcast).
      perm: as in ppermute; None means a shift by one.
      shardings: old and new sharding of "reshard" and "reshard_in", as in ``jaxcomm.explain``. All ranks are simulated,
        by the plan that CPUs run; on GPUs, XLA's own transfers run these ops.
      max_sms: most thread blocks of the call; by default those of the cluster.
      fidelity: "folded" simulates one rank of those with equal role; "full" simulates all ranks; "bounds" gives lower
        bounds for every algorithm, in closed form.
      max_steps: if more steps would have to be simulated, the time is the larger of that of the cost model, in which
        transfers do not share links, and of the lower bound of the bytes. By default, more than 10^8 are an error.
      max_entries: most entries of the timeline.
      symmetric_buffers: on GPUs, whether peers access operands and results where XLA has them, as in
        ``jaxcomm.explain``. Otherwise, data passes through an arena.

    Raises:
      ValueError: unknown op, algorithm or fidelity, sizes that the cluster does not have, or too many ranks of
        different roles.
    """
    moved = _reshard.call_of(op, x, axis_sizes, shardings) if op == "reshard" or op in _request.OF_BOXES else None
    if not moved:
        _request.native_name(op)
    if fidelity not in FIDELITIES:
        raise ValueError(f"{op}: fidelity must be one of {', '.join(FIDELITIES)}, got {fidelity!r}")
    if algorithm in ("xla", "xla_hierarchical"):
        raise ValueError(f"{op}: algorithm {algorithm!r} has no plan; pass another algorithm or None")
    if moved:
        _check.algorithm(op, "reshard", algorithm)
        if fidelity == "bounds" or any(fault.slow == 0 for fault in cluster.faults):
            raise ValueError(f"{op}: fidelity 'bounds' and lost ranks are not for shardings")
        fidelity = "full"
    sizes = _request.sizes_of(op, moved[0]["group_size"] if moved else axis_sizes)
    n = math.prod(sizes)
    notes = [str(fault) for fault in cluster.faults if fault.slow == 0]
    x, n, sizes, cluster, source = _surviving(op, x, n, sizes, cluster, source, perm)
    cluster = cluster.spread(n)
    names = [level.name for level in cluster.levels]
    for fault in cluster.faults:
        if fault.level and fault.level not in names:
            raise ValueError(f"{op}: {cluster.name}: fault {fault}: {n} ranks use the levels {', '.join(names)} only")
        notes.append(str(fault))
    groups.check_faults(cluster)
    if moved:
        choice, native, operand = _of_boxes(moved, cluster, algorithm)
    else:
        choice, native, operand = resolve(
            op,
            x,
            n,
            cluster,
            algorithm=algorithm,
            source=source,
            perm=perm,
            max_sms=max_sms,
            symmetric_buffers=symmetric_buffers,
        )
    kinds = [origin.split(":")[0] for origin in cluster.origins.values()]
    common: dict[str, Any] = {
        "op": op,
        "cluster": cluster.name,
        "groups": {level.name: min(level.ranks, n) for level in cluster.levels},
        "ranks": n,
        "bytes": operand,
        "origins": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
    }
    if fidelity == "bounds":
        bounds = sim.bounds(choice.call_request, choice.item_bytes, native)
        larger = max(bounds.alpha_s, bounds.beta_s) or 1.0
        limits = _limits(larger, bounds.alpha_s, bounds.beta_s, bounds.bottleneck)
        return Simulated(**common, **limits, notes=tuple(notes))
    channels = max(choice.num_channels, 1)
    for level in cluster.levels[2:]:
        if level.paths:
            busiest = ecmp.load(level.sharing * channels, level.paths)
            notes.append(
                f"hash collisions on {level.name}: the busiest of {level.paths} links has {busiest:.2f} times the mean"
            )
    common |= {"algorithm": choice.algorithm, "reason": choice.reason, "channels": channels, "notes": tuple(notes)}

    def result(time_s: float, limits: dict[str, Any], **more: Any) -> Simulated:
        return Simulated(**common, time_s=time_s, interval=(time_s / _GUESS, time_s * _GUESS), **limits, **more)

    if choice.ll:  # a closed form: no link is shared
        machine = _weakest(choice.machine, cluster)
        cost = choice.call_cost(machine)
        time_s = cost.time_s
        _, ll_rate, _ = machine.ll or machine.ll_two_shot
        beta_s = cost.node.bytes / 2 / ll_rate  # without flags
        link = f"{cluster.levels[0].name} out (LL)"
        limits = _limits(time_s, max(time_s - beta_s - cluster.launch_s, 0.0), beta_s, link)
        return result(time_s, limits, utilisation={link: beta_s / time_s}, ranks_simulated=1)
    item_bytes = choice.item_bytes * channels  # all channels at once
    try:
        limit = (_MAX_BROKEN if cluster.faults else _MAX_STEPS) if max_steps is None else max_steps
        found = sim.simulate(choice.request, choice.algorithm, item_bytes, native, fidelity, limit, max_entries)
    except ValueError as error:
        if cluster.faults and "would have to be simulated" in str(error):
            raise ValueError(
                f"{op}: {error}; the faults leave few ranks of equal role, so simulate fewer ranks"
            ) from None
        if max_steps is None or "would have to be simulated" not in str(error):
            raise
        least = sim.bounds(choice.request, item_bytes, native)
        time_s = max(choice.cost.time_s, least.beta_s, least.alpha_s)
        limits = _limits(time_s, max(time_s - least.beta_s, 0.0), least.beta_s, least.bottleneck)
        why = "cost model, in which transfers do not share links: " + limits["why"]
        return result(time_s, limits | {"bound_alpha_s": least.alpha_s, "why": why})
    bounds = found.bounds
    time_s = found.time_s
    return result(
        time_s,
        _limits(time_s, bounds.alpha_s, bounds.beta_s, bounds.bottleneck),
        utilisation={load.name: load.bytes / load.capacity / time_s for load in found.links if load.bytes > 0},
        wait_s=found.wait_s,
        ranks_simulated=found.ranks_simulated,
        steps=found.num_ops,
        timeline=tuple(found.timeline),
    )
