"""explain(): the plan that a collective selects, the reason, and its predicted cost."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxcomm import _check, _cost_params, _lowering, _request, _reshard, _selftest_record
from jaxcomm._config import config
from jaxcomm._core import plan
from jaxcomm._topology import Link, links_of
from jaxcomm.matmul.loops import ALGORITHMS as MATMUL
from jaxcomm.moe.expected import Rows, groups_of_token, rows_of

_GPUS_PER_HOST = 8  # of DGX and HGX machines
# Public name -> native name. `reshard` runs outside of jit.
_NATIVE = _request.FUNCTIONS | {"reshard": "reshard"}
_ONE_EXCHANGE = "moe.route_and_dispatch"
_PARTS = {"all_gather_matmul": ("all_gather", "rows"), "matmul_psum_scatter": ("psum_scatter", "scatter")}


def algorithms(op: str) -> tuple[str, ...]:
    """Names that the keyword ``algorithm`` of an op accepts, in order of preference; "xla" is accepted too.

    Those of all_gather_matmul and matmul_psum_scatter are "unfused" and "ring".

    Not every algorithm supports every group. Recursive halving requires a power of two of ranks, and a hierarchical
    plan requires several nodes of several ranks.

    Args:
      op: public name, such as "all_to_all" or "psum".

    Raises:
      ValueError: unknown op.
    """
    if op in _PARTS:
        return MATMUL
    return tuple(name for name, _ in plan.algorithms(_native_name(op)))


def _native_name(op: str) -> str:
    if op not in _NATIVE:
        raise ValueError(f"op must be one of {', '.join([*_NATIVE, *_PARTS, _ONE_EXCHANGE])}, got {op!r}")
    return _NATIVE[op]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One choice of the selection table. ``str()`` gives a readable summary, ``steps_text`` the plan.

    Attributes:
      op: public name.
      algorithm: name of the selected plan.
      reason: reason for the selection.
      source: publication of the algorithm.
      num_nodes, ranks_per_node: shape of the group in the planner.
      input_bytes, output_bytes: sizes of the buffers of one rank.
      steps: steps of the slowest rank; on a GPU, of each of its thread blocks.
      scratch_bytes: scratch memory of each rank.
      messages, bytes, signals: numbers that the slowest rank initiates, by link class ("self", "node", "network"). On
        GPUs, "node" is NVLink. LL messages count twice the bytes of their data.
      predicted_time_s: prediction of the cost model (docs/internals/cost-model.md).
      platform: "cpu" or "cuda".
      protocol: "steps"; or on GPUs "ll" or "ll_two_shot", for one or two exchanges of LL messages.
      sms: multiprocessors of a GPU that the call occupies, with one thread block each; 0 on CPUs.
      links: link parameters of the prediction.
      launch_s: cost parameter, the time to start a call.
      sync_overhead_s: cost parameter, the time of the synchronization of all ranks before and after a plan.
      rows: of "moe.dispatch" and "moe.combine", expected and in the worst case.
      assumed: assumption about the nodes of GPUs, where neither the axes nor an argument say it; otherwise empty.
      default: on GPUs, what runs the call in a program without ``algorithm=`` (docs/guide/gpus.md), and the reason.
      lost: on GPUs, what XLA does with its own collective and not with this plan.
    """

    op: str
    algorithm: str
    reason: str
    source: str
    num_nodes: int
    ranks_per_node: int
    input_bytes: int
    output_bytes: int
    steps: int
    scratch_bytes: int
    messages: dict[str, int]
    bytes: dict[str, int]
    signals: dict[str, int]
    predicted_time_s: float
    platform: str
    protocol: str
    sms: int
    links: tuple[Link, ...]
    launch_s: float
    sync_overhead_s: float
    _request: Any = dataclasses.field(repr=False, compare=False)
    _plan: str = dataclasses.field(repr=False)
    rows: Rows | None = None
    assumed: str = ""
    default: str = ""
    lost: str = ""

    def steps_text(self, rank: int = 0) -> str:
        """The plan of one rank, one step per line, or that of one transfer of collective matmul.

        Offsets and counts are in elements.
        """
        return str(plan.build(self._request, self._plan)[rank])

    def __str__(self) -> str:
        links = [
            f"  {name:8} {self.messages[name]:6} messages {self.bytes[name]:14} bytes {self.signals[name]:6} signals"
            for name in self.messages
        ]
        return "\n".join(
            [
                f"{self.op} over {self.num_nodes} node(s) of {self.ranks_per_node} rank(s): "
                f"{self.input_bytes} -> {self.output_bytes} bytes per rank",
                *([f"assumed   {self.assumed}"] if self.assumed else []),
                f"algorithm {self.algorithm} ({self.source})",
                f"reason    {self.reason}",
                *([str(self.rows)] if self.rows else []),
                f"steps     {self.steps}, scratch {self.scratch_bytes} bytes",
                *links,
                f"predicted {self.predicted_time_s * 1e6:.1f} us",
                *(self._on_gpus() if self.platform == "cuda" else []),
            ]
        )

    def _on_gpus(self) -> list[str]:
        return [
            f"default   {self.default}",
            *([f"lost      {self.lost}"] if self.lost else []),
            f"on GPUs   {'steps of the plan' if self.protocol == 'steps' else 'LL messages'}, {self.sms} SM(s)",
            f"  launch {self.launch_s * 1e6:.3f} us, synchronization {self.sync_overhead_s * 1e6:.3f} us",
            *(f"  {link}" for link in self.links),
            "  Parameters are not measured with jaxcomm: published values, limits, estimates "
            "(docs/internals/cost-model.md), or arguments.",
        ]


