"""Mixture of experts: token dispatch and combine over expert-parallel ranks.

Rank p of n holds the experts p * M to p * M + M - 1, with M = E / n. Inside jax.shard_map::

    routing = jaxcomm.moe.route(expert_ids, "expert", num_experts=64)
    rows = jaxcomm.moe.dispatch(x, routing)
    y = jaxcomm.moe.combine(ffn(rows, routing.group_sizes), routing, weights)
"""

from jaxcomm.moe.dispatch_combine import combine, dispatch
from jaxcomm.moe.quantized import dequantize, dispatch_quantized, quantize
from jaxcomm.moe.route_and_dispatch import route_and_dispatch
from jaxcomm.moe.routing import Routing, route

__all__ = [
    "Routing",
    "combine",
    "dequantize",
    "dispatch",
    "dispatch_quantized",
    "quantize",
    "route",
    "route_and_dispatch",
]
