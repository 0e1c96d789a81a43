"""From mesh axes to replica groups: pure functions, and the custom call that comes out."""

import ast
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import OURS, on_ranks
from jax import lax

from jaxcomm import _dtypes
from jaxcomm._lowering import ranks_per_node, replica_groups
from jaxcomm._processes import placement


@pytest.mark.parametrize("axes", [("b",), ("c", "a"), ("b", "c", "a")], ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "halves"])
def test_groups_match_jax(axes, whole):
    sizes = {"a": 2, "b": 2, "c": 2}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    size = math.prod(sizes[a] for a in axes)
    # Without axis_index_groups, jax 0.12 writes down axes instead of ranks.
    groups = (tuple(range(size)),) if whole else tuple((i, size - 1 - i) for i in range(size // 2))
    f = on_ranks(lambda x: lax.all_gather(x, axes, axis_index_groups=groups), mesh)
    text = jax.jit(f).lower(np.zeros((8, 1), np.float32)).as_text()
    rows = re.search(r"replica_groups = dense<(.*?)>", text)[1]
    ours = replica_groups(tuple(sizes), tuple(sizes.values()), axes, None if whole else groups)
    np.testing.assert_array_equal(ours, ast.literal_eval(rows))


@pytest.mark.parametrize(
    ("sizes", "groups", "expected"),
    [
        ((8,), None, 8),
        ((2, 4), None, 4),
        ((1, 8), None, 8),
        ((8, 1), None, 8),
        ((2, 2, 2), None, 2),
        ((1,), None, 1),
        ((2, 4), ((0, 1), (2, 3)), 2),
    ],
)
def test_several_axes_declare_nodes(sizes, groups, expected):
    assert ranks_per_node(sizes, groups) == expected


def calls(body, mesh, x=None):
    """The attributes of each custom call, as the handlers get them."""
    text = jax.jit(on_ranks(body, mesh)).lower(np.zeros((8, 8), np.float32) if x is None else x).as_text()
    found = []
    for config in re.findall(r"custom_call @jaxcomm.*mhlo.backend_config = (.*), operand_layouts", text):
        numbers = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+) : i64", config)}
        found.append(numbers | dict(re.findall(r'(\w+) = "(.*?)"', config)))
        groups = re.search(r"groups = dense<\[(.*?)\]>", config)
        found[-1]["groups"] = [int(i) for i in groups[1].split(", ")]
    return found


def test_attributes_of_a_call(mesh):
    def body(x):
        y = OURS.psum(x, ("gpu", "node"), algorithm="ring", max_sms=3)
        return y + OURS.psum(x, ("node", "gpu")) + OURS.pmin(x, "gpu", axis_index_groups=[[2, 1], [0, 3]])

    near, far, groups = calls(body, mesh)
    # Axes in the order of the call: the last one is the node.
    assert (near["group_size"], near["ranks_per_node"], near["algorithm"], near["max_sms"]) == (8, 2, "ring", 3)
    assert (far["group_size"], far["ranks_per_node"], far["algorithm"], far["max_sms"]) == (8, 4, "", 0)
    assert (groups["group_size"], groups["ranks_per_node"]) == (2, 2)
    assert near["groups"] == [0, 4, 1, 5, 2, 6, 3, 7] and far["groups"] == list(range(8))
    assert groups["groups"] == [2, 1, 0, 3, 6, 5, 4, 7]
    assert [call["op"] for call in (near, far, groups)] == ["psum", "psum", "pmin"]
    line = body.__code__.co_firstlineno
    assert [call["site"] for call in (near, far)] == [f"test_lowering.py:{line + i} (body)" for i in (1, 2)]
    assert [call["reduce_op"] for call in (near, groups)] == [0, 2]


@pytest.mark.parametrize(("found", "ranks"), [(None, 4), (2, 2), (1, 1)])
def test_nodes_of_processes_come_before_those_of_axes(mesh, monkeypatch, found, ranks):
    """Axes declare nodes only inside a node: the memory of other nodes can't be read."""
    places = []

    def of_groups(mesh, rows):
        places.append(rows)
        return placement.GroupPlacement(np.arange(8, dtype=np.int32), found)

    monkeypatch.setattr(placement, "of_groups", of_groups)
    (call,) = calls(lambda x: OURS.psum(x, ("node", "gpu")), mesh)
    assert call["ranks_per_node"] == ranks
    np.testing.assert_array_equal(places, [[range(8)]])
    text = jax.jit(on_ranks(lambda x: OURS.psum(x, ("node", "gpu")), mesh)).lower(np.zeros((8, 1))).as_text()
    assert "processes = dense<[0, 1, 2, 3, 4, 5, 6, 7]>" in text
    if found is None:
        calls(lambda x: OURS.psum(x, ("node", "gpu"), algorithm="one_shot"), mesh)
    else:
        with pytest.raises(ValueError, match=r"psum at test_lowering.py:.*one_shot"):
            calls(lambda x: OURS.psum(x, ("node", "gpu"), algorithm="one_shot"), mesh)


def test_errors_of_processes_name_the_call(mesh, monkeypatch):
    def of_groups(mesh, rows):
        raise RuntimeError("process 3 did not connect")

    monkeypatch.setattr(placement, "of_groups", of_groups)
    named = r"^jaxcomm: psum at test_lowering.py:\d+ \(<lambda>\): while compiling, process 3"
    with pytest.raises(RuntimeError, match=named):
        calls(lambda x: OURS.psum(x, "gpu"), mesh)


def test_small_elements_travel_in_bytes():
    """XLA packs small elements, and the executors can't sum them."""
    small = ["int2", "int4", "uint2", "uint4", "float4_e2m1fn"]
    for name in small:
        assert jnp.dtype(name).name == name
        held = jnp.dtype(_dtypes.in_bytes(jnp.dtype(name)))
        values = np.arange(-8, 8).astype(jnp.dtype(name))
        assert held.itemsize == 1 and str(held) in ("int8", "uint8", "float8_e4m3fn")
        np.testing.assert_array_equal(values.astype(held).astype(np.float32), values.astype(np.float32))
        assert jnp.dtype(_dtypes.to_reduce(jnp.dtype(name))).itemsize == 4


def test_one_custom_call_per_op_and_no_reshard(mesh):
    """The compiled program holds our call, no collective of XLA and no copy of the operand."""
    x = np.zeros((8, 16, 4), np.float32)
    f = jax.jit(on_ranks(lambda x: OURS.all_to_all(x, ("node", "gpu"), 0, 1, tiled=True), mesh))
    text = f.lower(x).compile().as_text()
    assert text.count('custom_call_target="jaxcomm_all_to_all"') == 1
    for word in ("all-to-all(", "all-gather(", "all-reduce(", "collective-permute(", " copy(", " transpose("):
        assert word not in text
