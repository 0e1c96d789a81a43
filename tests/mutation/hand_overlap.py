"""Mistakes in start and done (jaxcomm/_pending.py, ffi/cpu/rendezvous.cc)."""

from mutation.hand import Mutant

PENDING, LOWERING, PRIMITIVE = (f"jaxcomm/{name}.py" for name in ("_pending", "_lowering", "_primitive"))
BESIDE, VALUES, DERIVED, MISUSE = (
    f"tests/overlap/test_{name}.py" for name in ("beside", "start_values", "start_transformations", "misuse")
)
CALLS = f"{VALUES}::test_program_has_the_calls"
BY_XLA = f"{VALUES}::test_xla_runs_its_own_collective"
LANE = "tests/cuda/test_lane_lowering.py"
BOOTSTRAP, COMMUNICATOR, CALL = (
    f"ffi/cuda/{name}.cc" for name in ("nccl/bootstrap", "runtime/communicator", "xla/call")
)
LIMITS = "ffi/cuda/program/launch_limits.h"
TRANSPOSED = f"{DERIVED}::test_transposed_transfer_is_asynchronous_too"

MUTANTS = [
    Mutant(
        "done does not name the operand",
        PENDING,
        "done_p.bind(result, operand, *self._after, *values,",
        "done_p.bind(result, *self._after, *values,",
        BESIDE,
    ),
    Mutant(
        "done does not name the computations",
        PENDING,
        "done_p.bind(result, operand, *self._after, *values,",
        "done_p.bind(result, operand, *self._after,",
        f"{BESIDE} {CALLS}",
    ),
    Mutant(
        "done does not name what the start waits for",
        PENDING,
        "done_p.bind(result, operand, *self._after, *values,",
        "done_p.bind(result, operand, *values,",
        BESIDE,
    ),
    Mutant(
        "done is nothing",
        LOWERING,
        "if by_xla or not _compat.in_spmd_region(axis_context):",
        "if True:",
        CALLS,
    ),
    Mutant(
        "done outside of shard_map is a call",
        LOWERING,
        "if by_xla or not _compat.in_spmd_region(axis_context):",
        "if by_xla:",
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
        f"{CALLS} {BY_XLA}",
    ),
    Mutant(
        "XLA's own collective does not wait for the values of start(after=)",
        LOWERING,
        "return lax.optimization_barrier(xs)[",
        "return xs[",
        BY_XLA,
    ),
    Mutant(
        "the lowering forgets that the call is asynchronous",
        LOWERING,
        "    if call.asynchronous:\n        attributes[",
        "    if False:\n        attributes[",
        f"{CALLS} {LANE}",
    ),
    Mutant(
        "calls on GPUs are synchronous",
        LOWERING,
        'beside = platform == "cuda" and not by_xla and call.asynchronous',
        "beside = False",
        LANE,
    ),
    Mutant(
        "calls on GPUs are asynchronous",
        LOWERING,
        'beside = platform == "cuda" and not by_xla and call.asynchronous',
        'beside = platform == "cuda" and not by_xla',
        "tests/cuda/test_cuda_lowering.py",
    ),
    Mutant(
        "the rank is an operand of a start",
        LOWERING,
        "_compat.on_communication_stream(run_alone, *whole)",
        "_compat.on_communication_stream(run, rank, *whole)",
        LANE,
    ),
    Mutant(
        "XLA captures starts into CUDA graphs",
        LOWERING,
        "may_capture = not beside and placement",
        "may_capture = placement",
        LANE,
    ),
    Mutant(
        "the function of a start is inlined",
        "jaxcomm/_compat.py",
        '_xla_stream_annotation="collective", inlineable="false"',
        '_xla_stream_annotation="collective"',
        LANE,
    ),
    Mutant(
        "the function of a start has no stream",
        "jaxcomm/_compat.py",
        '_xla_stream_annotation="collective", inlineable="false"',
        'inlineable="false"',
        LANE,
    ),
    Mutant(
        "done of XLA's own collective is a call of jaxcomm's",
        LOWERING,
        'or (platform == "cuda" and selects_xla(algorithm, platform))',
        "or False",
        BY_XLA,
    ),
    Mutant(
        "windows on buffers of starts",
        LOWERING,
        "elif not call.asynchronous and no_windows(",
        "elif no_windows(",
        LANE,
    ),
    Mutant(
        "the lane is the communicator of synchronous calls",
        COMMUNICATOR,
        "  if (!lane_) lane_ = MakeAsynchronousLane();\n  return *lane_;",
        "  return this;",
        "test_cuda_lanes",
    ),
    Mutant(
        "every started call makes a lane",
        COMMUNICATOR,
        "if (!lane_) lane_ =",
        "lane_ =",
        "test_cuda_lanes",
    ),
    Mutant(
        "the lane has the channels of synchronous calls",
        COMMUNICATOR,
        "asynchronous_ ? channels.asynchronous : channels.synchronous",
        "channels.synchronous",
        "test_cuda_lanes",
    ),
    Mutant(
        "started calls run in the synchronous lane",
        "ffi/cuda/xla/call_site.cc",
        "  return communicator->AsynchronousLane();",
        "  return communicator;",
        "test_cuda_lanes",
    ),
    Mutant(
        "no SMs for the asynchronous lane",
        LIMITS,
        "free - channels.asynchronous, 1",
        "free, 1",
        "test_cuda_lanes",
    ),
    Mutant(
        "no SMs for the messages of the second lane",
        LIMITS,
        "2 * kSmsOfProxies",
        "kSmsOfProxies",
        "test_cuda_lanes test_cuda_communicator",
    ),
    Mutant(
        "the order of calls is not compared",
        BOOTSTRAP,
        "differs(hashes->front()))) return OkStatus();",
        "differs(hashes->front())) || true) return OkStatus();",
        "test_cuda_lanes",
    ),
    Mutant(
        "calls are compared without their place",
        CALL,
        "uint64_t hash = HashAttributes(state.spec);",
        "uint64_t hash = 0;",
        "test_cuda_lanes",
    ),
    Mutant(
        "after an error, nothing waits for started calls",
        "ffi/cuda/xla/call_stages.h",
        "if (!error.success()) Communicator::WaitForStarted(",
        "if (false) Communicator::WaitForStarted(",
        "test_cuda_lanes",
    ),
    Mutant(
        "the end of a long name is not exchanged",
        BOOTSTRAP,
        "whole_name.substr(whole_name.size() - std::min(whole_name.size(), kMostNameBytes))",
        "whole_name",
        "test_cuda_lanes",
    ),
    Mutant(
        "names are compared without their beginning",
        BOOTSTRAP,
        "if ((*name_hashes)[other] == (*name_hashes)[static_cast<size_t>(rank_)])",
        "if (names[other] == own_name)",
        "test_cuda_lanes",
    ),
    Mutant(
        "the values that a start waits for are refused",
        CALL,
        "args.size() > rets.size()",
        "args.size() == rets.size() + 1",
        "test_cuda_lanes",
    ),
    Mutant(
        "done does not check that its result is the operand",
        "ffi/cuda/xla/done.cc",
        "if (y->untyped_data() == result.untyped_data()) return",
        "return",
        "test_cuda_lanes",
    ),
    Mutant(
        "the transposed transfer has no done",
        PENDING,
        "return done_p.bind(y, x, algorithm=call.algorithm) if call.asynchronous else y",
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
        "else [operand]\n",
        "else primals[1:]\n",
        f"{DERIVED}::test_derivatives_keep_no_values_to_wait_for",
    ),
    Mutant(
        "vmap of done is batched where the operand is",
        PENDING,
        "(done_p.bind(*args, **given), dims[0])",
        "(done_p.bind(*args, **given), dims[1])",
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
    Mutant(
        "the element type of a start is not compared",
        CALL,
        "    hash = Mix(hash, static_cast<uint64_t>(buffers.dtype));\n",
        "",
        "test_cuda_lanes",
    ),
    Mutant(
        "the sizes of a start are not compared",
        CALL,
        "    hash = Mix(hash, static_cast<uint64_t>(buffers.input_count));\n"
        "    return Mix(hash, static_cast<uint64_t>(buffers.output_count));",
        "    return hash;",
        "test_cuda_lanes",
    ),
    Mutant(
        "equal starts are not told apart",
        "ffi/common/call_spec.h",
        '  visit("number", spec.number);\n',
        "",
        "test_cuda_lanes",
    ),
]
