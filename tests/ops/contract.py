"""What every collective owes a user of JAX, whatever it computes: a base class for the tests of each op.

Guards against rules that are right for one transformation, axis order, algorithm or way of compiling and wrong for
another. The op is compared with jax.lax on the same random inputs, and with its NumPy oracle where jax.lax has a gap.
"""

import contextlib
import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from harness import LAX, OURS, assert_same, compare, lax_or_none, on_ranks, run, value
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxcomm._core import plan

import jaxcomm
from jaxcomm import _lowering, distributed
from jaxcomm.explain import NATIVE

NUM_NODES = int(os.environ.get("JAXCOMM_TEST_NODES", "1"))  # see tests/multiprocess/test_ops.py
MESH = {"node": 2, "gpu": 4}  # of the fixture `mesh`
BLOCK = (48, 8)  # divides into 1, 2, 3, 4, 6, 8 and 16 parts, and the second dimension into up to 8
VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])


def loss(f):
    return lambda x: jnp.sum(jnp.sin(f(jnp.cos(x))))


def stack(x, axis):
    return jnp.stack([x, 2 * x, 3 * x], axis)


def carry(f):
    """A step of a loop: the next carry has the type of x and depends on all of f(x)."""

    def step(x, scale):
        y = f(x * scale)
        return jnp.sin(x + 0.1 * jnp.mean(y)), y

    return step


SCALES = np.array([0.5, 1, 2], np.float32)


def while_loop(f, x):
    step = carry(f)
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, step(s[1], 0.5 + s[0])[0]), (0, x))[1]


def cond(f, x, axes=("node", "gpu")):
    everywhere = lax.psum(jnp.sum(x), axes)  # the same on all ranks, as it must be
    return [lax.cond(pick, lambda x: f(2 * x), lambda x: f(x + 1), x) for pick in (everywhere > 1e9, everywhere < 1e9)]


def nested_jit(f, x):
    g = jax.jit(f)
    return g(x), g(2 * x), jax.jit(lambda x: g(3 * x))(x)


# Each takes the op as a function of one array, and the array.
DERIVATIVES = {
    "grad": lambda f, x: jax.value_and_grad(loss(f))(x),
    "jvp": lambda f, x: jax.jvp(lambda x: f(jnp.sin(x)), (x,), (jnp.cos(x),)),
    "linearize": lambda f, x: (lambda y, df: (y, df(jnp.cos(x)), df(2 * x)))(*jax.linearize(f, x)),
    "vjp": lambda f, x: (lambda y, pull: (y, pull(jnp.cos(y))))(*jax.vjp(f, x)),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(loss(f)), (x,), (jnp.cos(x),)),
    "grad of checkpoint": lambda f, x: jax.grad(loss(jax.checkpoint(lambda x: jnp.sin(f(jnp.sin(x))))))(x),
    "grad of vmap": lambda f, x: jax.grad(loss(jax.vmap(f)))(stack(x, 0)),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(loss(f)), 2, 1)(stack(x, 2)),
    "grad of scan": lambda f, x: jax.grad(loss(lambda x: lax.scan(jax.checkpoint(carry(f)), x, SCALES)[0]))(x),
}
TRANSFORMATIONS = {
    "jit": lambda f, x: f(x),
    "vmap 0": lambda f, x: jax.vmap(f)(stack(x, 0)),
    "vmap 1 to -1": lambda f, x: jax.vmap(f, 1, -1)(stack(x, 1)),
    "vmap 2 to 1": lambda f, x: jax.vmap(f, 2, 1)(stack(x, 2)),
    "vmap of vmap": lambda f, x: jax.vmap(jax.vmap(f, 2), 0)(stack(stack(x, 2), 0)),
    "vmap of a constant": lambda f, x: jax.vmap(lambda s: f(x) * s)(jnp.asarray(SCALES)),
    "checkpoint": lambda f, x: jax.checkpoint(lambda x: jnp.sin(f(jnp.sin(x))))(x),
    "scan": lambda f, x: lax.scan(carry(f), x, SCALES),
    "scan unrolled": lambda f, x: lax.scan(carry(f), x, SCALES, unroll=True),
    "while": while_loop,
    "cond": cond,
    "nested jit": nested_jit,
}


