"""Times the training steps of models/ with jaxcomm in several ways and with jax.lax, in turns.

    python benchmarks/overlap.py --json out.json                    # one process, 8 devices
    python benchmarks/overlap.py --scripts zero3 ring --layers 4    # some scripts, deeper models
    python benchmarks/overlap.py --hosts 2 --rate 1e9 --delay 0.2e-3 --scripts zero3 ring    # needs root

Each round runs every side once, in a random order. `--hosts` starts one process with one device on each host; the hosts
are network namespaces, whose links have the given rate (bits per second) and one-way delay (seconds).

| side | collectives |
|---|---|
| lax | jax.lax |
| synchronous | jaxcomm; a start is the synchronous operation; products are not split |
| start | jaxcomm, as the script calls it |
| ring | jaxcomm, with this algorithm of collective matmul |
| dropless | jaxcomm.moe, which drops no choice of an expert; other sides of moe have slots for a capacity |
| stub | none: the same shapes without transfers. Its losses mean nothing |

- exposed: time of a step minus that of stub. Its median is over the rounds.
- alone: time of all collectives of a step with jaxcomm, one after the other, without computations.
- overlap: 1 - exposed / alone.
- memory: arguments and temporary arrays of one device, as XLA plans them.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import pathlib
import random
import statistics
import sys
import time
import types
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import on_hosts
from jaxcomm.bench import records
from models.cp import parallel as cp
from models.lm import comm as comm_lib
from models.lm import distributed
from models.lm import model as lm
from models.lm import train as train_lib
from models.moe import train as moe
from models.pp import parallel as pp
from models.tp import parallel as tp
from models.zero import parallel as zero

# name: (module, options, sides of jaxcomm)
SCRIPTS = {
    "moe": (moe, {"moe": "capacity"}, ("start", "dropless")),
    "tp": (tp, {}, ("synchronous", "ring")),
    "zero1": (zero, {"stage": 1}, ("synchronous",)),
    "zero2": (zero, {"stage": 2}, ("synchronous",)),
    "zero3": (zero, {"stage": 3}, ("synchronous", "start")),
    "ring": (cp, {"attention": "ring"}, ("synchronous", "start")),
    "ulysses": (cp, {"attention": "ulysses"}, ("synchronous",)),
    "gather": (cp, {"attention": "gather"}, ("synchronous",)),
    "pp": (pp, {}, ("synchronous",)),
}
TWO_RANKS = {"tp": "1x2", "zero": "2x1", "cp": "1x2", "pp": "2x1", "moe": "2x1"}
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "permute", "reduce_scatter")


# Collectives of a side.


def stub():
    """Operations with the shapes of collectives, but without transfers."""

    def all_gather(x, axes, *, axis=0, tiled=False):
        n = jax.lax.axis_size(axes)
        return jnp.concatenate([x] * n, axis) if tiled else jnp.stack([x] * n, axis)

    def psum_scatter(x, axes, *, scatter_dimension=0, tiled=False):
        size = x.shape[scatter_dimension] // jax.lax.axis_size(axes)
        return jax.lax.slice_in_dim(x, 0, size, axis=scatter_dimension)

    def all_to_all(x, axes, split_axis, concat_axis, tiled=True):
        return jnp.concatenate(jnp.split(x, jax.lax.axis_size(axes), split_axis), concat_axis)

    comm = types.SimpleNamespace(
        psum=lambda x, axes: x,
        pmax=lambda x, axes: x,
        psum_scatter=psum_scatter,
        all_gather=all_gather,
        all_to_all=all_to_all,
        ppermute=lambda x, axes, pairs: x,
    )
    return comm_lib.with_synchronous_starts(comm_lib.with_plain_products(comm))


def untyped():
    """Context in which shard_map does not check that replicated results are equal: those of the stub are not."""
    return mock.patch.object(jax, "shard_map", functools.partial(jax.shard_map, check_vma=False))


@dataclasses.dataclass
class Side:
    """A compiled program and its state."""

    program: object  # (state, *inputs) -> (state, results)
    state: object
    inputs: tuple = ()

    def run(self):
        """Seconds of a call, on the slowest process."""
        start = time.perf_counter()
        self.state, results = self.program(self.state, *self.inputs)
        jax.block_until_ready((self.state, results))
        seconds = time.perf_counter() - start
        if jax.process_count() == 1:
            return seconds
        return float(multihost_utils.process_allgather(np.array(seconds)).max())

    @property
    def memory_mib(self):
        memory = self.program.memory_analysis()
        return (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**20


def place(array, mesh, spec):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def side_of(module, side, config, mesh):
    comm = stub() if side == "stub" else comm_lib.load(config)
    if side == "synchronous":
        comm = comm_lib.with_synchronous_starts(comm)
    with untyped() if side == "stub" else contextlib.nullcontext():
        program = module.build(config, mesh, comm)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), program.specs)
        state = jax.jit(program.init, out_shardings=shardings)()
        array = np.random.default_rng(0).integers(0, lm.VOCAB, (config.batch, config.seq + 1)).astype(np.int32)
        tokens = place(array, mesh, program.tokens)
        return Side(program.step.lower(state, tokens).compile(), state, (tokens,))


# All collectives of a step, alone.


def calls(jaxpr, times=1):
    """[(equation of a collective of jaxcomm, how often a step runs it)]"""
    found = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name.removeprefix("jaxcomm_")
        if name != eqn.primitive.name and name in COLLECTIVES:
            found.append((eqn, times))
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns"):
                found += calls(value, inner)
    return found


def of_step(module, config, mesh):
    """``calls`` of a step with synchronous operations."""
    comm = comm_lib.with_synchronous_starts(comm_lib.with_plain_products(comm_lib.load(config)))
    program = module.build(config, mesh, comm)
    tokens = jax.ShapeDtypeStruct((config.batch, config.seq + 1), np.int32)
    return calls(program.step.trace(jax.eval_shape(program.init), tokens).jaxpr.jaxpr)


def alone(found, mesh):
    """A program with these collectives, one after the other."""

    def body(zero):
        for eqn, times in found:

            def one(zero, _, eqn=eqn):
                operands = [jnp.zeros(x.aval.shape, x.aval.dtype) + zero.astype(x.aval.dtype) for x in eqn.invars]
                result = jax.tree.leaves(eqn.primitive.bind(*operands, **eqn.params))[0]
                return result.reshape(-1)[0].astype(zero.dtype), None

            zero, _ = jax.lax.scan(one, zero, length=times)
        return zero, ()

    zero = place(np.zeros((), np.float32), mesh, P())
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=(P(), ()), check_vma=False))
    return Side(program.lower(zero).compile(), zero)


# Measurements.


def measure(name, arguments):
    """One record per side of a script."""
    module, options, of_jaxcomm = SCRIPTS[name]
    sizes = {"layers": arguments.layers, "width": arguments.width, "hidden": 2 * (arguments.width or 0), "lr": 1e-6}
    options = {**options, **{name: value for name, value in sizes.items() if value}}
    if distributed.initialize() > 1:  # JAX starts later, in make_mesh
        options["layout"] = TWO_RANKS[module.Config.name]
    config = module.Config(**options)
    mesh = train_lib.make_mesh(config)
    sides = {}
    for side in ("lax", *of_jaxcomm, "stub"):
        more = {"comm": "lax"} if side == "lax" else {}
        if side == "dropless":
            more["moe"] = "dropless"
        if module is tp and side != "lax":
            more["matmul"] = "ring" if side == "ring" else "unfused"
        sides[side] = side_of(module, side, dataclasses.replace(config, **more), mesh)
    sides["alone"] = alone(of_step(module, config, mesh), mesh)
    order, seconds = list(sides), {side: [] for side in sides}
    shuffle = random.Random(0).shuffle  # the same on all processes, and no side always follows the same other one
    for i in range(-arguments.warmup, arguments.rounds):
        turns = list(order)
        shuffle(turns)
        for side in turns:
            took = sides[side].run()
            if i >= 0:
                seconds[side].append(took)
    found = []
    for side in [side for side in order if side != "alone"]:
        pairs = zip(seconds["lax"], seconds[side], strict=True)
        record = {
            "script": name, "side": side, "layout": "x".join(map(str, config.sizes.values())),
            "layers": config.layers, "width": config.width,
            "step_s": statistics.median(seconds[side]), "fastest_s": min(seconds[side]),
            "tokens_per_s": config.batch * config.seq / statistics.median(seconds[side]),
            "times_of_lax": statistics.median(base / own for base, own in pairs),
            "memory_mib": sides[side].memory_mib, "rounds": arguments.rounds,
        }  # fmt: skip
        if side != "stub":
            differences = (a - b for a, b in zip(seconds[side], seconds["stub"], strict=True))
            record["exposed_s"], record["alone_s"] = map(statistics.median, (differences, seconds["alone"]))
            record["overlap"] = 1 - record["exposed_s"] / record["alone_s"]
        found.append(record)
    return found


HEADER = """| script | side | step | tokens/s | lax / side | exposed | alone | overlap | memory |
|---|---|---|---|---|---|---|---|---|"""


def row(r):
    exposed = ["", "", ""]
    if "exposed_s" in r:
        exposed = [f"{r['exposed_s'] * 1e3:.1f} ms", f"{r['alone_s'] * 1e3:.1f} ms", f"{r['overlap']:.0%}"]
    return (
        f"| {r['script']} | {r['side']} | {r['step_s'] * 1e3:.1f} ms | {r['tokens_per_s']:,.0f} | "
        f"{r['times_of_lax']:.2f}x | {' | '.join(exposed)} | {r['memory_mib']:.1f} MiB |"
    )


# Hosts.


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--layers", type=int, help="of the models; default: that of the script")
    parser.add_argument("--width", type=int, help="of the models; hidden layers are twice as wide")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that are not timed")
    parser.add_argument("--hosts", type=int, choices=(2,), help="hosts with one device each")
    parser.add_argument("--rate", type=float, default=1e9, help="of a link, bits per second")
    parser.add_argument("--delay", type=float, default=0.2e-3, help="of a link, seconds")
    parser.add_argument("--json", type=pathlib.Path, help="file for the records")
    arguments = parser.parse_args()
    if arguments.hosts and not on_hosts.is_host():
        sys.exit(on_hosts.run(arguments.hosts, arguments.rate, arguments.delay))
    found, leads = [], True
    for name in arguments.scripts:
        found += measure(name, arguments)
        leads = jax.process_index() == 0
        if leads:
            print("\n".join([HEADER] * (name == arguments.scripts[0]) + [row(r) for r in found if r["script"] == name]),
                  flush=True)  # fmt: skip
    if leads and arguments.json:
        parameters = {"processes": jax.process_count(), "devices": jax.device_count(), "rounds": arguments.rounds}
        context = records.context(sys.argv, parameters)
        arguments.json.write_text(json.dumps({"context": context, "records": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
