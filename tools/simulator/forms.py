"""Formulas of libraries and networks that only tables have, and the form and system of each row of a table."""

import numpy as np

from jaxcomm.simulate.nccl import formulas
from jaxcomm.simulate.nccl.features import Features
from jaxcomm.simulate.nccl.formulas import Parameters, ring_terms
from tools.simulator import rows
from tools.simulator.systems import Key
from tools.simulator.table import Row, Table


def mesh(q: Features, p: Parameters) -> np.ndarray:
    """Every pair of ranks has a link of its own (xGMI): one step, and rates grow with the ranks."""
    f = np.where(q.op == "all_reduce", 2.0, 1.0)
    share = (q.ranks - 1) / (q.largest - 1)
    w = f * (q.ranks - 1) / q.ranks
    own = f * q.bytes / (q.ranks * p["self"] * q.hbm)
    step = f + p["growth"] * (q.ranks - 2)
    times = [
        step * p[f"lambda_{name}"] + w * q.bytes / (p[f"share_{name}"] * share * q.link)
        for name in ("ll", "ll128", "simple")
    ]
    reduced = np.minimum(np.minimum(times[0], times[1]), times[2] + own)
    m = np.where(q.op == "collective_permute", q.bytes, q.bytes / q.ranks)
    peer = p["share_peer"] * q.link / (q.largest - 1)
    start = p["per_peer"] * (q.ranks - 1)
    every = start + np.minimum(m / (p["share_ll"] / 7 * q.link), p["rendezvous"] + m / peer) + m / (p["self"] * q.hbm)
    single = np.minimum(m / (p["share_ll"] / 7 * q.link), p["rendezvous"] + m / peer)
    dense = np.where(q.op == "all_to_all", every, reduced)
    return np.asarray(np.where(q.op == "collective_permute", p["permute"] + single, p["launch"] + dense))


def stepwise(q: Features, p: Parameters) -> np.ndarray:
    """Ring over network adapters only, step by step: small and large messages differ in latency and rate."""
    s, _, _ = ring_terms(q)
    m = q.bytes / q.ranks / q.nic
    return np.asarray(
        p["launch"] + s * np.minimum(p["hop_ll"] + m / p["nic_ll"], p["hop_simple"] + m / p["nic_simple"])
    )


def doubling(q: Features, p: Parameters) -> np.ndarray:
    """Recursive doubling over network adapters only."""
    depth = np.log2(q.ranks)
    sent = (q.ranks - 1) / q.ranks * q.bytes / q.nic
    small = depth * p["hop_ll"] + sent / p["nic_ll"]
    return np.asarray(p["launch"] + np.minimum(small, depth * p["hop_simple"] + sent / p["nic_simple"]))


def line(q: Features, p: Parameters) -> np.ndarray:
    """A kernel of its own: start, a term for each peer, bytes over one rate (links, or adapters between domains)."""
    rate = np.where(q.nodes > 1, p["nic_simple"] * q.nic * q.domain, p["share_simple"] * q.link)
    return p["launch"] + p["per_peer"] * (q.ranks - 1) + q.bytes / rate


def experts(q: Features, p: Parameters) -> np.ndarray:
    """Dispatch and combine: a start and a rate that meet smoothly, as the kernels overlap them."""
    rate = np.where(q.nodes > 1, p["nic_simple"] * q.nic, p["share_simple"] * q.link)
    start = p["launch"] + p["per_peer"] * (q.ranks - 1)
    k = p["sharpness"]
    return (start**k + (q.bytes / rate) ** k) ** (1 / k)


FORMS = formulas.FORMS | {
    "mesh": mesh,
    "stepwise": stepwise,
    "doubling": doubling,
    "line": line,
    "experts": experts,
}


def form(row: Row, q: Features, i: int) -> str:
    """The form that times a row."""
    if row.op.startswith("ep_"):
        return "experts"
    library = row.library
    if "CTRAN" in library:
        return "doubling" if "doubling" in row.notes.get("algo", "") else "stepwise"
    if (library and not library.startswith(("NCCL", "RCCL", "nccl", "rccl"))) or "device API" in library:
        return "line"
    if q.nodes[i] > 1:
        return "cluster"
    return "mesh" if rows.is_mesh(row) else "domain"


def system(row: Row, form_name: str) -> tuple[str, ...]:
    """Key of the rows that share one set of parameters: harness and machine; for single kernels also op and library."""
    parts: tuple[str, ...] = (form_name, row.repo, row.hardware)
    if form_name in ("line", "stepwise", "experts", "doubling"):
        parts += (row.op, row.library, row.notes.get("algo", ""), row.notes.get("nic_interleave", ""))
    return parts


def describe(table: Table, q: Features) -> tuple[list[str], list[Key]]:
    """Form and system of each row."""
    forms = [form(row, q, i) for i, row in enumerate(table.rows)]
    return forms, [system(row, name) for row, name in zip(table.rows, forms, strict=True)]