SETTINGS = [("gpu", True), (("node", "gpu"), False)]
GROUPS = [
    *(({"a": 8 // n, "b": n}, ("b",)) for n in (1, 2, 4, 8)),
    ({"a": 1, "b": 3}, ("b",)),
    ({"a": 6}, ("a",)),
    ({"a": 2, "b": 4}, ("a", "b")),
    ({"a": 2, "b": 4}, ("b", "a")),
    ({"a": 2, "b": 3}, ("a", "b")),
    ({"a": 2, "b": 2, "c": 2}, ("a", "b", "c")),
    ({"a": 2, "b": 2, "c": 2}, ("c", "a")),
]
INTEGERS = (
    "int2", "uint2", "int4", "int8", "int16", "int32", "int64", "uint4", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
SMALL_FLOATS = (
    "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16",
)  # fmt: skip
ALL_DTYPES = ("bool", *INTEGERS, *SMALL_FLOATS, "float32", "float64", "complex64", "complex128")
# Per rank, in two bytes an element: empty, one element a block, a prime, more than a tile of the reductions and 1 MiB.
SIZES = [(0,), (8, 0), (8,), (16, 1), (8, 7), (8, 4099), (1 << 19,), (65528, 11)]


def make_mesh(sizes, devices=None):
    devices = np.array(jax.devices() if devices is None else devices)[: math.prod(sizes.values())]
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def fitting(op, sizes, axes):
    """The algorithms that take a group over these axes of a mesh {axis: size} of the first devices."""
    rows = _lowering.replica_groups(tuple(sizes), tuple(sizes.values()), axes, None)
    per_node = {distributed.ranks_per_node(row // (8 // NUM_NODES)) for row in rows}
    one_node = per_node == {rows.shape[1]}
    if one_node:
        per_node = {_lowering.ranks_per_node(tuple(sizes[a] for a in axes), None)}
    per_node = per_node.pop() if len(per_node) == 1 else 1
    nodes, source_of = rows.shape[1] // per_node, range(rows.shape[1])
    request = plan.Request(NATIVE[op], nodes, per_node, 8, source_of=source_of, all_addressable=one_node)
    return [name for name in jaxcomm.algorithms(op) if plan.supports(request, name)]


def any_bits(rng, shape, name):
    """Random elements: all values of integers, all bit patterns of floats, NaN payloads among them."""
    dtype = jnp.dtype(name)
    if name == "bool" or name in INTEGERS:
        bits = 1 if name == "bool" else int(name.lstrip("uint"))
        values = rng.integers(0, min(2**bits, 256), (*shape, max(bits // 8, 1)), np.uint8)
        return values[..., 0].astype(dtype) if bits < 8 else values.view(dtype)[..., 0]
    if name == "float4_e2m1fn":  # four bits of a byte
        return rng.integers(0, 16, shape, np.uint8).view(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


class Contract:
    """Subclasses say what the op is called, with what arguments, and what jax.lax lacks."""

    op: str
    dtypes: tuple = ALL_DTYPES
    exact = True  # integers stay integers
    differentiable = True
    rounds = False  # adds floats; between nodes in an order that depends on the plan

    @staticmethod
    def arguments(n):
        """Of a canonical call in a group of n, on a block of shape BLOCK."""
        return {}

    variant: dict = {}  # noqa: RUF012  (other arguments, for half of the transformations)

    def call(self, library, x, axes, groups=None, **more):
        n = lax.axis_size(axes) if groups is None else len(groups[0])
        if groups is not None:
            more["axis_index_groups"] = groups
        return getattr(library, self.op)(x, axes, **{**self.arguments(n), **more})

    def oracle(self, x, sizes, axes, groups=None, **changed):
        """What the ranks of a mesh {axis: size} should get; one row per rank, in and out."""
        axes = axes if isinstance(axes, tuple) else (axes,)
        n = math.prod(sizes[a] for a in axes) if groups is None else len(groups[0])
        rows = x.reshape(*sizes.values(), *x.shape[1:])
        arguments = {**self.arguments(n), **changed}
        y = reference.on_mesh(getattr(reference, self.op), rows, sizes, axes, groups, **arguments)
        return y.reshape(len(x), *y.shape[len(sizes) :])

    def integers(self, rng, rows=8, block=BLOCK):
        """Values whose sums are exact."""
        return rng.integers(-64, 64, (rows, *block)).astype(np.float32)

    # Groups.

    @VMA
    @pytest.mark.parametrize("axes", ["gpu", "node", ("node", "gpu"), ("gpu", "node"), ("gpu",)], ids=str)
    def test_axes(self, mesh, rng, axes, check_vma):
        x = self.integers(rng)
        program = functools.partial(self.call, axes=axes)
        got = run(functools.partial(program, OURS), mesh, x, check_vma=check_vma)
        assert_same(got, self.oracle(x, mesh.shape, axes))
        # There jax.lax 0.10 takes ranks in the order of the mesh, and 0.12 refuses.
        if not (self.op == "ppermute" and axes == ("gpu", "node")):
            assert_same(got, run(functools.partial(program, LAX), mesh, x, check_vma=check_vma))

    @pytest.mark.parametrize(("sizes", "axes"), GROUPS, ids=str)
    def test_every_algorithm_in_groups(self, rng, sizes, axes):
        """Integers, so that all algorithms agree in every bit. The selection table's choice is among them."""
        x = self.integers(rng, math.prod(sizes.values()))
        names = [None, *fitting(self.op, sizes, axes)]
        got = run(lambda x: {str(a): self.call(OURS, x, axes, algorithm=a) for a in names}, make_mesh(sizes), x)
        assert len(names) > 1
        assert_same(got, dict.fromkeys(map(str, names), self.oracle(x, sizes, axes)), rtol=None if self.exact else 1e-6)

    def test_axes_of_size_one(self, rng):
        x, sizes = self.integers(rng), {"one": 1, "gpu": 8, "uno": 1}
        for axes in (("one", "gpu"), ("gpu", "uno"), "one", ("one", "uno")):
            got = compare(functools.partial(self.call, axes=axes), make_mesh(sizes), x)
            assert_same(got, self.oracle(x, sizes, axes))

    # Meshes.

    def test_permuted_devices(self, rng):
        x, sizes = self.integers(rng), {"node": 2, "gpu": 4}
        permuted = make_mesh(sizes, [jax.devices()[i] for i in (5, 2, 7, 0, 3, 6, 1, 4)])
        got = compare(functools.partial(self.call, axes=("node", "gpu")), permuted, x)
        assert_same(got, self.oracle(x, sizes, ("node", "gpu")))

    @pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
    def test_partly_manual_mesh(self, rng, kind, check_vma):
        """The axis node is not manual: x is sharded over it all the same."""
        mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(kind, kind))
        x = self.integers(rng, 4 * 48, (3, 6))

        def outcome(library, mesh, context):
            f = jax.shard_map(
                lambda x: self.call(library, x, "gpu")[None], mesh=mesh, in_specs=P("gpu"), out_specs=P("gpu"),
                axis_names={"gpu"}, check_vma=check_vma,
            )  # fmt: skip
            with context:
                placed = jax.device_put(x, NamedSharding(mesh, P("gpu", None, "node")))
                gradient = jax.jit(jax.grad(loss(f)))(placed) if self.differentiable else placed
                y = jax.jit(lambda x: f(x + 1))(placed)
                return *value((y, gradient)), jax.typeof(y).sharding

        explicit = kind == AxisType.Explicit
        result, gradient, sharding = outcome(OURS, mesh, jax.set_mesh(mesh) if explicit else contextlib.nullcontext())
        assert_same(result, self.oracle(x.reshape(4, 48, 3, 6) + 1, {"gpu": 4}, "gpu"))
        assert not explicit or sharding.spec == P("gpu", None, None, "node")
        # jax.lax does not take every op on explicit axes.
        automatic = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
        assert_same(gradient, outcome(LAX, automatic, contextlib.nullcontext())[1], rtol=1e-5)

    def test_mesh_of_explicit_axes(self, rng):
        x, sizes = self.integers(rng), {"node": 2, "gpu": 4}
        mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Explicit,) * 2)
        placed = jax.device_put(x, NamedSharding(mesh, P(("node", "gpu"))))
        with jax.set_mesh(mesh):
            got = run(functools.partial(self.call, OURS, axes=("node", "gpu")), mesh, placed)
        assert_same(got, self.oracle(x, sizes, ("node", "gpu")))

    def test_mesh_without_devices(self, mesh, rng):
        x = self.integers(rng)
        f = on_ranks(functools.partial(self.call, OURS, axes="gpu"), mesh.abstract_mesh)
        if jax.process_count() > 1:  # nothing tells then which devices are of which process
            with pytest.raises(NotImplementedError, match="AbstractMesh"):
                jax.jit(f)(jax.device_put(x, NamedSharding(mesh, P(("node", "gpu")))))
            return
        got = jax.jit(f)(jax.device_put(x, NamedSharding(mesh, P(("node", "gpu")))))
        assert_same(value(got), self.oracle(x, mesh.shape, "gpu"))

    # Transformations.

    @pytest.mark.parametrize(("axes", "check_vma"), SETTINGS, ids=["vma", "no_vma"])
    @pytest.mark.parametrize("name", TRANSFORMATIONS)
    def test_transformation(self, mesh, rng, name, axes, check_vma):
        x = rng.standard_normal((8, *BLOCK), np.float32)

        def program(library, x):
            more = {} if check_vma else self.variant
            return TRANSFORMATIONS[name](functools.partial(self.call, library, axes=axes, **more), x)

        compare(program, mesh, x, rtol=1e-5, check_vma=check_vma)

    @pytest.mark.parametrize(("axes", "check_vma"), SETTINGS, ids=["vma", "no_vma"])
    @pytest.mark.parametrize("name", DERIVATIVES)
    def test_derivative(self, mesh, rng, name, axes, check_vma):
        x = rng.standard_normal((8, *BLOCK), np.float32)

        def program(library, x):
            more = {} if check_vma else self.variant
            return DERIVATIVES[name](functools.partial(self.call, library, axes=axes, **more), x)

        if self.differentiable:
            compare(program, mesh, x, rtol=1e-4, check_vma=check_vma)
            return
        for library in (OURS, LAX):
            with pytest.raises((NotImplementedError, ValueError), match=self.op):
                run(functools.partial(program, library), mesh, x, check_vma=check_vma)

    @VMA
    def test_grad_of_shard_map(self, mesh, rng, check_vma):
        x = rng.standard_normal((8, *BLOCK), np.float32)

        def gradient(library):
            f = on_ranks(functools.partial(self.call, library, axes=("node", "gpu")), mesh, check_vma=check_vma)
            return value(jax.jit(jax.grad(loss(f)))(x))

        if self.differentiable:
            assert_same(gradient(OURS), gradient(LAX), rtol=1e-4)

    @pytest.mark.parametrize(("manual", "spmd"), [({"gpu"}, None), ({"node", "gpu"}, "node")], ids=["partial", "spmd"])
    def test_vmap_of_shard_map(self, mesh, rng, manual, spmd):
        x = rng.standard_normal((4, 2, *BLOCK), np.float32)
        batched = jax.device_put(x, NamedSharding(mesh, P("gpu", "node")))

        def outcome(library):
            f = jax.shard_map(
                lambda x: self.call(library, x[0], "gpu")[None], mesh=mesh, in_specs=P("gpu"), out_specs=P("gpu"),
                axis_names=manual,
            )  # fmt: skip
            return value(jax.jit(jax.vmap(f, 1, 1, spmd_axis_name=spmd))(batched))

        assert_same(outcome(OURS), outcome(LAX), rtol=1e-6)

    @VMA
    @pytest.mark.parametrize("axes", ["i", ("i", "gpu"), ("gpu", "i"), ("node", "i", "gpu")], ids=str)
    def test_vmap_over_a_named_axis(self, mesh, rng, axes, check_vma):
        x = rng.integers(-64, 64, (8, 2, *BLOCK)).astype(np.float32)
        virtual = {**mesh.shape, "i": 2}
        want = self.oracle(x.reshape(16, *BLOCK), virtual, axes)

        def program(library, x):
            return jax.vmap(functools.partial(self.call, library, axes=axes), axis_name="i")(x)

        try:
            got = run(functools.partial(program, OURS), mesh, x, check_vma=check_vma)
        except NotImplementedError as error:
            assert self.op in str(error)
            assert lax_or_none(program, mesh, x, check_vma=check_vma) is None
        else:
            assert_same(got, want.reshape(8, 2, *want.shape[1:]))

    @pytest.mark.parametrize("axes", ["i", ("i", "gpu")], ids=str)
    def test_vmap_of_a_constant_over_a_named_axis(self, mesh, rng, axes):
        x = self.integers(rng)
        want = self.oracle(np.repeat(x, 2, 0), {**mesh.shape, "i": 2}, axes)

        def program(x):
            return jax.vmap(lambda _: self.call(OURS, x, axes), axis_name="i", axis_size=2)(jnp.arange(2))

        try:
            got = run(program, mesh, x, check_vma=False)
        except NotImplementedError as error:
            assert self.op in str(error)
        else:
            assert_same(got, want.reshape(8, 2, *want.shape[1:]))

    # Ways to compile and run.

    def test_eager(self, mesh, rng):
        x = self.integers(rng)
        for check_vma in (True, False):
            got = on_ranks(functools.partial(self.call, OURS, axes=("node", "gpu")), mesh, check_vma=check_vma)(x)
            assert_same(value(got), self.oracle(x, mesh.shape, ("node", "gpu")))

    def test_ahead_of_time(self, mesh, rng):
        x = self.integers(rng)
        f = jax.jit(on_ranks(functools.partial(self.call, OURS, axes=("node", "gpu")), mesh))
        compiled = f.lower(jax.ShapeDtypeStruct(x.shape, x.dtype)).compile()
        for factor in (1, 3):
            assert_same(value(compiled(factor * x)), self.oracle(factor * x, mesh.shape, ("node", "gpu")))

    def test_export_round_trip(self, mesh, rng):
        x = self.integers(rng)
        sharding = NamedSharding(mesh, P(("node", "gpu")))
        f = jax.jit(on_ranks(functools.partial(self.call, OURS, axes=("gpu", "node")), mesh), in_shardings=sharding)
        checks = [jax.export.DisabledSafetyCheck.custom_call(f"jaxcomm_{NATIVE[self.op]}")]
        exported = jax.export.export(f, disabled_checks=checks)(jax.ShapeDtypeStruct(x.shape, x.dtype))
        again = jax.export.deserialize(exported.serialize())
        got = jax.jit(again.call)(jax.device_put(x, sharding))
        assert_same(value(got), self.oracle(x, mesh.shape, ("gpu", "node")))

    def test_donation(self, mesh, rng):
        """The operand's memory may become the result's while peers still read it."""
        x = rng.integers(-64, 64, (8, 64, 33)).astype(np.float32)
        sharding = NamedSharding(mesh, P(("node", "gpu")))

        def body(x):
            y = self.call(OURS, x + 1, ("node", "gpu"))
            return x * 0 + jnp.sum(y), self.call(OURS, self.fold(y, x.shape), "gpu")

        f = jax.jit(on_ranks(body, mesh), donate_argnums=0)
        first, second = f(jax.device_put(x, sharding)), f(donated := jax.device_put(x, sharding))
        assert donated.is_deleted()
        first, second = value((first, second))
        assert_same(first, second)
        y = self.oracle(x + 1, mesh.shape, ("node", "gpu"))
        folded = np.stack([np.asarray(self.fold(row, x.shape[1:])) for row in y])
        assert_same(first[1], self.oracle(folded, mesh.shape, "gpu"))

    @staticmethod
    def fold(y, shape):
        """Some of y's elements, in another shape."""
        return jnp.resize(y, shape)

    def test_result_feeds_on_its_operand_later(self, mesh, rng):
        """XLA must not reuse the operand's buffer for anything before all peers have read it."""
        x = self.integers(rng, block=(64, 33))

        def body(library, x):
            total = x * 0
            for i in range(6):
                y = self.call(library, x * (i + 1), ("node", "gpu"))
                total = total + x * (i - 2) + jnp.max(y)
            return total

        compare(body, mesh, x)

    def test_one_custom_call_per_use(self, mesh, rng):
        x = self.integers(rng)
        text = jax.jit(on_ranks(functools.partial(self.call, OURS, axes="gpu"), mesh)).lower(x).as_text()
        assert text.count(f"@jaxcomm_{NATIVE[self.op]}(") == 1

    def test_equal_calls_are_not_merged(self, mesh, rng):
        x = self.integers(rng)

        def body(x):
            return [self.call(OURS, x, "gpu") for _ in range(3)]

        compiled = jax.jit(on_ranks(body, mesh)).lower(x).compile().as_text()
        assert compiled.count(f'custom_call_target="jaxcomm_{NATIVE[self.op]}"') == 3
        assert_same(run(body, mesh, x), [self.oracle(x, mesh.shape, "gpu")] * 3)

    # Types and sizes.

    @VMA
    def test_pytree(self, mesh, rng, check_vma):
        tree = {"a": self.integers(rng), "b": (rng.integers(0, 9, (8, 8, 2)), None), "c": []}
        tree["b"] = (tree["b"][0].astype(np.int32), None)
        got = compare(functools.partial(self.call, axes="gpu"), mesh, tree, check_vma=check_vma)
        assert_same(got["b"][0], self.oracle(tree["b"][0], mesh.shape, "gpu"))

    @pytest.mark.parametrize("block", SIZES, ids=str)
    def test_sizes(self, mesh, rng, block):
        x = rng.integers(-64, 64, (8, *block)).astype(np.int16)
        got = run(lambda x: [self.call(OURS, x, axes) for axes in ("gpu", ("node", "gpu"))], mesh, x)
        assert_same(got, [self.oracle(x, mesh.shape, axes) for axes in ("gpu", ("node", "gpu"))])

    @VMA
    def test_operand_that_is_the_same_on_all_ranks(self, mesh, rng, check_vma):
        x = self.integers(rng)[0]

        def outcome(library):
            f = jax.shard_map(
                lambda x: self.call(library, x, ("node", "gpu"))[None], mesh=mesh, in_specs=P(),
                out_specs=P(("node", "gpu")), check_vma=check_vma,
            )  # fmt: skip
            return value(jax.jit(f)(x))

        assert_same(outcome(OURS), self.oracle(np.stack([x] * 8), mesh.shape, ("node", "gpu")))
        assert_same(outcome(OURS), outcome(LAX))

    def elements(self, rng, shape, name):
        return any_bits(rng, shape, name)

    def test_every_dtype(self, line, rng):
        """Ops that move data keep every bit; the others accumulate small floats in f32 and round once."""
        names = [name for name in self.dtypes if not (self.rounds and NUM_NODES > 1) or name in INTEGERS]
        with jax.enable_x64(True):
            x = {name: self.elements(rng, (8, 48), name) for name in names}
            got = run(functools.partial(self.call, OURS, axes="gpu"), line, x)
            want = {name: self.oracle(x[name], line.shape, "gpu") for name in names}
        for name in names:
            assert_same({name: got[name]}, {name: want[name]}, bits=True)


class GroupsContract(Contract):
    """For ops with axis_index_groups."""

    @VMA
    @pytest.mark.parametrize("size", [4, 2, 1, 8])
    def test_axis_index_groups(self, mesh, rng, size, check_vma):
        x, groups = self.integers(rng), np.array([6, 1, 0, 3, 7, 4, 2, 5]).reshape(-1, size).tolist()
        program = functools.partial(self.call, axes=("gpu", "node"), groups=groups)
        got = run(functools.partial(program, OURS), mesh, x, check_vma=check_vma)
        assert_same(got, self.oracle(x, mesh.shape, ("gpu", "node"), groups))
        from_lax = lax_or_none(program, mesh, x, check_vma=check_vma)
        assert from_lax is not None or check_vma
        if from_lax is not None:
            assert_same(got, from_lax)