def _nodes_of_gpus(op: str, sizes: tuple[int, ...]) -> tuple[int, str]:
    """Ranks per node of GPUs that are not at hand, and the assumption behind the number.

    The common layout is a host of 8 GPUs that NVLink connects. Several axes declare nodes themselves.
    """
    declared, n = _lowering.ranks_per_node(sizes, None), math.prod(sizes)
    if declared < n or n <= _GPUS_PER_HOST:
        return declared, ""
    if n % _GPUS_PER_HOST:
        raise ValueError(f"{op}: {n} ranks cannot be split into hosts of {_GPUS_PER_HOST}: pass ranks_per_node")
    return _GPUS_PER_HOST, f"hosts of {_GPUS_PER_HOST} GPUs; for other NVLink domains, pass ranks_per_node"


def _passed_between_nodes() -> bool | None:
    """What the self-test has recorded of experts on several hosts with this machine's GPUs; None without GPUs.

    Outside of a program on several hosts, the key differs from the recorded one in the number of hosts.
    """
    own = _selftest_record.key()
    if own is None or own["hosts"] == "several":
        return None if own is None else _selftest_record.passed_between_nodes("dispatch")
    return _selftest_record.put_between_nodes(_selftest_record.rows_of({**own, "hosts": "several"})[0], "dispatch")


def _rows(op: str, x: Any, n: int, num_nodes: int, num_experts: int | None, choices: int | None) -> tuple[Rows, float]:
    """The rows of a rank, and those of a token that the op moves inside nodes."""
    if num_experts is None or choices is None:
        raise ValueError(f"{op}: pass num_experts and choices")
    if num_experts < 1 or num_experts % n or not 1 <= choices <= num_experts:
        raise ValueError(f"{op}: {num_experts} experts and {choices} choices do not fit {n} ranks")
    # On one node, dispatch moves a row once per rank that needs it. All others move one per choice.
    moved = groups_of_token(n, num_experts, choices) if op == "moe.dispatch" and num_nodes == 1 else choices
    return rows_of(x.shape[0], choices, num_experts, n, num_nodes), moved


