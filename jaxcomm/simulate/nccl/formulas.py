"""Time of a collective from its plan: steps times latency, bytes of the busiest link over its rate.

Formulas take features and a dict of parameters (floats) and return microseconds. Rates are shares of the data sheet
where one exists, so that they carry over between systems.
n ranks, b bytes; w b bytes leave each rank in s steps; f = 2 for all_reduce, which moves its own part twice.
"""

from collections.abc import Callable, Mapping

import numpy as np

from jaxcomm.simulate.nccl import rules
from jaxcomm.simulate.nccl.features import Features

Parameters = Mapping[str, float]


def ring_terms(q: Features) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps s, share of the bytes on each link w, factor of the own part f."""
    f = np.where(q.op == "all_reduce", 2.0, 1.0)
    return f * (q.ranks - 1), f * (q.ranks - 1) / q.ranks, f


def ring(q: Features, p: Parameters) -> np.ndarray:
    """Ring by protocol, three rows: LL, LL128, Simple. Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005."""
    s, w, f = ring_terms(q)
    own = f * q.bytes / (q.ranks * p["self"] * q.hbm)  # Simple copies the own block too
    return np.stack(
        [
            s * p["lambda_ll"] + w * q.bytes / (p["share_ll"] * q.link),
            s * p["lambda_ll128"] + w * q.bytes / (p["share_ll128"] * q.link),
            s * p["lambda_simple"] + w * q.bytes / (p["share_simple"] * q.link) + own,
        ]
    )


def tree(q: Features, p: Parameters) -> np.ndarray:
    """All_reduce by a chain inside each host and a tree between hosts. Sanders, Speck, Traeff, 2009."""
    hosts = np.ceil(q.ranks / q.host)
    depth = 2 * (q.host - 1) * p["tree_inner"] + 2 * np.floor(np.log2(hosts)) * p["tree_outer"]
    return np.asarray(depth + 2 * (q.ranks - 1) / q.ranks * q.bytes / (p["share_tree"] * q.link))


def multicast(q: Features, p: Parameters) -> np.ndarray:
    """All_reduce in the switch (NVLS): each rank sends b and receives b / n, or the reverse, at the same time."""
    rate = p["share_nvls"] * q.link
    time = p["nvls"] + q.bytes * (q.ranks + 1) / (q.ranks * rate)
    return np.where((q.ranks > 2) & rules.has_multicast(q.kind), time, np.inf)


def messages(q: Features, p: Parameters) -> np.ndarray:
    """All_to_all and permute: one message per peer, in parts on channels, 32 channels at a time."""
    permute = q.op == "collective_permute"
    m = np.where(permute, q.bytes, q.bytes / q.ranks)
    channels = rules.message_channels(q.largest, q.ranks, m)
    rounds = np.where(permute, 1.0, np.ceil(q.ranks * channels / 32))
    # Exchanges inside one host start later than those between the hosts of a domain.
    start = p["per_peer"] * (q.ranks - 1) + np.where(q.ranks <= q.host, p["host_start"], 0.0)
    start = np.where(permute, 0.0, start)
    part = rounds * m / channels / 1e3
    small = start + part / p["channel_ll"]
    alone = np.maximum(part / p["channel_simple"], m / (p["share_peer"] * q.link))
    all_links = (q.ranks - 1) * m / (p["share_simple"] * q.link)
    every = np.maximum(part / p["channel_simple"], np.maximum(all_links, m / (p["self"] * q.hbm)))
    large = start + p["rendezvous"] + np.where(permute, alone, every)
    return np.asarray(np.where(m <= rules.message_ll_limit(channels, q.old_ll), small, large))


def domain(q: Features, p: Parameters) -> np.ndarray:
    """NCCL inside one NVLink domain. The library's constants choose the protocol, fitted parameters time it."""
    by_protocol = ring(q, p)
    chosen = np.take_along_axis(by_protocol, rules.ring_protocol(q)[None], axis=0)[0]
    best = np.minimum(by_protocol.min(axis=0), np.minimum(tree(q, p), multicast(q, p)))
    dense = np.where(q.op == "all_reduce", best, chosen)
    alone = np.isin(q.op, ("all_to_all", "collective_permute"))
    return p["launch"] + np.where(alone, messages(q, p), dense)


def cluster(q: Features, p: Parameters) -> np.ndarray:
    """Several domains: hierarchical bytes on the network adapters, ring bytes on the links, steps that grow with n."""
    f = np.where(q.op == "all_reduce", 2.0, 1.0)
    network = f * (q.nodes - 1) / q.nodes * q.bytes / (q.nic * q.domain)
    network = np.where(q.op == "all_to_all", (1 - 1 / q.nodes) * q.bytes / q.nic, network)
    network = np.where(q.op == "collective_permute", q.bytes / q.nic, network)
    links = f * (q.ranks - 1) / q.ranks * q.bytes / (p["share_simple"] * q.link)
    steps = p["per_step"] * f * (q.ranks - 1)
    depth = f * np.log2(np.maximum(q.nodes, 2))
    small = depth * p["hop_ll"] + np.maximum(network / p["nic_ll"], links)
    large = depth * p["hop_simple"] + np.maximum(network / p["nic_simple"], links)
    return np.asarray(p["launch"] + steps + np.minimum(small, large))


FORMS: dict[str, Callable[[Features, Parameters], np.ndarray]] = {"domain": domain, "cluster": cluster}
