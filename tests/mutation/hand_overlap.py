"""Mistakes in start and done (jaxcomm/_pending.py, ffi/cpu/rendezvous.cc)."""

from mutation.hand import Mutant

PENDING, LOWERING, PRIMITIVE = (f"jaxcomm/{name}.py" for name in ("_pending", "_lowering", "_primitive"))
BESIDE, VALUES, DERIVED, MISUSE = (
    f"tests/overlap/test_{name}.py" for name in ("beside", "start_values", "start_transformations", "misuse")
)
CALLS = f"{VALUES}::test_program_has_the_calls"
SYNCHRONOUS = f"{VALUES}::test_gpus_and_other_platforms_run_the_synchronous_op"
TRANSPOSED = f"{DERIVED}::test_transposed_transfer_is_asynchronous_too"

MUTANTS = [
    Mutant(
        "done does not name the operand",
        PENDING,
        "done_p.bind(result, operand, *self._after, *values)",
        "done_p.bind(result, *self._after, *values)",
        BESIDE,
    ),
    Mutant(
        "done does not name the computations",
        PENDING,
        "done_p.bind(result, operand, *self._after, *values)",
        "done_p.bind(result, operand, *self._after)",
        f"{BESIDE} {CALLS}",
    ),
    Mutant(
        "done does not name what the start waits for",
        PENDING,
        "done_p.bind(result, operand, *self._after, *values)",
        "done_p.bind(result, operand, *values)",
        BESIDE,
    ),
    Mutant(
        "done is nothing",
        LOWERING,
        'if platform != "cpu" or not _compat.in_spmd_region(axis_context):',
        "if True:",
        CALLS,
    ),
    Mutant(
        "done outside of shard_map is a call",
        LOWERING,
        'if platform != "cpu" or not _compat.in_spmd_region(axis_context):',
        'if platform != "cpu":',
        f"{MISUSE}::test_done_in_another_program_and_outside_of_shard_map",
    ),
    Mutant(
        "a transfer of one rank has a done",
        PENDING,
        "None if alone else jnp.asarray(leaf)",
        "jnp.asarray(leaf)",
        f"{VALUES}::test_trees_empty_arrays_constants_and_groups_of_one",
    ),
    Mutant(
        "start does not wait",
        PENDING,
        "lambda leaf: transfer(leaf, *values)",
        "lambda leaf: transfer(leaf)",
        f"{CALLS} {SYNCHRONOUS}",
    ),
    Mutant(
        "start does not wait on GPUs",
        LOWERING,
        "return lax.optimization_barrier(xs)[",
        "return xs[",
        SYNCHRONOUS,
    ),
    Mutant(
        "the lowering forgets that the call is asynchronous",
        LOWERING,
        '    if call.asynchronous and platform == "cpu":',
        "    if False:",
        CALLS,
    ),
    Mutant(
        "calls on GPUs are asynchronous",
        LOWERING,
        '    if call.asynchronous and platform == "cpu":',
        "    if call.asynchronous:",
        SYNCHRONOUS,
    ),
    Mutant(
        "the transposed transfer has no done",
        PENDING,
        "return done_p.bind(y, x) if call.asynchronous else y",
        "return y",
        TRANSPOSED,
    ),
    Mutant(
        "the derivative waits for the values of the forward pass",
        PRIMITIVE,
        "return y, primitive.bind(tangents[0], call=call, **params)",
        "return y, primitive.bind(tangents[0], *primals[1:], call=call, **params)",
        f"{DERIVED}::test_derivatives_keep_no_values_to_wait_for",
    ),
    Mutant(
        "the derivative of done keeps the operands of the forward pass",
        PENDING,
        "else [operand]))",
        "else primals[1:]))",
        f"{DERIVED}::test_derivatives_keep_no_values_to_wait_for",
    ),
    Mutant(
        "vmap of done is batched where the operand is",
        PENDING,
        "(done_p.bind(*args), dims[0])",
        "(done_p.bind(*args), dims[1])",
        f"{DERIVED}::test_vmap_over_an_axis_of_the_group {DERIVED}::test_vmap",
    ),
    Mutant(
        "the thread of the last rank does the work of an asynchronous call",
        "ffi/cpu/rendezvous.cc",
        """    return WorkerPool::Get().SubmitOnce(
        [self = shared_from_this(), group_call, participant] { self->Start(group_call, participant, -1); });""",
        "    return Start(group_call, participant, -1);",
        "test_asynchronous",
    ),
    Mutant(
        "the attribute is not read",
        "ffi/common/call_spec.h",
        '  visit("asynchronous", spec.asynchronous);\n',
        "",
        "test_handlers",
    ),
]
