"""Times of bulk copies beside those of loads and stores, from the lines that benchmarks/gpu/virtual_ranks.cu prints."""


def ratios(virtual: list[dict]) -> dict[str, float]:
    """Time with bulk copies by time without them, for each op and number of thread blocks of a rank."""
    times = {
        (line["op"], line["channels"], line["bulk"]): line["median_us"] for line in virtual if line["what"] == "bulk"
    }
    return {
        f"{op}, {channels} SMs per rank": times[op, channels, 1] / time
        for (op, channels, bulk), time in times.items()
        if not bulk and (op, channels, 1) in times
    }
