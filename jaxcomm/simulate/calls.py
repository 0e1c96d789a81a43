"""collective(): the time of one collective on a cluster, from the same plan that jaxcomm executes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcomm import _request
from jaxcomm._core import plan, sim
from jaxcomm.simulate.cluster import Cluster

# Errors of a prediction that rests on no measurement of jaxcomm: a factor of four each way, a guess.
_GUESS = 4.0
# Share of the time from which a bound is called the reason of the time.
_REASON = 0.5
_CHANNEL_BYTES = 16 << 10  # as kMinChannelBytes of ffi/plan/select_for_gpus.cc
_LL_BYTES = 8 * (8 << 10)  # as FitsLl
_MAX_STEPS = 100_000_000
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
      band: (low, high), seconds, meant to hold 80 % of the measured times.
      bound_alpha_s: time of this plan without bytes. Of any algorithm with fidelity "bounds".
      bound_beta_s: time of the bytes on the busiest link. Of any algorithm with fidelity "bounds".
      bottleneck: that link.
      utilisation: share of the time in which the busiest link of each name is busy.
      wait_s: mean time of a rank waiting for signals.
      why: what limits the time.
      measured: whether the parameters are measured with jaxcomm on this cluster.
      origins: number of parameters of each origin.
      ranks_simulated: ranks that were simulated; each represents as many others.
      steps: number of simulated steps.
      timeline: transfers and waits (with an empty name) of the simulated ranks, as far as ``max_entries`` allows.
    """

    op: str
    cluster: str
    groups: dict[str, int]
    ranks: int
    bytes: int
    algorithm: str
    reason: str
    channels: int
    time_s: float | None
    band: tuple[float, float] | None
    bound_alpha_s: float
    bound_beta_s: float
    bottleneck: str
    utilisation: dict[str, float]
    wait_s: float
    why: str
    measured: bool
    origins: dict[str, int]
    ranks_simulated: int = 0
    steps: int = 0
    timeline: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        lines = [f"{self.op} of {self.bytes} bytes per rank among {self.ranks} ranks on {self.cluster}"]
        lines += ["groups      " + ", ".join(f"{name} {size}" for name, size in self.groups.items())]
        if self.time_s is not None and self.band is not None:
            low, high = self.band
            lines += [
                f"time        {time_text(self.time_s)}, band {time_text(low)} to {time_text(high)}",
                f"algorithm   {self.algorithm}, {self.channels} channel(s): {self.reason}",
            ]
        whose = "of this plan" if self.time_s is not None else "of any algorithm"
        lines += [
            f"bounds {whose}: {time_text(self.bound_alpha_s)} without bytes, "
            f"{time_text(self.bound_beta_s)} for the bytes" + (f" on {self.bottleneck}" if self.bottleneck else ""),
            f"limited by  {self.why}",
        ]
        lines += [f"  {name:24} busy {share:6.1%}" for name, share in list(self.utilisation.items())[:4]]
        counts = ", ".join(f"{count} {origin}" for origin, count in self.origins.items())
        if self.measured:
            lines.append(f"parameters  measured with jaxcomm on this machine ({counts})")
        else:
            lines.append(
                f"parameters  This prediction rests on no measurement of jaxcomm ({counts}). The band is a guess."
            )
        return "\n".join(lines)


