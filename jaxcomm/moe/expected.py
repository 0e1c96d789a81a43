"""Rows that a mixture of experts moves: expected for even routing, and in the worst case."""

import dataclasses
import math


def groups_of_token(groups: int, num_experts: int, choices: int) -> float:
    """The mean number of groups with an expert of a token that draws `choices` different experts at random.

    Args:
      groups: equal groups that the experts are divided among.
      num_experts: E.
      choices: K.
    """
    others = num_experts - num_experts // groups
    return groups * (1 - math.comb(others, choices) / math.comb(num_experts, choices))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of one rank. On GPUs of one node, dispatch() moves the row of a token once to each rank that needs it.

    Attributes:
      choices: rows of all choices of the rank's tokens, and the expected number of slots that a rank fills.
      sent: expected number of them for other ranks. As many come back in combine() on one node.
      tokens_sent: expected number of rows for other ranks, once per token and rank: those of dispatch() on one node.
      most_received: slots that it fills in the worst case; the default capacity without `align`.
      between_nodes: expected number for other nodes, once per token and node; 0 for one node. As many sums come back in
        combine() with ``reduce="node"``.
    """

    choices: int
    sent: float
    tokens_sent: float
    most_received: int
    between_nodes: float = 0.0

    def __str__(self) -> str:
        return (
            f"rows      {self._in_dispatch()}; {self._in_combine()}; slots for {self.choices}, "
            f"worst case {self.most_received}; assumes that tokens choose experts evenly"
        )

    def _in_dispatch(self) -> str:
        if self.between_nodes:
            return (
                f"{self.between_nodes:.0f} to other nodes in dispatch, once per token and node; {self.choices} inside "
                "nodes"
            )
        return f"{self.tokens_sent:.0f} to other ranks in dispatch, once per token and rank"

    def _in_combine(self) -> str:
        if self.between_nodes:
            return f"{self.between_nodes:.0f} sums back in combine, one per token and node"
        return f"{self.sent:.0f} of {self.choices} choices back in combine"


def rows_of(tokens: int, choices: int, num_experts: int, num_ranks: int, num_nodes: int = 1) -> Rows:
    """The rows of a rank.

    Args:
      tokens: T, of each rank.
      choices: K, different experts of a token.
      num_experts: E, a multiple of num_ranks.
      num_ranks: n.
      num_nodes: G.
    """
    local = num_experts // num_ranks
    other = (num_ranks - 1) / num_ranks
    return Rows(
        choices=tokens * choices,
        sent=tokens * choices * other,
        tokens_sent=tokens * groups_of_token(num_ranks, num_experts, choices) * other,
        most_received=num_ranks * tokens * min(choices, local),
        between_nodes=tokens * groups_of_token(num_nodes, num_experts, choices) * (num_nodes - 1) / num_nodes,
    )
