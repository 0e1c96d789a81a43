"""--dtype bfloat16: sums of many gradients stay float32. In bfloat16, 256 + 1 is 256."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripts
from jax.sharding import PartitionSpec as P
from scripts import tiny
from training import TINY

from models.lm import comm as comm_lib
from models.lm import model as lm
from models.lm import train as train_lib
from models.moe import step as moe
from models.tp import parallel as tp
from models.zero import parallel as zero

full = pytest.mark.full
ROWS, WIDTH = 4, 3


def lookup_of_one_device(tokens, _):
    return lambda table: lm.embed(table, tokens, jnp.bfloat16)


def lookup_of_a_model(tokens, config):
    """The other parameters of a model are cast before they are used."""
    config = dataclasses.replace(config, dtype="bfloat16")
    return lambda table: lm.embed(lm.cast_model({"embed": table}, config)["embed"], tokens, jnp.bfloat16)


def lookup_of_tp(tokens, config):
    comm = comm_lib.load(config)
    return jax.shard_map(
        lambda table: tp.embed(table, tokens, comm, jnp.bfloat16),
        mesh=train_lib.make_mesh(config), in_specs=P("tensor"), out_specs=P(None, "tensor"), check_vma=False,
    )  # fmt: skip


@pytest.mark.parametrize("table_type", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("lookup", [lookup_of_one_device, lookup_of_a_model, lookup_of_tp])
def test_gradients_of_equal_tokens_are_added_in_float32(lookup, table_type):
    """1,000 tokens, of all rows of both ranks. All gradients are small integers, so their sums are exact in float32."""
    rng = np.random.default_rng(8)
    tokens = np.full((2, 500), 1, np.int32)
    tokens[0, 3], tokens[1, 7], tokens[1, 9] = 0, 3, 2
    ct = rng.integers(1, 4, (2, 500, WIDTH))
    wanted = np.zeros((ROWS, WIDTH))
    np.add.at(wanted, tokens, ct)
    assert wanted.max() > 1000
    f = lookup(tokens, tiny("tp", layout="1x2"))
    table = jnp.asarray(rng.integers(-9, 9, (ROWS, WIDTH)), table_type)
    found, grad = jax.jit(lambda x: (f(x), jax.vjp(f, x)[1](jnp.asarray(ct, jnp.bfloat16))[0]))(table)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found), np.asarray(table.astype(jnp.bfloat16))[tokens])
    # A table of bfloat16 has gradients of this type, which are rounded once.
    np.testing.assert_array_equal(grad, wanted.astype(table_type))


@pytest.mark.parametrize("comm", ["jaxcomm", pytest.param("lax", marks=full)])
def test_gradients_of_gathered_vectors_are_added_in_float32(comm):
    """The gradient of a rank is 257 + rank, which bfloat16 does not have. The vector is sent in bfloat16."""
    config = tiny("zero", comm=comm)
    use = zero.gather(comm_lib.load(config), jnp.bfloat16)

    def of_rank(part):
        complete, pull = jax.vjp(use, part)
        rank = jax.lax.axis_index(zero.AXES)
        return complete[None], pull(jnp.full_like(complete, 257) + rank)[0]

    mesh, spec = train_lib.make_mesh(config), P(zero.AXES)
    f = jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False))
    vector = np.linspace(0, 1, 16).astype(np.float32)
    complete, grad = f(vector)
    assert complete.dtype == grad.dtype == np.float32
    np.testing.assert_array_equal(complete, np.tile(vector.astype(jnp.bfloat16).astype(np.float32), (8, 1)))
    np.testing.assert_array_equal(grad, np.full(16, 8 * 257 + sum(range(8))))
    assert re.search(r"all_gather.*tensor<2xbf16>", f.lower(vector).as_text())


@pytest.mark.parametrize("comm", ["jaxcomm", pytest.param("lax", marks=full)])
def test_sums_of_bfloat16_to_parts_are_float32(comm):
    """Stages 1 and 2 sum gradients of bfloat16: 256 of the first rank, 1 of the seven others."""
    config = tiny("zero", comm=comm)

    def of_rank(_):
        x = jnp.where(jax.lax.axis_index(zero.AXES) == 0, 256, 1)
        return zero.sum_to_part(jnp.full(16, x, jnp.bfloat16), comm_lib.load(config))

    spec = P(zero.AXES)
    f = jax.shard_map(of_rank, mesh=train_lib.make_mesh(config), in_specs=spec, out_specs=spec, check_vma=False)
    found = jax.jit(f)(np.zeros(8))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.full(16, 256 + 7))


def scatters(text):
    """Types of the arrays to which a program adds rows."""
    return re.findall(r'"stablehlo\.scatter".*?\}\) : \(tensor<([^>]*)>', text, re.DOTALL)


CASES = [
    ("cp", {"layers": 1}),
    ("mesh", {"layout": "2x1x2x2", "experts": 0, "microbatches": 2}),
    ("pp", {"layout": "2x2", "rounds": 1, "microbatches": 2}),
    pytest.param("pp", {"layout": "2x2", "rounds": 1, "microbatches": 2, "schedule": "1f1b"}, marks=full),
    ("tp", {"layers": 1}),
    ("zero", {"layers": 1, "stage": 1}),
    ("zero", {"layers": 1, "stage": 3}),
    *(pytest.param("zero", {"layers": 1, "stage": stage}, marks=full) for stage in (0, 2)),
]


@pytest.mark.parametrize(("script", "options"), CASES)
def test_no_script_adds_rows_in_bfloat16(script, options):
    """The scatter of the embedding's derivative."""
    config = tiny(script, dtype="bfloat16", **options)
    program = scripts.program(config)
    found = scatters(program.step.lower(jax.eval_shape(program.init), scripts.tokens(config)).as_text())
    rows = lm.VOCAB // (config.ranks("tensor") if "tensor" in config.axes else 1)
    assert f"{rows}x{config.width}xf32" in found
    assert not [x for x in found if x.endswith("bf16")]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=full)])
def test_experts_do_not_change_the_lookup(mesh, dtype):
    config = dataclasses.replace(TINY, dtype=dtype)
    program = moe.build(config, mesh, comm_lib.load(config, sums=("psum",)))
    tokens = jax.ShapeDtypeStruct((config.batch, config.seq + 1), jnp.int32)
    found = scatters(program.step.lower(jax.eval_shape(program.init), tokens).as_text())
    assert [x for x in found if x.startswith(f"{lm.VOCAB}x{config.width}x")] == [f"{lm.VOCAB}x{config.width}xf32"]