def time_text(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def _why(time_s: float, alpha_s: float, beta_s: float, bottleneck: str) -> str:
    shares = (
        f"bytes on {bottleneck or 'no link'} {beta_s / time_s:.0%} of the time, dependent steps {alpha_s / time_s:.0%}"
    )
    if beta_s >= _REASON * time_s and beta_s >= alpha_s:
        return f"{bottleneck}: {shares}"
    if alpha_s >= _REASON * time_s:
        return f"latency and overhead of dependent steps: {shares}"
    return f"neither alone: {shares}"


def _planned(op: str, x: Any, sizes: tuple[int, ...], cluster: Cluster, source: int, perm: Any) -> tuple[Any, int, int]:
    """The request of whole blocks, bytes of an element, and bytes of the operand."""
    native, n = _request.native_name(op), math.prod(sizes)
    call, item_bytes = _request.blocks(op, x, n, source, perm)
    operand = 0 if op == "barrier" else math.prod(x.shape) * np.dtype(x.dtype).itemsize
    inner = min(cluster.levels[0].ranks, n)
    if cluster.scope is None:
        return plan.gpu_request(native, n, inner, **call), item_bytes, operand
    return plan.cpu_request(native, cluster.scope, n, inner, **call), item_bytes, operand


def _machine(cluster: Cluster, n: int, channels: int, block_bytes: int) -> Any:
    """The cost model of one channel."""
    machine = sim.machine_of(cluster.native(channels), n)
    machine.links = [(name, o, rate / channels, latency) for name, o, rate, latency in machine.links]
    machine.together_bytes //= channels
    if cluster.ll is not None:
        overhead_s, rate, latency_s = cluster.ll
        row = (overhead_s, rate / channels, latency_s)
        if 0 < block_bytes <= _LL_BYTES:
            machine.ll = row
        if 0 < -(-block_bytes // n) <= _LL_BYTES:
            machine.ll_two_shot = row
    return machine


def _band(cluster: Cluster, time_s: float) -> tuple[float, float]:
    if cluster.errors:
        low, high = np.quantile(np.array(cluster.errors), [0.1, 0.9])
        return time_s * min(1 + float(low), 1), time_s * max(1 + float(high), 1)
    return time_s / _GUESS, time_s * _GUESS


def collective(
    op: str,
    x: Any,
    axis_sizes: int | Sequence[int],
    *,
    cluster: Cluster,
    algorithm: str | None = None,
    source: int = 0,
    perm: Sequence[tuple[int, int]] | None = None,
    max_sms: int | None = None,
    fidelity: str = "folded",
    max_steps: int | None = None,
    max_entries: int = 0,
) -> Simulated:
    """Predicts the time of a collective on a cluster, from the plan that jaxcomm would execute there.

    Ranks are numbered along the levels of the cluster: the first level holds consecutive ranks.

    Args:
      op: public name, such as "psum".
      x: operand of one rank: an array or a jax.ShapeDtypeStruct. Ignored for "barrier".
      axis_sizes: size of the named axis, or of each axis of the tuple. Only the product matters.
      cluster: the cluster; its first level takes the place of a node.
      algorithm: as in the op, except "xla". None means that of lowest cost in the cost model.
      source: rank that broadcasts (pbroadcast).
      perm: as in ppermute; None means a shift by one.
      max_sms: most thread blocks of the call; by default those of the cluster.
      fidelity: "folded" simulates one rank of those with equal role; "full" simulates all ranks; "bounds" gives lower
        bounds for every algorithm, in closed form.
      max_steps: if more steps would have to be simulated, the time is the larger of that of the cost model, in which
        transfers do not share links, and of the lower bound of the bytes. By default, more than 10^8 are an error.

      max_entries: most entries of the timeline.

    Raises:
      ValueError: unknown op, algorithm or fidelity, sizes that the cluster does not have, or too many ranks of
        different roles.
    """
    _request.native_name(op)
    if fidelity not in FIDELITIES:
        raise ValueError(f"{op}: fidelity must be one of {', '.join(FIDELITIES)}, got {fidelity!r}")
    if algorithm == "xla":
        raise ValueError(f"{op}: algorithm 'xla' has no plan; pass another algorithm or None")
    sizes = _request.sizes_of(op, axis_sizes)
    n = math.prod(sizes)
    cluster = cluster.spread(n)
    request, item_bytes, operand = _planned(op, x, sizes, cluster, source, perm)
    kinds = [origin.split(":")[0] for origin in cluster.origins.values()]
    common: dict[str, Any] = {
        "op": op,
        "cluster": cluster.name,
        "groups": {level.name: min(level.ranks, n) for level in cluster.levels},
        "ranks": n,
        "bytes": operand,
        "measured": bool(kinds) and set(kinds) == {"measured"} and cluster.scope is not None,
        "origins": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
    }
    block_bytes = request.block_count * item_bytes
    most = min(max_sms or cluster.channels, cluster.channels)
    channels = max(1, min(block_bytes // _CHANNEL_BYTES, request.block_count, most))
    native = cluster.native(channels)
    if fidelity == "bounds":
        bounds = sim.bounds(request, item_bytes, native)
        larger = max(bounds.alpha_s, bounds.beta_s) or 1.0
        why = _why(larger, bounds.alpha_s, bounds.beta_s, bounds.bottleneck)
        return Simulated(
            **common, algorithm="", reason="", channels=channels, time_s=None, band=None, utilisation={}, wait_s=0.0,
            bound_alpha_s=bounds.alpha_s, bound_beta_s=bounds.beta_s, bottleneck=bounds.bottleneck, why=why,
        )  # fmt: skip
    request.block_count = -(-request.block_count // channels)
    machine = _machine(cluster, n, channels, block_bytes)
    choice = _request.select(op, plan.select, request, algorithm or "", item_bytes, machine)
    common |= {"algorithm": choice.algorithm, "reason": choice.reason, "channels": channels}
    if choice.ll:  # a closed form: no link is shared
        time_s = choice.cost.time_s
        node = choice.cost.node
        beta_s = node.bytes * channels / (cluster.ll or (0, 1.0, 0))[1]
        alpha_s = max(time_s - beta_s - cluster.launch_s, 0.0)
        loads = {f"{cluster.levels[0].name} out (LL)": beta_s / time_s}
        return Simulated(
            **common, time_s=time_s, band=_band(cluster, time_s), bound_alpha_s=alpha_s, bound_beta_s=beta_s,
            bottleneck=next(iter(loads)), utilisation=loads, wait_s=0.0, ranks_simulated=1,
            why=_why(time_s, alpha_s, beta_s, next(iter(loads))),
        )  # fmt: skip
    try:
        limit = _MAX_STEPS if max_steps is None else max_steps
        bytes_of_all = item_bytes * channels
        found = sim.simulate(choice.request, choice.algorithm, bytes_of_all, native, fidelity, limit, max_entries)
    except ValueError as error:
        if max_steps is None or "would have to be simulated" not in str(error):
            raise
        least = sim.bounds(request, item_bytes * channels, native)
        time_s = max(choice.cost.time_s, least.beta_s, least.alpha_s)
        why = "cost model, in which transfers do not share links: " + _why(
            time_s, max(time_s - least.beta_s, 0.0), least.beta_s, least.bottleneck
        )
        return Simulated(
            **common, time_s=time_s, band=_band(cluster, time_s), bound_alpha_s=least.alpha_s,
            bound_beta_s=least.beta_s, bottleneck=least.bottleneck, utilisation={}, wait_s=0.0, why=why,
        )  # fmt: skip
    bounds = found.bounds
    return Simulated(
        **common,
        time_s=found.time_s,
        band=_band(cluster, found.time_s),
        bound_alpha_s=bounds.alpha_s,
        bound_beta_s=bounds.beta_s,
        bottleneck=bounds.bottleneck,
        utilisation={load.name: load.bytes / load.capacity / found.time_s for load in found.links if load.bytes > 0},
        wait_s=found.wait_s,
        why=_why(found.time_s, bounds.alpha_s, bounds.beta_s, bounds.bottleneck),
        ranks_simulated=found.ranks_simulated,
        steps=found.num_ops,
        timeline=tuple(found.timeline),
    )
