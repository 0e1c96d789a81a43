"""Which algorithm a collective matmul runs if the caller names none."""

# Names that the keyword `algorithm` accepts, besides "xla".
ALGORITHMS = ("unfused", "direct", "ring")

# Smallest block that "ring" multiplies faster than "unfused" between processes. Measured with 2 processes of 4 devices
# on 2 cores (benchmarks/README.md, 2026-11): from 128 KiB on, "ring" takes 0.5 to 1 times the time; below, 0.9 to 1.8.
SMALLEST_RING_BYTES = 128 << 10


def choose(platform: str, scope: str, product: str, block_bytes: int) -> str:
    """Returns the name of an algorithm.

    On CPUs, transfers and products share the processors, so only a measurement can show a gain. Between processes of
    one host, it shows a gain for the rows of a gather, and none that is sure for sums over a gather or for a scatter.

    Args:
      platform: "cpu", "cuda" or "other".
      scope: "process", "node" or "network": the largest distance between two ranks of a group.
      product: what loops.py computes: "rows" or "sums" of a gather, or "scatter".
      block_bytes: size of the rows that a rank sends.
    """
    measured = (platform, scope, product) == ("cpu", "node", "rows")
    return "ring" if measured and block_bytes >= SMALLEST_RING_BYTES else "unfused"
