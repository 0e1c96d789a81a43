"""Programs whose communicators XLA replaces: A uses one axis, B that axis and a collective over all devices, then A.

XLA may destroy the communicators of A when B starts, and make them anew at another or at the same address. Values must
stay right, also in programs that were compiled before. Compares with NumPy.
"""

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm

ROUNDS = 4
COUNT = 5000  # elements per device: several thread blocks


def main():
    jaxcomm.distributed.initialize()
    n = jax.device_count()
    inner = 2 if n % 2 == 0 else 1
    mesh = Mesh(np.array(jax.devices()).reshape(n // inner, inner), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P(("dp", "tp")))

    def program(body):
        spec = P(("dp", "tp"))
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    def tp(lib, x):
        return lib.psum(x, "tp") + lib.all_gather(x, "tp", tiled=True)[: x.shape[0]]

    def all_devices(lib, x):
        return lib.psum(x, ("dp", "tp"))

    programs = {
        "A: tp": (program(lambda x: tp(jaxcomm, x)), lambda x: of_tp(x)),
        "B: tp and all": (program(lambda x: all_devices(jaxcomm, tp(jaxcomm, x))), lambda x: of_all(of_tp(x))),
        "B: tp, and all by XLA": (program(lambda x: all_devices(lax, tp(jaxcomm, x))), lambda x: of_all(of_tp(x))),
        "C: dp": (program(lambda x: jaxcomm.psum(x, "dp")), lambda x: of_dp(x)),
    }

    def of_tp(x):
        groups = x.reshape(n // inner, inner, COUNT)
        return (groups.sum(1, keepdims=True) + groups[:, :1]).repeat(inner, 1).reshape(x.shape)

    def of_dp(x):
        return np.tile(x.reshape(n // inner, -1).sum(0), n // inner)

    def of_all(x):
        return np.tile(x.reshape(n, -1).sum(0), n)

    order = ["A: tp", "B: tp and all", "A: tp", "C: dp", "B: tp, and all by XLA", "A: tp", "B: tp and all", "C: dp"]
    for number in range(ROUNDS):
        for name in order:
            run, expect = programs[name]
            x = (np.arange(n * COUNT) * (number + 3) % 101).astype(np.int32)
            y = run(jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index]))
            expected = expect(x)
            for shard in y.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index], f"{name}, round {number}")
    if jax.process_index() == 0:
        print(f'{{"programs": {len(order) * ROUNDS}, "devices": {n}, "processes": {jax.process_count()}}}', flush=True)


if __name__ == "__main__":
    main()
