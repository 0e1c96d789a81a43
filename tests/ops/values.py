"""Part of the contract: element types, sizes, pytrees."""

import functools
import itertools

import collective
import jax
import numpy as np
import pytest
from collective import INTEGERS
from harness import OURS, assert_same, compare, run

# Elements of two bytes per rank: none, one per block, a prime, more than a tile of the reductions, 1 MiB.
SIZES = [(0,), (8, 0), (8,), (16, 1), (8, 7), (8, 4099), (1 << 19,)]
RARE = pytest.param([name for name in collective.ALL_DTYPES if name not in collective.COMMON], marks=pytest.mark.full)


class Values(collective.Collective):
    def test_pytree(self, mesh, rng):
        tree = {"a": self.integers(rng), "b": (rng.integers(0, 9, (8, 8, 2)), None), "c": []}
        tree["b"] = (tree["b"][0].astype(np.int32), None)
        got = compare(functools.partial(self.call, axes="gpu"), mesh, tree)
        assert_same(got["b"][0], self.oracle(tree["b"][0], mesh.shape, "gpu"))

    def test_sizes(self, mesh, rng):
        xs = [rng.integers(-64, 64, (8, *block)).astype(np.int16) for block in SIZES]
        got = run(lambda *xs: [[self.call(OURS, x, axes) for axes in ("gpu", ("node", "gpu"))] for x in xs], mesh, *xs)
        for x, results in zip(xs, got, strict=True):
            assert_same(results, [self.oracle(x, mesh.shape, axes) for axes in ("gpu", ("node", "gpu"))])

    def elements(self, rng, shape, name):
        return collective.any_bits(rng, shape, name)

    @pytest.mark.parametrize("dtypes", [collective.COMMON, RARE], ids=["common", "rare"])
    def test_every_dtype(self, line, rng, dtypes):
        """Ops that move data keep every bit; the others accumulate small floats in f32 and round once."""
        algorithms = [None, "xla"] if self.op == "pbroadcast" else [None]  # XLA has none: it adds bits
        names = [name for name in self.dtypes if name in dtypes]
        names = [name for name in names if not (self.rounds and collective.NUM_NODES > 1) or name in INTEGERS]
        with jax.enable_x64(True):
            x = {name: self.elements(rng, (8, 48), name) for name in names}
            got = run(lambda x: [self.call(OURS, x, "gpu", algorithm=a) for a in algorithms], line, x)
            want = {name: self.oracle(x[name], line.shape, "gpu") for name in names}
        for found, name in itertools.product(got, names):
            assert_same({name: found[name]}, {name: want[name]}, bits=True)


class Arguments(collective.Collective):
    """For ops whose arguments change what is copied from where.

    Subclasses define `every`: {block: cases of arguments} for groups of n ranks, and `runs`: cases for long blocks.
    """

    @pytest.mark.parametrize("axes", ["gpu", ("node", "gpu")], ids=str)
    def test_every_argument(self, mesh, rng, axes):
        """The cases that `every` names, in which strides, sources and destinations differ."""
        for block, cases in self.every(4 if axes == "gpu" else 8).items():
            x = rng.integers(-99, 99, (8, *block)).astype(np.int16)
            got = run(lambda x, cases=cases: [self.call(OURS, x, axes, **case) for case in cases], mesh, x)
            assert_same(got, [self.oracle(x, mesh.shape, axes, **case) for case in cases])

    def test_short_and_long_runs(self, mesh, rng):
        """Runs of one element, of a cache line, of a page. Strided copies and reductions take other paths for each."""
        xs = [rng.integers(-99, 99, (8, 40, 16, width)).astype(np.int32) for width in (1, 5, 16, 1031)]
        want = [[self.oracle(x, mesh.shape, "gpu", **case) for case in self.runs] for x in xs]
        for name in collective.fitting(self.op, collective.MESH, ("gpu",)):
            call = functools.partial(self.call, OURS, axes="gpu", algorithm=name)
            got = run(lambda *xs, call=call: [[call(x, **case) for case in self.runs] for x in xs], mesh, *xs)
            assert_same(got, want)
