"""What runs dispatch, combine and route_and_dispatch: the questions to the planner."""

import math
from typing import Any

from jaxcomm import _lowering
from jaxcomm._core import plan


def choose(
    site: Any, collective: str, shape: tuple[int, int], rows: tuple[int, int], width: int, dtype: Any, **attributes: int
) -> plan.Resolution:
    """The Resolution of a dispatch or combine that is being lowered.

    Args:
      site: the Site; its call is a RouteCall.
      collective: "dispatch" or "combine".
      shape: (T, K).
      rows: numbers of rows of operand and result.
      width: elements of a row.
      dtype: element type of the rows.
      attributes: further attributes of the custom call.

    Raises:
      NotImplementedError: no code can move the rows, or detect an overflow that must raise.
    """
    given = {"row_count": width, "choices": shape[1], "num_experts": site.call.num_experts, **attributes}
    sizes = (rows[0] * width, rows[1] * width)
    found = site.resolve(collective, given, dtype, sizes, choices=math.prod(shape))
    if found.backend == "xla" and site.call.raises:
        refuse_unchecked(site.call, found.reason)
    return found


def refuse_unchecked(call: Any, reason: str) -> None:
    """Raises for a call whose overflow nothing would detect. `reason`: why XLA's own collectives run it."""
    raise NotImplementedError(
        f"{call.op} at {call.site}: on_overflow='raise' works on CPUs, and on GPUs with jaxcomm's own dispatch and "
        f"combine, but XLA's own collectives run here ({reason}); pass on_overflow='drop' and look at Routing.dropped"
    )


def assigns_by_custom_calls(platform: str) -> bool:
    """Whether row_assignment.py lowers to custom calls. An algorithm does not concern work of one rank."""
    return platform == "cpu" and not _lowering.why_xla(platform, None)


def takes_one_exchange(site: Any, tokens: int, choices: int, row_bytes: int) -> bool:
    """Whether a kernel of route_and_dispatch sends ids and rows in one exchange; else route, then dispatch.

    Args:
      site: the Site; its call is a RouteCall. If it names an algorithm, sizes do not matter that only cost more.
      tokens, choices: T and K.
      row_bytes: bytes of the row of a token.
    """
    call = site.call
    if site.platform != "cuda" or not call.capacity:
        return False
    found, _ = plan.resolve_route_and_dispatch(
        site.group_size,
        tokens,
        choices,
        call.num_experts,
        row_bytes,
        bool(call.algorithm),
        call.max_sms or 0,
        site.placement,
        _lowering.capabilities(site.platform, call.algorithm),
    )
    return bool(found)
