"""The command `reshard`: the time of a move between two shardings."""

import argparse
import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxcomm import RankSharding
from jaxcomm.simulate import collectives
from jaxcomm.simulate.cluster.model import Cluster


def add_command(commands: Any) -> None:
    call = commands.add_parser("reshard", help="time of a move between two shardings, from the plan of jaxcomm.reshard")
    text = (
        "mesh and spec: data=2,model=4:data,model shards a matrix over 2 x 4 ranks; @8 behind the mesh: from rank 8 on"
    )
    call.add_argument("source", metavar="FROM", type=_sharding, help=text)
    call.add_argument(
        "destination", metavar="TO", type=_sharding, help="likewise; data+model are axes of one dimension"
    )
    call.add_argument("--shape", required=True, metavar="N,...", help="of the whole array, such as 8192,8192")
    call.add_argument("--dtype", default="float32", help="element type (default: float32)")
    call.add_argument(
        "--cluster", required=True, metavar="CLUSTER", help=f"file, or one of {', '.join(Cluster.names())}"
    )
    call.add_argument("--algorithm", metavar="NAME", help="default: that of lowest cost in the cost model")
    call.set_defaults(run=run)


def _sharding(text: str) -> RankSharding:
    found = re.fullmatch(r"(\w+=\d+(?:,\w+=\d+)*)(?:@(\d+))?:([\w,+]*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected MESH:SPEC such as data=2,model=4:data,model")
    mesh, first, spec = found.groups()
    axes = [axis.split("=") for axis in mesh.split(",")]
    sizes = {name: int(size) for name, size in axes}
    shape = list(sizes.values())
    if len(sizes) < len(axes) or 0 in shape:
        raise argparse.ArgumentTypeError(f"got the mesh {mesh!r}, expected distinct axes of at least one rank")
    ranks = int(first or 0) + np.arange(math.prod(shape)).reshape(shape)
    entries = [tuple(entry.split("+")) if entry else None for entry in spec.split(",")]
    return RankSharding(ranks, tuple(sizes), P(*entries))


def run(args: argparse.Namespace) -> int:
    sides = args.source, args.destination
    try:
        x = jax.ShapeDtypeStruct([int(n) for n in args.shape.split(",")], np.dtype(args.dtype))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--shape and --dtype: {error}") from None
    n = 1 + max(int(side.ranks.max()) for side in sides)
    print(
        collectives.collective(
            "reshard", x, n, cluster=Cluster.load(args.cluster), algorithm=args.algorithm, shardings=sides
        )
    )
    return 0
