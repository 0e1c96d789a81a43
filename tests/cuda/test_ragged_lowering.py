"""Lowering of ragged_all_to_all for GPUs: jaxcomm's kernel inside a node, XLA's collective elsewhere."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from harness import OURS, on_ranks

from jaxcomm import _config, _lowering
from jaxcomm._processes import placement

ROWS, OUTPUT_ROWS, SLICES = 6, 9, 8


def lowered(line, f, dtype=jnp.bfloat16, integers=jnp.int32):
    jax.clear_caches()
    x, y = (jax.ShapeDtypeStruct((8, rows, 5, 3), dtype) for rows in (ROWS, OUTPUT_ROWS))
    v = jax.ShapeDtypeStruct((8, SLICES), integers)
    return jax.jit(on_ranks(f, line)).trace(x, y, v, v, v, v).lower(lowering_platforms=("cuda",)).as_text()


def exchange(x, y, *vectors, **more):
    return OURS.ragged_all_to_all(x, y, *vectors, axis_name="gpu", **more)


def targets(text):
    return re.findall(r"custom_call @jaxcomm_(\w+)\(", text)


@pytest.mark.parametrize("algorithm", [None, "direct"])
def test_one_call_with_the_operands_that_the_handler_reads(line, algorithm):
    text = lowered(line, lambda *a: exchange(*a, algorithm=algorithm, max_sms=7))
    assert targets(text) == ["all_gather", "all_to_all_v"]
    assert "ragged_all_to_all(" not in text
    (found,) = re.findall(r"custom_call @jaxcomm_all_to_all_v\(.*?\)(.*?) : \((.*?)\) -> (\S+)", text)
    attributes, operands, result = found
    assert operands.split(", ") == [
        "tensor<i32>", f"tensor<{ROWS}x5x3xbf16>", f"tensor<{OUTPUT_ROWS}x5x3xbf16>", f"tensor<8x4x{SLICES}xi32>"
    ]  # fmt: skip
    assert result == f"tensor<{OUTPUT_ROWS}x5x3xbf16>"
    for name, value in {"row_count": 15, "group_size": 8, "max_sms": 7}.items():
        assert f"{name} = {value} : i64" in attributes, name
    # The handler writes into the memory of `output`.
    assert re.findall(r"operand_index = (\d+)", attributes) == ["2"]


def test_hosts_and_untested_gpus_use_xlas_collective(line, monkeypatch):
    with monkeypatch.context() as hosts:
        hosts.setattr(placement, "gpus_are_on_one_host", lambda mesh, rows: False)
        text = lowered(line, exchange)
        assert targets(text) == ["all_gather_eager"] and "@ragged_all_to_all(" in text
        with pytest.raises(
            NotImplementedError,
            match='algorithm "direct" runs inside a node of GPUs, which NVLink connects; pass algorithm="xla"',
        ):
            lowered(line, lambda *a: exchange(*a, algorithm="direct"))
    with monkeypatch.context() as untested:
        untested.setattr(_lowering, "config", lambda: dataclasses.replace(_config.config(), algorithm=None))
        text = lowered(line, exchange)
        assert targets(text) == [] and "@ragged_all_to_all(" in text
    text = lowered(line, lambda *a: exchange(*a, algorithm="xla"))
    assert targets(text) == [] and "@ragged_all_to_all(" in text
