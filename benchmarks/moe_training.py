"""Training steps of models/moe with every choice computed, and with a capacity, in turns: tokens per second.

python benchmarks/moe_training.py --steps 100
"""

import argparse
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.lm import data, distributed
from models.lm.train import make_mesh
from models.moe import train
from models.moe.axes import AXES
from models.moe.config import Config
from models.moe.step import init_state, make_step


def start(config, mesh):
    """The training step and the first state."""
    graphdef, specs, init = init_state(config)
    step = make_step(config, mesh, graphdef, specs, train.load_comm(config))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return step, jax.jit(init, out_shardings=shardings)()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=5, help="steps that are not timed")
    args = parser.parse_args()
    configs = {name: Config(moe=name) for name in ("dropless", "capacity")}
    config = configs["dropless"]
    mesh = make_mesh(config)
    text, _ = data.load(config.data, config.heldout, config.seq + 1)
    runs = {name: start(c, mesh) for name, c in configs.items()}
    seconds, results = {name: [] for name in runs}, {name: [] for name in runs}
    for i in range(args.warmup + args.steps):
        batch = data.train_batch(text, config.batch, config.seq + 1, config.seed, i)
        tokens = distributed.put(batch, NamedSharding(mesh, P(AXES)))
        for name, (step, state) in runs.items():
            begin = time.perf_counter()
            state, metrics = step(state, tokens)
            results[name].append({key: float(value) for key, value in metrics.items()})
            if i >= args.warmup:
                seconds[name].append(time.perf_counter() - begin)
            runs[name] = step, state
    for name, times in seconds.items():
        dropped = statistics.mean(r["dropped"] for r in results[name])
        rates = [config.batch * config.seq / s for s in (statistics.median(times), min(times))]
        print(
            f"{name:9} {rates[0]:8,.0f} tokens/s in the median step, {rates[1]:,.0f} in the fastest; loss "
            f"{results[name][-1]['loss']:.3f}, {dropped:.1%} of the choices dropped"
        )


if __name__ == "__main__":
    main()
