"""Random shardings of random arrays, and the check of a reshard. The oracle is NumPy's indexing of the whole array."""

import itertools
import math
import random

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxcomm

DTYPES = ["int8", "bool", "float32", "complex64", "uint16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4]
SHAPES = [(), (12,), (24, 12), (4, 6, 8), (12, 1, 4, 2), (0, 6), (12, 0)]


def random_mesh(rng):
    """A mesh over some devices in any order, of 1 to 3 axes."""
    devices = jax.devices()
    size = rng.choice([n for n in (1, 2, 3, 4, 6, 8) if n <= len(devices)])
    axes = []
    left = size
    while left > 1 and len(axes) < 2:
        axes.append(rng.choice([d for d in range(2, left + 1) if left % d == 0]))
        left //= axes[-1]
    axes.append(left)
    chosen = rng.sample(devices, size)
    return Mesh(np.array(chosen).reshape(axes), tuple("abc"[: len(axes)]))


def random_sharding(rng, shape):
    if rng.random() < 0.1:
        return SingleDeviceSharding(rng.choice(jax.devices()))
    mesh = random_mesh(rng)
    left = rng.sample(mesh.axis_names, len(mesh.axis_names))
    spec = []
    for n in shape:
        names = []
        while left and n % math.prod(mesh.shape[a] for a in [*names, left[-1]]) == 0 and rng.random() < 0.7:
            names.append(left.pop())
        spec.append(tuple(names) or None)
    return NamedSharding(mesh, P(*spec))


def values(shape, dtype, seed):
    bits = np.random.default_rng(seed).integers(0, 2, (*shape, 8))  # small integers are exact in all types
    return (bits @ (1 << np.arange(8) % 3)).astype(dtype) if shape else np.array(seed % 7).astype(dtype)


def place(x, sharding):
    """The array, or what a process without a shard of it passes."""
    own = sharding.addressable_devices
    if not own:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    shards = [jax.device_put(x[index], d) for d, index in sharding.addressable_devices_indices_map(x.shape).items()]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards, dtype=x.dtype)


def check(moved, x, sharding):
    assert moved.sharding == sharding and (moved.shape, moved.dtype) == (x.shape, x.dtype)
    assert {s.device for s in moved.addressable_shards} == set(sharding.addressable_devices)
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), x[shard.index])


def check_random(seed, number, **options):
    """Moves a list of `number` random arrays and checks every shard of it. The same in all processes."""
    rng = random.Random(seed)
    xs, sources, targets = [], [], []
    for i, dtype in zip(range(number), itertools.cycle(DTYPES)):
        shape = rng.choice(SHAPES)
        xs.append(values(shape, dtype, 100 * seed + i))
        sources.append(random_sharding(rng, shape))
        targets.append(random_sharding(rng, shape))
    arrays = [place(x, s) for x, s in zip(xs, sources, strict=True)]
    for moved, x, target in zip(jaxcomm.reshard(arrays, targets, **options), xs, targets, strict=True):
        check(moved, x, target)
    for array, x, source in zip(arrays, xs, sources, strict=True):
        if isinstance(array, jax.Array):
            check(array, x, source)
