"""explain, algorithms and topology: what they say must be what runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.explain import NATIVE


def operand(count, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((count,), dtype)


@pytest.mark.parametrize("op", NATIVE)
def test_every_op_and_algorithm_is_explained(op):
    for axis_sizes in (1, 8, (2, 4)):
        chosen = jaxcomm.explain(op, operand(64), axis_sizes)
        assert chosen.algorithm in jaxcomm.algorithms(op)
        assert chosen.num_nodes * chosen.ranks_per_node == np.prod(axis_sizes)
        assert chosen.predicted_time_s > 0
        assert chosen.reason in str(chosen) and chosen.source in str(chosen)
        assert len(chosen.steps_text(0).splitlines()) >= 1
        for algorithm in jaxcomm.algorithms(op):
            try:
                asked = jaxcomm.explain(op, operand(64), axis_sizes, algorithm=algorithm)
            except ValueError as error:
                assert algorithm in str(error) and "needs" in str(error)
            else:
                assert asked.algorithm == algorithm
                stepwise = "; without flags here, step by step" if algorithm.startswith("flagged") else ""
                assert asked.reason == "asked for" + stepwise


def test_bytes_follow_the_formulas():
    ring = jaxcomm.explain("all_gather", operand(100), 8, algorithm="ring")
    assert (ring.messages["node"], ring.bytes["node"]) == (7, 7 * 400)
    assert (ring.input_bytes, ring.output_bytes) == (400, 3200)
    two_levels = jaxcomm.explain("all_to_all", operand(64), (2, 4))
    assert two_levels.algorithm == "hierarchical"
    assert (two_levels.messages["network"], two_levels.bytes["network"]) == (1, 4 * 32)


def test_item_size_counts():
    assert jaxcomm.explain("psum", operand(64, jnp.bfloat16), 4).input_bytes == 128


def test_large_sums_are_cut_into_chunks():
    small, large = (jaxcomm.explain("psum", operand(count), 8, algorithm="direct") for count in (1 << 10, 1 << 22))
    assert large.steps > small.steps


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"op must be one of all_to_all, .* got 'allreduce'"):
        jaxcomm.explain("allreduce", operand(8), 8)
    with pytest.raises(ValueError, match="all_to_all: 9 elements do not divide into 8"):
        jaxcomm.explain("all_to_all", operand(9), 8)
    with pytest.raises(ValueError, match="psum: unknown algorithm 'fast'; known are direct"):
        jaxcomm.explain("psum", operand(8), 8, algorithm="fast")
    with pytest.raises(ValueError, match=r"psum_scatter: .*recursive_halving.* needs a power of two"):
        jaxcomm.explain("psum_scatter", operand(6), 6, algorithm="recursive_halving")
    with pytest.raises(ValueError, match=r"psum: axis_sizes must be positive"):
        jaxcomm.explain("psum", operand(8), (2, 0))


def test_topology_describes_this_process():
    topology = jaxcomm.topology()
    assert (topology.nodes, topology.ranks) == (((0,),), (jax.local_device_count("cpu"),))
    assert [link.name for link in topology.links] == ["self", "node", "network"]
    assert "GB/s" in str(topology)


def test_mesh_keeps_the_order_of_devices():
    mesh = jaxcomm.make_mesh((2, 3), ("node", "gpu"), devices=jax.devices()[::-1][:6])
    assert mesh.axis_names == ("node", "gpu")
    assert mesh.devices.tolist() == np.array(jax.devices()[2:]).reshape(2, 3).tolist()
    with pytest.raises(ValueError, match="need 9 devices, got 8"):
        jaxcomm.make_mesh((3, 3), ("node", "gpu"))
