"""The handlers for GPUs on XLA:CPU, which makes their state from the attributes and then finds no GPU."""

import jax
import numpy as np
import pytest

from jaxcomm import _native

CALL = {"op": "psum", "site": "here.py:1", "algorithm": "", "group_size": np.int64(1), "ranks_per_node": np.int64(1)}
CALL["max_sms"] = np.int64(0)
OWN = {
    "all_to_all": {"input_contiguous_count": np.int64(4), "output_contiguous_count": np.int64(4)},
    "all_gather": {"output_contiguous_count": np.int64(4)},
    "all_reduce": {"reduce_op": np.int64(1)},
    "reduce_scatter": {"input_contiguous_count": np.int64(4), "reduce_op": np.int64(0)},
    "permute": {"source_of": np.zeros(1, np.int64)},
    "broadcast": {"root": np.int64(0)},
    "barrier": {},
    "moe_one_shot": {n: np.int64(1) for n in ("align", "capacity", "choices", "num_experts", "slots", "tokens")},
}


@pytest.fixture(scope="module")
def target():
    """Registers the handlers with the CPU back end under names of their own."""
    module = _native.cuda()
    _native.register()
    jax.ffi.register_ffi_type("jaxcomm_cuda_call", module.cuda_state_type(), platform="cpu")
    jax.ffi.register_ffi_type("jaxcomm_moe_one_shot", module.moe_one_shot_state_type(), platform="cpu")
    for name, stages in module.cuda_targets().items():
        # XLA:CPU has no Prepare and no Initialize.
        kept = {stage: stages[stage] for stage in ("instantiate", "execute") if stage in stages}
        jax.ffi.register_ffi_target(f"{name}_of_cuda", kept, platform="cpu")
    return lambda name: f"jaxcomm_{name}_of_cuda"


def compiled(target, groups=(0,), **attributes):
    x = np.zeros(4, np.float32)
    call = jax.ffi.ffi_call(target, jax.typeof(x), has_side_effect=True)
    f = jax.jit(lambda rank, x: call(rank, x, groups=np.array(groups, np.int64), **attributes))
    return f.lower(np.int32(0), x).compile(), (np.int32(0), x)


@pytest.mark.parametrize("name", [*OWN, *(f"{name}_eager" for name in OWN if name != "moe_one_shot")])
def test_attributes_are_read_and_no_gpu_is_an_error(target, name):
    program, arguments = compiled(target(name), call=CALL, **OWN[name.removesuffix("_eager")])
    with pytest.raises(jax.errors.JaxRuntimeError, match="GPU"):
        jax.block_until_ready(program(*arguments))


def test_groups_must_be_of_equal_size(target):
    call = CALL | {"group_size": np.int64(2)}
    text = r"psum at here\.py:1: 3 devices cannot be split into groups of 2"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        compiled(target("all_reduce"), groups=(0, 1, 2), call=call, **OWN["all_reduce"])


@pytest.mark.parametrize(("name", "missing"), [(name, missing) for name in OWN for missing in OWN[name]])
def test_attributes_of_the_op_must_be_there(target, name, missing):
    rest = {attribute: value for attribute, value in OWN[name].items() if attribute != missing}
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"psum at here\\.py:1: attribute {missing} is missing"):
        compiled(target(name), call=CALL, **rest)


def test_done_passes_its_first_operand_on(target):
    x = np.arange(4, dtype=np.float32)
    done = jax.ffi.ffi_call(target("done"), jax.typeof(x), input_output_aliases={0: 0})
    np.testing.assert_array_equal(jax.jit(lambda x: done(x + 1, x, np.int32(3)))(x), x + 1)
    copied = jax.ffi.ffi_call(target("done"), jax.typeof(x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="must be aliased to the first operand"):
        jax.block_until_ready(jax.jit(lambda x: copied(x + 1, x))(x))
