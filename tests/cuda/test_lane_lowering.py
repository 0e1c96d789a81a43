"""Lowering of start and done for GPUs: the function that XLA runs on its stream for collectives, and the end of it.

XLA:GPU of jaxlib 0.10.2 and 0.12.0.1 schedules such a program as these tests expect (docs/internals/cuda.md).
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import on_ranks

import jaxcomm
from jaxcomm import _compat, _config
from jaxcomm._processes import bootstrap

X = np.zeros((8, 16, 4), np.float32)
STARTS = {
    "psum_start": (lambda x, **k: jaxcomm.psum_start(x, "gpu", **k), "all_reduce"),
    "all_gather_start": (lambda x, **k: jaxcomm.all_gather_start(x, "gpu", **k), "all_gather"),
    "psum_scatter_start": (lambda x, **k: jaxcomm.psum_scatter_start(x, "gpu", tiled=True, **k), "reduce_scatter"),
    "all_to_all_start": (lambda x, **k: jaxcomm.all_to_all_start(x, "gpu", 0, 1, tiled=True, **k), "all_to_all"),
    "ppermute_start": (lambda x, **k: jaxcomm.ppermute_start(x, "gpu", [(0, 1)], **k), "permute"),
    "pbroadcast_start": (lambda x, **k: jaxcomm.pbroadcast_start(x, "gpu", 1, **k), "broadcast"),
}
ATTRIBUTES = 'mhlo.frontend_attributes = {_xla_stream_annotation = "collective", inlineable = "false"}'


def lowered(f, mesh, platforms=("cuda",)):
    return jax.jit(on_ranks(f, mesh)).trace(X).lower(lowering_platforms=platforms).as_text()


def function(text, name):
    """Text of a private function of a program."""
    return re.search(rf"func\.func private @{name}\(.*?\n  \}}", text, re.S)[0]


@pytest.mark.parametrize("op", STARTS)
def test_a_start_is_a_function_on_the_stream_for_collectives(mesh, op):
    """A target that XLA does not capture into CUDA graphs; the values to wait for are operands, the rank is none."""
    start, native = STARTS[op]
    text = lowered(lambda x: start(x, after=(jnp.sin(x), x[0] + 1)).done(), mesh)
    ((result, name, operands, attributes),) = re.findall(r"(%\S+) = (?:func\.)?call @(\w+)\((.*?)\)(.*)", text)
    assert ATTRIBUTES in attributes
    _, sine, one = operands.split(", ")
    assert re.search(rf"{re.escape(sine)} = stablehlo.sine", text)
    assert re.search(rf"{re.escape(one)} = stablehlo.add", text)
    assert "partition_id" not in text
    inside = function(text, name)
    assert inside.count("stablehlo.") - inside.count("#stablehlo.") == 2, inside
    assert "stablehlo.constant dense<0> : tensor<i32>" in inside
    assert re.search(rf"custom_call @jaxcomm_{native}_eager\(%\w+, %arg0, %arg1, %arg2\)", inside)
    assert "asynchronous = 1 : i64" in inside
    assert f'op = "{op}"' in inside
    assert "has_side_effect = true" in inside
    assert re.search(rf"custom_call @jaxcomm_done\({re.escape(result)}, ", text)


def test_done_comes_after_the_values_that_it_names(mesh):
    """XLA waits for the function right before the first use of its result."""
    text = lowered(lambda x: jaxcomm.psum_start(x, "gpu", after=jnp.sin(x)).done(after=jnp.cos(x)), mesh)
    ((result, operands),) = re.findall(r"(%\S+) = func\.call @\w+\((.*?)\)", text)
    ((done, attributes),) = re.findall(r"custom_call @jaxcomm_done\((.*?)\)(.*)", text)
    first, operand, sine, cosine = done.split(", ")
    assert (first, operand, sine) == (result, *operands.split(", "))
    assert re.search(rf"{re.escape(cosine)} = stablehlo.cosine", text)
    assert "operand_index = 0" in attributes
    assert "optimization_barrier" not in text


def with_synchronous(x):
    pending = [jaxcomm.psum_start(x, "gpu"), jaxcomm.psum_start(2 * x, "gpu")]
    return jaxcomm.psum(x, "gpu"), [p.done() for p in pending]


def single(x):
    return jaxcomm.psum_start(x, "gpu").done()


def transposed(x):
    gather = lambda x: jaxcomm.all_gather_start(x, "gpu", tiled=True, after=jnp.sin(x)).done()  # noqa: E731
    return jax.grad(lambda x: jnp.sum(gather(x) ** 2))(x)


@pytest.mark.parametrize(
    ("f", "platforms", "outside", "inside"),
    [
        # A synchronous call is no function, and XLA may capture it.
        (with_synchronous, ("cuda",), ["all_reduce", "done", "done"], ["all_reduce_eager"] * 2),
        (transposed, ("cuda",), ["done", "done"], ["all_gather_eager", "reduce_scatter_eager"]),
        # On CPUs, a start is no function.
        (single, ("cpu", "cuda"), ["all_reduce", "done", "done"], ["all_reduce_eager"]),
    ],
    ids=["synchronous", "transposed", "platforms"],
)
def test_each_start_is_a_function_of_its_own(mesh, f, platforms, outside, inside):
    text = lowered(f, mesh, platforms)
    assert text.count(ATTRIBUTES) == len(inside)
    main, functions = text.split("func.func private", 1)
    assert sorted(re.findall(r"custom_call @jaxcomm_(\w+)", main)) == outside
    assert sorted(re.findall(r"custom_call @jaxcomm_(\w+)", functions)) == inside


def numbers(f, mesh, platforms=("cuda",)):
    """Numbers of the started calls of a program among equal ones."""
    return sorted(map(int, re.findall(r"asynchronous = 1.*number = (\d+) : i64", lowered(f, mesh, platforms))))


def test_equal_starts_of_a_program_are_numbered(mesh):
    """Ranks compare the order of their calls. Otherwise, they could not tell apart the leaves of a tree."""

    def leaves(x):
        return jax.tree.map(jnp.sum, jaxcomm.psum_start([x, x + 1, x[:8], x[8:]], "gpu").done())

    def unrolled(x):
        for _ in range(3):
            x = jaxcomm.ppermute_start(x, "gpu", [(0, 1)]).done()
        return x

    def shapes(x):  # of equal numbers of elements
        return [jaxcomm.psum_start(y, "gpu").done() for y in (x, x.reshape(2, -1), x.reshape(-1, 2))]

    def afters(x):
        return [jaxcomm.psum_start(x, "gpu", after=after).done() for after in ((), x[0], (x, x[0]))]

    def tangents(x):
        return jax.jvp(lambda x: jaxcomm.psum_start(x, "gpu").done(), (x,), (x,))

    def lines(x):
        y = jaxcomm.psum_start(x, "gpu").done()
        return jaxcomm.psum_start(y, "gpu").done()

    assert numbers(leaves, mesh) == numbers(leaves, mesh, ("cpu", "cuda")) == [0, 1, 2, 3]
    assert numbers(unrolled, mesh) == numbers(shapes, mesh) == numbers(afters, mesh) == [0, 1, 2]
    assert numbers(tangents, mesh) == [0, 1]
    assert numbers(lines, mesh) == [0, 0]
    assert numbers(leaves, mesh, ("cpu",)) == []
    assert lowered(leaves, mesh) == lowered(leaves, mesh)  # as in a process that has traced other programs


def test_buffers_of_started_transfers_are_ordinary_memory(mesh, monkeypatch):
    """No windows on them yet: see Lanes in docs/internals/cuda.md."""
    jax.clear_caches()
    monkeypatch.setattr(bootstrap, "config", lambda: _config.Config(symmetric_buffers=True))
    monkeypatch.setattr(_compat.jaxlib, "__version__", "0.12.0.1")
    assert "memory_spaces" in lowered(lambda x: jaxcomm.psum(x, "gpu"), mesh)
    text = lowered(lambda x: jaxcomm.psum_start(x, "gpu").done(), mesh)
    assert "memory_spaces" not in text
    assert "symmetric_buffers" not in text
    jax.clear_caches()
