"""Compares jaxcomm.reshard with jax.jit with out_shardings and jax.device_put: bytes received, and time in turns.

    python benchmarks/reshard.py bytes --pairs 220 --json out.json     # one process; nothing is moved
    python -m jaxcomm.run --processes 2 benchmarks/reshard.py time --devices 4 --bytes 16777216 --json out.json
    python benchmarks/reshard.py time --hosts 2 --rate 1e9 --devices 4 --json out.json    # needs root
    python benchmarks/reshard.py copies --hosts 4 --rate 2e8 --devices 1 --json out.json  # needs root

Pairs are random shardings of a 2-D array over meshes of shape (2, 4) and (2, 2, 2), on eight devices in the same order,
because jit needs that. "of the axes": a mesh, then the number of axes of each dimension is drawn. "of all pairs": all
2,462 pairs of different specs are equally likely, and 2,352 of them have the second mesh. Times are of the first kind.
Bytes are those that devices receive from others, over the minimum: what their new shards lack. Those of jit follow from
the collectives in the program that XLA has compiled, as a ring would move them. A time is that of the slowest process,
between two barriers; in each round every side runs once, in a random order.

`--hosts` starts one process on each host; the hosts are network namespaces, whose links have the given rate (bits per
second). The kernel counts the bytes of their links, headers and all. The time of the busiest link is that of the bytes
which the plan sends or receives there, the larger of the two.

`copies` moves the whole array from the first host to 1, 2, ... others, by the plan in which the first host sends all
copies and by the one in which hosts forward chunks.
"""

import argparse
import itertools
import json
import math
import pathlib
import random
import re
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from benchmarks import on_hosts
from jaxcomm import _reshard
from jaxcomm._core import plan

MESHES = ((2, 4), (2, 2, 2))
# What a device receives, in parts of the result of the collective, in a group of g.
RECEIVED = {
    "all-gather": lambda g: (g - 1) / g,
    "all-to-all": lambda g: (g - 1) / g,
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "reduce-scatter": lambda g: g - 1,
}
ITEM = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}


def random_spec(rng, names):
    left = rng.sample(names, len(names))
    spec = []
    for _ in range(2):
        spec.append(tuple(left.pop() for _ in range(rng.randint(0, len(left)))) or None)
    rng.shuffle(spec)
    return P(*spec)


def pairs(number):
    """Random pairs of different shardings. The same in all processes."""
    rng = random.Random(20261124)
    devices = np.array(jax.devices()[:8])
    found = []
    while len(found) < number:
        shape = rng.choice(MESHES)
        mesh = Mesh(devices.reshape(shape), tuple("abc"[: len(shape)]))
        source, target = (NamedSharding(mesh, random_spec(rng, mesh.axis_names)) for _ in range(2))
        if not source.is_equivalent_to(target, 2):
            found.append((source, target))
    return found


def pairs_of_all(number):
    """Random pairs among all pairs of different specs of both meshes."""
    devices = np.array(jax.devices()[:8])
    found = []
    for shape in MESHES:
        names = "abc"[: len(shape)]
        mesh = Mesh(devices.reshape(shape), tuple(names))
        orders = [order for k in range(len(names) + 1) for order in itertools.permutations(names, k)]
        specs = [P(order[:cut] or None, order[cut:] or None) for order in orders for cut in range(len(order) + 1)]
        found += [[NamedSharding(mesh, spec) for spec in pair] for pair in itertools.permutations(specs, 2)]
    return random.Random(20261124).sample(found, number)


def by_jit(x, target):
    return jax.jit(lambda x: x, out_shardings=target).lower(x).compile()


def bytes_of_program(text):
    """Bytes that all devices of a compiled program receive from others."""
    total = 0.0
    for line in text.splitlines():
        found = re.search(
            r"= (.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(-start)?\(", line
        )
        if found is None:
            continue
        result, kind, start = found.groups()
        sizes = [
            ITEM[t] * math.prod(map(int, filter(None, d.split(","))))
            for t, d in re.findall(r"(\w+)\[([\d,]*)\]", result)
        ]
        size = sizes[-1] if start else sum(sizes)
        if kind == "collective-permute":
            moved = re.findall(r"\{(\d+),(\d+)\}", re.search(r"source_target_pairs=(\{.*?\}\})", line).group(1))
            total += size * sum(a != b for a, b in moved)
            continue
        iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", line)
        listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
        if iota:
            count, g = map(int, iota.groups())
        elif listed:
            rows = re.findall(r"\{([\d,]+)\}", listed.group(1))
            count, g = len(rows), len(rows[0].split(","))
        elif named := re.search(r"replica_groups=mesh\[(.*?)\].*?\{([^}]*)\}", line):
            axes = dict(re.findall(r"'(\w+)'=(\d+)", named.group(1)))
            g = math.prod(int(axes[name]) for name in re.findall(r"'(\w+)'", named.group(2)))
            count = math.prod(map(int, axes.values())) // g
        else:
            raise ValueError(f"no groups in {line}")
        total += size * RECEIVED[kind](g) * count * g
    return total


