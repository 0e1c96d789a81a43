"""What the lines of `make gpu-timings` say: targets, parameters of the machine model, a table."""

from runner import Runner

VIRTUAL_RANKS = "virtual ranks"
FLAGGED = "small LL messages"
HOST_COST = "host cost"
# (what, the least or most that it should be): of the copy's bandwidth, microseconds
TARGETS = {
    "all_to_all, 64 MiB per rank, 8 ranks: of the bandwidth of a copy": (">=", 0.9),
    "all_gather, 64 MiB per rank, 8 ranks: of the bandwidth of a copy": (">=", 0.9),
    "all_reduce, 64 MiB per rank, 8 ranks: of the bandwidth of a copy": (">=", 0.8),
    "all_reduce of 8 bytes, 8 ranks: us in the kernel": ("<=", 5.0),
    "psum of 8 bytes in a jitted chain: us until it returns, above an empty call": ("<=", 5.0),
}


def targets(virtual: list[dict], ll: list[dict], host: list[dict]) -> dict[str, dict]:
    """The measured value of each target; None if there is none."""
    shares = {line["op"]: line["of_copy"] for line in virtual if line["what"] == "target"}
    latencies = [
        line["kernel_us"]
        for line in virtual
        if line["what"] == "latency" and line["op"] == "all_reduce" and line["ranks_per_node"] == 8
    ]
    latencies += [
        line["ll_us"] for line in ll if line["op"] == "all_reduce" and line["ranks"] == 8 and line["block_bytes"] == 8
    ]
    values = [shares.get(op) for op in ("all_to_all", "all_gather", "all_reduce")]
    returned = [line["until it returns"] for line in host if line["platform"] != "cpu" and "until it returns" in line]
    above_empty = [times["us_above_empty"]["psum"] for times in returned]
    values += [min(latencies, default=None), min(above_empty, default=None)]
    found = {}
    for (what, (sign, bound)), value in zip(TARGETS.items(), values, strict=True):
        met = None if value is None else value >= bound if sign == ">=" else value <= bound
        found[what] = {"value": value, "target": f"{sign} {bound:g}", "met": met}
    return found


def print_table(runner: Runner) -> None:
    for what, found in runner.record["targets"].items():
        state = {True: "met", False: "NOT MET", None: "not measured"}[found["met"]]
        print(f"{state:13}{found['value'] if found['value'] is not None else '-':>8} {found['target']:>7}  {what}")


def machine_model(virtual: list[dict], ll: list[dict]) -> dict[str, float]:
    """Parameters of plan.gpu_machine() as one GPU shows them. Ranks share its memory, so those of NVLink are missing.

    The bandwidth of copies, the entry and exit barrier of 8 ranks, and the cost of another LL message of 8 bytes.
    """
    found = {}
    copies = [line["bytes"] / 2 / line["copy_us"] * 1e6 for line in virtual if line["what"] == "target"]
    if copies:
        found["self_bytes_per_s"] = max(copies)
    barriers = [
        line["kernel_us"]
        for line in virtual
        if line["what"] == "latency" and line["op"] == "barrier" and line["ranks_per_node"] == 8
    ]
    if barriers:
        found["sync_overhead_s"] = 2e-6 * min(barriers)
    of_ranks = {line["ranks"]: line["ll_us"] for line in ll if (line["op"], line["block_bytes"]) == ("all_reduce", 8)}
    if {2, 8} <= of_ranks.keys():
        overhead_us = max(of_ranks[8] - of_ranks[2], 0) / 6
        found |= {"ll_overhead_s": overhead_us * 1e-6, "ll_latency_s": (of_ranks[2] - overhead_us) * 1e-6}
    return found