def _explain_matmul(
    op: str, x: Any, axis_sizes: int | Sequence[int] | None, algorithm: str | None, **options: Any
) -> Explanation:
    """The transfers of a collective matmul. `options` are those of explain()."""
    collective, product = _PARTS[op]
    if algorithm not in (None, *MATMUL):
        raise ValueError(f"{op}: unknown algorithm {algorithm!r}; pass one of {', '.join(MATMUL)}")
    unfused = dataclasses.replace(explain(collective, x, axis_sizes, **options), op=op)
    n = unfused.num_nodes * unfused.ranks_per_node
    if algorithm is None:
        placement = plan.Placement(options["scope"] or "process", unfused.ranks_per_node)
        able = plan.Capabilities(unfused.platform)
        algorithm, reason = plan.resolve_collective_matmul(product, unfused.input_bytes, placement, able), "default"
    else:
        reason = "asked for"
    if algorithm == "unfused":
        reason += f"; {collective} by {unfused.algorithm}: {unfused.reason}"
        return dataclasses.replace(unfused, algorithm=algorithm, reason=reason)
    block = x if collective == "all_gather" else jax.ShapeDtypeStruct((math.prod(x.shape) // n,), x.dtype)
    step = explain("ppermute", block, axis_sizes, **options)  # to the next rank
    return dataclasses.replace(
        step,
        op=op,
        algorithm=algorithm,
        reason=f"{reason}; {n - 1} ppermute, one after the other",
        input_bytes=unfused.input_bytes,
        output_bytes=unfused.output_bytes,
        steps=(n - 1) * step.steps,
        messages={link: (n - 1) * count for link, count in step.messages.items()},
        bytes={link: (n - 1) * count for link, count in step.bytes.items()},
        signals={link: (n - 1) * count for link, count in step.signals.items()},
        predicted_time_s=(n - 1) * step.predicted_time_s,
    )


def _explain_one_exchange(op: str, x: Any, axis_sizes: int | Sequence[int] | None, **options: Any) -> Explanation:
    """The dispatch, and by default whether one exchange replaces it and route(). `options` are those of explain()."""
    found = dataclasses.replace(explain("moe.dispatch", x, axis_sizes, **options), op=op)
    tokens, num_ranks = x.shape[0], found.num_nodes * found.ranks_per_node
    one, reason = plan.resolve_route_and_dispatch(
        num_ranks,
        tokens,
        options["choices"],
        options["num_experts"],
        found.input_bytes // max(tokens, 1),
        False,
        options["max_sms"] or 0,
        plan.Placement(ranks_per_node=found.ranks_per_node, found=False),
        _lowering.capabilities("cuda", None),
    )
    default = f"one_shot: {reason}" if one else f"route and dispatch: {reason}; dispatch by {found.default}"
    return dataclasses.replace(found, default=default)


def _replace(op: str, machine: Any, links: Sequence[Link]) -> None:
    """Sets the links of the machine that the caller has passed."""
    rows = {link.name: (link.overhead_s, link.bytes_per_s, link.latency_s) for link in links_of(machine)}
    for link in links:
        if link.name not in rows:
            raise ValueError(f"{op}: names of links must be among {', '.join(rows)}, got {link.name!r}")
        if link.overhead_s < 0 or link.latency_s < 0 or not link.bytes_per_s > 0:
            raise ValueError(f"{op}: links must have times of at least 0 and a bandwidth above 0, got {link!r}")
        rows[link.name] = (link.overhead_s, link.bytes_per_s, link.latency_s)
    if (ll := rows.pop("ll", None)) is not None:
        machine.ll = machine.ll_two_shot = ll
    machine.links = [(name, *row) for name, row in rows.items()]


def explain(
    op: str,
    x: Any,
    axis_sizes: int | Sequence[int] | None = None,
    *,
    algorithm: str | None = None,
    source: int = 0,
    perm: Sequence[tuple[int, int]] | None = None,
    shardings: tuple[Any, Any] | None = None,
    scope: str | None = None,
    ranks_per_node: int | None = None,
    platform: str = "cpu",
    max_sms: int | None = None,
    gin: bool = True,
    symmetric_buffers: bool = False,
    links: Sequence[Link] = (),
    num_experts: int | None = None,
    choices: int | None = None,
) -> Explanation:
    """Describes the plan that an op selects: the reason for the selection and the predicted cost.

    On CPUs, a program selects the same plan for the same arguments. On GPUs, this is the plan that the record of the
    self-test names, or else the one that jaxcomm's kernels would run; `Explanation.default` says what a program runs.
    `links` change only the prediction. `algorithm` selects another plan.

    Args:
      op: public name, such as "all_to_all", "psum" or "psum_start".
      x: operand of one rank: an array or a jax.ShapeDtypeStruct. Ignored for "barrier". "ragged_all_to_all" is
        predicted for a rank that sends all rows, and the same number of them to every rank; on GPUs, for those of one
        node, and without the `all_gather` of the table before it. "moe.dispatch" and "moe.combine" are predicted for
        GPUs of one node, or of several nodes with GIN, and an even load; x has a row per token. Between nodes, None
        means "hierarchical" if the self-test has passed there with this machine's GPUs and the kernels take these
        sizes; "moe.combine" is predicted for weighted sums by node. "moe.route_and_dispatch" is predicted as its
        dispatch; `Explanation.default` says whether one exchange replaces it. Of "all_gather_matmul" and
        "matmul_psum_scatter", the transfers are predicted; x is what they send, the rows or the product. Of "reshard"
        and "reshard_in", x is the global array. XLA's collectives run them on GPUs; the prediction is then that of the
        plan.
      axis_sizes: size of the named axis, or of each axis of the tuple, outermost first.
      algorithm: as in the op, except "xla" and "xla_hierarchical".
      source: rank that broadcasts (pbroadcast).
      perm: as in ppermute; None means a shift by one.
      shardings: old and new sharding of "reshard" and "reshard_in": each a jax.sharding.Sharding, whose devices are the
        ranks, or a RankSharding.
      scope: where CPU devices are: in one "process" (the default), in several processes of one "node", or on several
        nodes of a "network".
      ranks_per_node: ranks of a node. By default, the innermost of several axes is a node. On GPUs, a node is an NVLink
        domain; a single axis of more than 8 GPUs is split into hosts of 8.
      platform: "cpu", or "cuda" for NVIDIA GPUs. The machine needs no GPU.
      max_sms: as in the op.
      gin: on GPUs of several nodes, whether NCCL has GIN. With GIN, kernels put over the network. Without it, no plan
        runs between nodes.
      symmetric_buffers: on GPUs, whether peers access operands and results where XLA has them
        (``JAXCOMM_SYMMETRIC_BUFFERS=1``). Otherwise, data passes through an arena, as that of "ragged_all_to_all"
        always does.
      links: link parameters that replace those of the same name in `Explanation.links`.
      num_experts, choices: of the ops of moe: E, and the experts of a token.

    Returns:
      An Explanation; print it, or read its attributes.

    Raises:
      ValueError: unknown op, algorithm, scope, platform or link, or invalid sizes.
      TypeError: x has no shape, or axis_sizes are no integers.
      RuntimeError: the program has several processes, and the coordination service does not answer.
    """
    options: dict[str, Any] = {
        "algorithm": algorithm, "scope": scope, "ranks_per_node": ranks_per_node, "platform": platform,
        "max_sms": max_sms, "gin": gin, "symmetric_buffers": symmetric_buffers, "links": links,
    }  # fmt: skip
    if op in _PARTS:
        return _explain_matmul(op, x, axis_sizes, **options)
    if op == _ONE_EXCHANGE:
        return _explain_one_exchange(op, x, axis_sizes, num_experts=num_experts, choices=choices, **options)
    native = _native_name(op)
    of_boxes = native == "reshard"
    _check.algorithm(op, native, algorithm)
    if platform not in ("cpu", "cuda"):
        raise ValueError(f"{op}: platform must be 'cpu' or 'cuda', got {platform!r}")
    on_gpus = platform == "cuda"
    if on_gpus and scope is not None:
        raise ValueError(f"{op}: scope is for CPU devices only, got {scope!r}; for GPUs, pass ranks_per_node")
    if op in _request.MOE and not on_gpus:
        raise ValueError(f"{op} is explained for GPUs only: pass platform='cuda'")
    moved = _reshard.call_of(op, x, axis_sizes, shardings) if of_boxes else None
    sizes = _request.sizes_of(op, moved[0]["group_size"] if moved else axis_sizes)
    n = math.prod(sizes)
    assumed = ""
    if ranks_per_node is None and on_gpus:
        ranks_per_node, assumed = _nodes_of_gpus(op, sizes)
    ranks_per_node = ranks_per_node or _lowering.ranks_per_node(sizes, None)
    if n % ranks_per_node:
        raise ValueError(f"{op}: {n} ranks cannot be split into nodes of {ranks_per_node}")
    call = moved or _request.call_of(op, x, n, source=source, perm=perm)
    attributes, dtype, counts = call
    attributes |= {
        "algorithm": algorithm or "",
        "ranks_per_node": ranks_per_node,
        "max_sms": _check.max_sms(op, max_sms) or 0,
    }
    of_lists: dict[str, int] = {}
    rows: Rows | None = None
    if op in _request.MOE:
        rows, rows_of_token = _rows(op, x, n, n // ranks_per_node, num_experts, choices)
        attributes |= {"choices": choices, "num_experts": num_experts, "weighted": 1}
        bytes_of_rank = counts[0] * np.dtype(dtype).itemsize
        of_lists = {"choices": x.shape[0] * (choices or 0), "list_bytes": int(bytes_of_rank * rows_of_token) // n}
    if on_gpus:
        machine = plan.gpu_machine()
        known = _passed_between_nodes() if op in _request.MOE else True
        passed = known is not False
        # Without a name, what runs is decided before NCCL has found the nodes and GIN.
        found = algorithm is not None or (not gin and _request.ROWS[native].elements == "array")
        placement = plan.Placement(ranks_per_node=ranks_per_node, found=found, gin=gin)
        able = plan.Capabilities(
            platform,
            setting="plans",
            tested_between_nodes=gin and passed,
            multimem=True,
            in_place=symmetric_buffers,
            max_channels=config().max_sms,
        )
    else:
        _cost_params.load()
        machine = plan.machine_of(scope or "process", n, ranks_per_node)
        placement = plan.Placement(scope or "process", ranks_per_node)
        able = plan.Capabilities(platform, machine=machine)
    default = recorded = ""
    if on_gpus:
        own = _lowering.capabilities(platform, None, tested_between_nodes=bool(known))
        before_run = plan.Placement(ranks_per_node=ranks_per_node, found=False)
        chosen = plan.resolve(native, attributes | {"algorithm": ""}, dtype, *counts, before_run, own, **of_lists)
        default = f"{chosen.algorithm}: {chosen.reason}"
        if chosen.backend in ("plan", "rows") and _lowering.by_record(platform, algorithm):
            attributes["algorithm"], recorded = chosen.algorithm, chosen.reason
    if of_boxes and on_gpus:
        resolution = plan.resolve(native, attributes, dtype, *counts, placement, able)
        runs, machine.arena = resolution.algorithm, False
        how = "jax.lax.ppermute moves the bytes of the plan"
        if op == "reshard":
            how = f"jax.device_put moves them, but {how} if old and new devices differ and several processes have them"
        reason = f"{resolution.reason}; {how}"
        request = plan.reshard_request(
            "node" if ranks_per_node == n else "network",
            n,
            ranks_per_node,
            attributes["sources"],
            attributes["destinations"],
        )
        resolution = plan.select(request, "", np.dtype(dtype).itemsize, machine)
    else:
        resolution = _request.planned(op, native, call, placement, able, **of_lists)
        runs, reason = resolution.algorithm, recorded or resolution.reason
    request, sms = resolution.call_request, resolution.num_channels
    if on_gpus and known is None and algorithm is None and ranks_per_node < n:  # GPUs that are not at hand
        reason = f"assumes that {reason} of these GPUs"
    machine.arena = resolution.machine.arena
    _replace(op, machine, links)
    once = 1.0  # bytes between nodes, as a part of those that the plan has for lists without common rows
    if rows is not None and rows.between_nodes and x.size:
        row_bytes = math.prod(x.shape[1:]) * np.dtype(x.dtype).itemsize
        choices_between = rows.choices * (1 - ranks_per_node / n)
        # dispatch sends a position of 4 bytes per choice. combine sends a position and a weight per choice, and the end
        # of the list of each token. The plan of combine counts a list as many bytes as the sums, divided by the ranks
        # of the node.
        numbers, counted = choices_between * 4, choices_between
        if op == "moe.combine":
            numbers, counted = choices_between * 8 + rows.between_nodes * 4, choices_between * 2 / ranks_per_node
        once = (rows.between_nodes + numbers * sms / row_bytes) / counted
    shown = links_of(machine)
    machine.links = [
        (link.name, link.overhead_s, link.bytes_per_s / (once if link.name == "network" else 1), link.latency_s)
        for link in shown
        if link.name != "ll"
    ]
    cost = resolution.call_cost(machine if once != 1 or links else None)
    traffic_of = {"self": cost.self, "node": cost.node, "network": cost.network}
    bytes_of = {name: traffic.bytes for name, traffic in traffic_of.items()}
    bytes_of["network"] = round(bytes_of["network"] * once)
    return Explanation(
        op=op,
        algorithm=runs,
        reason=reason,
        source=dict(plan.algorithms(native))[resolution.algorithm],
        num_nodes=request.num_nodes,
        ranks_per_node=ranks_per_node,
        input_bytes=request.input_count * resolution.item_bytes,
        output_bytes=request.output_count * resolution.item_bytes,
        steps=cost.steps,
        scratch_bytes=cost.scratch_bytes,
        messages={name: traffic.messages for name, traffic in traffic_of.items()},
        bytes=bytes_of,
        signals={name: traffic.signals for name, traffic in traffic_of.items()},
        predicted_time_s=cost.time_s,
        platform=platform,
        protocol=resolution.protocol if resolution.ll else "steps",
        sms=sms,
        links=shown,
        launch_s=machine.launch_s,
        sync_overhead_s=machine.sync_overhead_s,
        _request=resolution.request,
        _plan=resolution.algorithm,
        rows=rows,
        assumed=assumed,
        default=default,
        lost=resolution.lost,
    )
