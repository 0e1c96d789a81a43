"""Which algorithm a collective matmul runs if the caller names none."""

# Names that the keyword `algorithm` accepts, besides "xla".
ALGORITHMS = ("unfused", "direct", "ring")


def choose(platform: str, scope: str, *, needs_all_rows: bool) -> str:
    """Returns the name of an algorithm.

    On CPUs, transfers and products share the processors. Between processes of one host, the products of "ring" keep a
    processor busy while its rank waits for a block, and its blocks stay in the cache. benchmarks/README.md has the
    measurements: "ring" takes less time there at all sizes, except for products that sum over rows, whose n parts must
    be added. Inside a process, between hosts and on GPUs, no measurement shows a gain.

    Args:
      platform: "cpu", "cuda" or "other".
      scope: "process", "node" or "network": the largest distance between two ranks of a group.
      needs_all_rows: whether the call returns the rows of all ranks, or sums over them.
    """
    return "ring" if (platform, scope) == ("cpu", "node") and not needs_all_rows else "unfused"