def least_bytes(x, target):
    """Bytes that the new shards lack, by NumPy."""
    marks = np.arange(x.size).reshape(x.shape)
    old = x.sharding.devices_indices_map(x.shape)
    new = target.devices_indices_map(x.shape)
    return sum(np.setdiff1d(marks[new[d]], marks[old[d]]).size for d in new) * x.dtype.itemsize


def moves_of_plan(x, target):
    """(from, to, elements) of what the plan moves between devices, and the number of devices of a host."""
    move = _reshard._Move.of("x", x, target)
    n, hosts = len(move.devices), jax.process_count() if on_hosts.is_host() else 1
    request = plan.reshard_request("network" if hosts > 1 else "node", n, n // hosts, *move.key[-2:])
    algorithm = "hierarchical" if hosts > 1 else "direct"
    steps = [step for rank in plan.build(request, algorithm) for step in rank.steps if step.kind in ("put", "get")]
    return [(step.src.rank, step.dst.rank, step.count) for step in steps], n // hosts


def bytes_of_plan(x, target):
    """Bytes that all devices receive by the plan, and the bytes of the busiest sender over its lower bound."""
    moves, n = moves_of_plan(x, target)
    sent = np.zeros(n)
    for source, _, count in moves:
        sent[source] += count
    bound = max(1.0, sent.sum() / n)
    return int(sent.sum()) * x.dtype.itemsize, float(sent.max() / bound)


def bytes_of_links(x, target):
    """Bytes of the busiest direction of a link by the plan, and those that all hosts receive."""
    moves, of_host = moves_of_plan(x, target)
    received, sent = np.zeros((2, jax.process_count()), np.int64)
    for source, destination, count in moves:
        if source // of_host != destination // of_host:
            sent[source // of_host] += count * x.dtype.itemsize
            received[destination // of_host] += count * x.dtype.itemsize
    return int(max(*sent, *received)), int(received.sum())


def statistics(ratios):
    quantiles = np.quantile(ratios, [0.5, 0.75, 0.9, 1])
    return dict(zip(("median", "p75", "p90", "max"), (round(float(q), 3) for q in quantiles), strict=True))


def compare_bytes(drawn):
    x = np.zeros((64, 64), np.float32)
    rows = []
    for source, target in drawn:
        placed = jax.device_put(x, source)
        least = least_bytes(placed, target)
        ours, busiest = bytes_of_plan(placed, target)
        rows.append((least, ours, bytes_of_program(by_jit(placed, target).as_text()), busiest))
    least, ours, jit, busiest = map(np.array, zip(*rows, strict=True))
    moved = least > 0
    return {
        "pairs": len(rows),
        "pairs that move": int(moved.sum()),
        "jaxcomm, bytes over minimum": statistics(ours[moved] / least[moved]),
        "jit, bytes over minimum": statistics(jit[moved] / least[moved]),
        "jaxcomm, sum over that of jit": round(float(ours.sum() / jit.sum()), 3),
        "jaxcomm, busiest sender over an even share": statistics(busiest[moved]),
    }


def measure(call):
    """Seconds of the slowest process, bytes that all hosts have received, and those that the busiest host has sent."""
    links = on_hosts.link_bytes if on_hosts.is_host() else lambda: (0, 0)
    before = np.array(links())
    multihost_utils.sync_global_devices("start")
    begin = time.perf_counter()
    jax.block_until_ready(call())
    own = time.perf_counter() - begin
    if jax.process_count() == 1:
        return own, 0, 0
    multihost_utils.sync_global_devices("end")
    said = multihost_utils.process_allgather(np.float32([own, *(links() - before)]))
    return float(said[:, 0].max()), float(said[:, 1].sum()), float(said[:, 2].max())


def compare_times(arguments):
    rng = random.Random(1)
    side = math.isqrt(arguments.bytes // 4)
    x = np.arange(side * side, dtype=np.float32).reshape(side, side)
    rows = []
    for source, target in pairs(arguments.pairs):
        placed = jax.make_array_from_callback(x.shape, source, lambda index: x[index], dtype=x.dtype)
        if least_bytes(jax.ShapeDtypeStruct((64, 64), np.float32, sharding=source), target) == 0:
            continue
        program = by_jit(placed, target)
        sides = {
            "jaxcomm": lambda placed=placed, target=target: jaxcomm.reshard(placed, target),
            "jit": lambda placed=placed, program=program: program(placed),
            "device_put": lambda placed=placed, target=target: jax.device_put(placed, target),
        }
        for call in sides.values():
            for shard in call().addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index])
        found = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name in rng.sample(list(sides), len(sides)):
                found[name].append(measure(sides[name]))
        times = {name: [t for t, *_ in measured] for name, measured in found.items()}
        row = {"from": str(source.spec), "to": str(target.spec), "mesh": list(source.mesh.devices.shape)}
        row |= {f"{name} ms": round(1e3 * float(np.median(t)), 3) for name, t in times.items()}
        if on_hosts.is_host():
            busiest, received = bytes_of_links(placed, target)
            row |= {"busiest link MB": busiest / 1e6, "plan MB": received / 1e6}
            row |= {f"{name} MB": round(float(np.median([b for _, b, _ in m])) / 1e6, 3) for name, m in found.items()}
        rows.append(row)
    speed = {name: [row[f"{name} ms"] / row["jaxcomm ms"] for row in rows] for name in ("jit", "device_put")}
    said = {
        "bytes of the array": x.nbytes,
        "processes": jax.process_count(),
        "rounds": arguments.rounds,
        "rows": rows,
        "times faster, geometric mean": {n: round(float(np.exp(np.mean(np.log(s)))), 3) for n, s in speed.items()},
        "times faster": {n: statistics(s) for n, s in speed.items()},
    }
    if on_hosts.is_host():
        over = [row for row in rows if row["busiest link MB"] > 0]
        least_ms = [row["busiest link MB"] * 8e9 / arguments.rate for row in over]
        said["link, bits per second"] = arguments.rate
        said["time over that of the busiest link"] = statistics(
            [row["jaxcomm ms"] / ms for row, ms in zip(over, least_ms, strict=True)]
        )
        said["bytes on links over those of the plan"] = statistics([row["jaxcomm MB"] / row["plan MB"] for row in over])
        said["jit, bytes on links over those of jaxcomm"] = statistics([r["jit MB"] / r["jaxcomm MB"] for r in over])
    return said


def compare_copies(arguments):
    rng = random.Random(1)
    x = np.arange(arguments.bytes // 4, dtype=np.float32)
    hosts = [jax.local_devices(process)[0] for process in range(jax.process_count())]
    source, *targets = (
        NamedSharding(Mesh(np.array(some), ("a",)), P())
        for some in (hosts[:1], *(hosts[1:n] for n in range(2, len(hosts) + 1)))
    )
    own = jax.process_index()
    placed = jax.device_put(x, source) if own == 0 else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=source)

    def move(count, algorithm):
        return jaxcomm.reshard(placed, targets[count - 1], algorithm=algorithm) if own <= count else ()

    found = {side: [] for side in itertools.product(range(1, len(hosts)), ("direct", "hierarchical"))}
    for side in found:
        for shard in getattr(move(*side), "addressable_shards", ()):
            np.testing.assert_array_equal(np.asarray(shard.data), x)
    for _ in range(arguments.rounds):
        for side in rng.sample(list(found), len(found)):
            found[side].append(measure(lambda side=side: move(*side)))
    rows = []
    for (count, algorithm), measured in found.items():
        seconds, _, sent = np.median(measured, axis=0)
        one_s = 8 * x.nbytes / arguments.rate
        rows.append({"hosts": count, "algorithm": algorithm, "ms": round(1e3 * seconds, 1),
                     "over that of one copy on the link": round(seconds / one_s, 3),
                     "copies that the busiest host sends": round(sent / x.nbytes, 3)})  # fmt: skip
    return {"bytes of the array": x.nbytes, "link, bits per second": arguments.rate, "rounds": arguments.rounds,
            "copies": rows}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bytes", "time", "copies"])
    parser.add_argument("--pairs", type=int, default=220)
    parser.add_argument("--devices", type=int, default=8, help="of each process")
    parser.add_argument("--bytes", type=int, default=16 << 20, help="of the array")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--hosts", type=int, help="hosts with one process each")
    parser.add_argument("--rate", type=float, default=1e9, help="of a link, bits per second")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    if arguments.hosts and not on_hosts.is_host():
        sys.exit(on_hosts.run(arguments.hosts, arguments.rate, 0.0))
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    jaxcomm.distributed.initialize()
    if arguments.what == "bytes":
        draws = {"of the axes": pairs, "of all pairs": pairs_of_all}
        said = {name: compare_bytes(draw(arguments.pairs)) for name, draw in draws.items()}
    else:
        said = compare_copies(arguments) if arguments.what == "copies" else compare_times(arguments)
    if jax.process_index() == 0:
        print(json.dumps({k: v for k, v in said.items() if k != "rows"}, indent=2))
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"command": " ".join(sys.argv), **said}, file, indent=1)
                file.write("\n")


if __name__ == "__main__":
    main()
