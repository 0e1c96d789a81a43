"""Mistakes in ragged exchanges on GPUs and in their prediction. The kernel: tests/cuda/tools/mutants_of_slices.py."""

from mutation.hand import Mutant

OP, EXPLAIN = "jaxcomm/ops/ragged_all_to_all.py", "jaxcomm/_explain.py"
CALL, PROGRAM = "ffi/cuda/xla/call.cc", "ffi/cuda/program/call_program.cc"
ARGS, DEVICE_CALL = "ffi/cuda/program/slice_args.cc", "ffi/cuda/runtime/device_call.cc"

LOWERING, EXPLAINED = "tests/cuda/test_ragged_lowering.py", "tests/test_explain.py"
CALLS = "test_cuda_slice_calls"

PLANS, COMMUNICATOR = "ffi/plan/select_for_gpus.cc", "ffi/cuda/runtime/communicator.cc"

MUTANTS = [
    Mutant(
        "slices have an even number of channels", PLANS, "most > 2 && most % 2 == 0 ? most - 1 : most", "most", CALLS
    ),
    Mutant(
        "the kernel of slices is not loaded",
        COMMUNICATOR,
        '  JAXCOMM_RETURN_IF_ERROR(CheckCuda("kernels", '
        "LoadSliceKernel(bulk_copies_ ? kSliceStages : BulkStages{})));\n",
        "",
        CALLS,
    ),
    Mutant(
        "slices are loaded without memory for bulk copies",
        COMMUNICATOR,
        "LoadSliceKernel(bulk_copies_ ? kSliceStages : BulkStages{})",
        "LoadSliceKernel(BulkStages{})",
        CALLS,
    ),
    Mutant(
        "slices make no bulk copies",
        DEVICE_CALL,
        "    if (communicator.bulk_copies()) made->call_.slices->bulk = kSliceStages;\n",
        "",
        CALLS,
    ),
    Mutant(
        "the kernel of rows is not loaded",
        COMMUNICATOR,
        '  JAXCOMM_RETURN_IF_ERROR(CheckCuda("kernels", LoadRowKernel()));\n',
        "",
        "test_cuda_row_calls",
    ),
    Mutant(
        "explain predicts ragged exchanges without an arena",
        EXPLAIN,
        ' or op == "ragged_all_to_all"\n        selection',
        "\n        selection",
        EXPLAINED,
    ),
    Mutant(
        "GPUs always use XLA's collective",
        OP,
        'if platform == "cuda" and not _lowering.uses_row_kernel(ctx, call, platform):',
        'if platform == "cuda":',
        LOWERING,
    ),
    Mutant(
        "explain moves a slice through one thread block", EXPLAIN, "= item_bytes, 1\n", "= 1, item_bytes\n", EXPLAINED
    ),
    Mutant(
        "explain predicts plans that GPUs lack",
        EXPLAIN,
        '        if ranks_per_node != n or algorithm not in (None, "direct"):\n            raise ValueError(\n'
        "                f\"{op} is explained for GPUs of one node and algorithm 'direct' only: between",
        "        if ranks_per_node != n:\n            raise ValueError(\n"
        "                f\"{op} is explained for GPUs of one node and algorithm 'direct' only: between",
        EXPLAINED,
    ),
    Mutant(
        "the result may lie elsewhere",
        CALL,
        "buffers.output_count > 0 && start->untyped_data() != buffers.y",
        "false",
        CALLS,
    ),
    Mutant("tables are narrow", CALL, "rows->wide_table = wide;", "rows->wide_table = false;", CALLS),
    Mutant(
        "the start value may have any size",
        CALL,
        "static_cast<int64_t>(start->element_count()) != buffers.output_count",
        "false",
        CALLS,
    ),
    Mutant(
        "a call without rows is not checked",
        PROGRAM,
        "if (made->row_bytes == 0) return call;",
        "if (made->row_bytes == 0 || output_count == 0) return call;",
        CALLS,
    ),
    Mutant("ranks of other nodes are addressed", PROGRAM, "placement.ranks_per_node == spec.group_size && ", "", CALLS),
    Mutant(
        "a wrong slice is reported as a timeout",
        PROGRAM,
        "!slice.empty()) return",
        "slice.empty() && false) return",
        "test_cuda_slices",
    ),
    Mutant("rows may be cut", ARGS, "output_count % row != 0", "false", CALLS),
    Mutant("all thread blocks may be occupied", ARGS, "if (spec.max_sms > 0)", "if (false)", CALLS),
    Mutant(
        "thread blocks follow from the result",
        ARGS,
        "std::min(args.input_rows, args.output_rows)",
        "args.output_rows",
        CALLS,
    ),
    Mutant("any table fits", ARGS, "per_rank % num_ranks != 0", "false", "test_cuda_slices"),
    Mutant(
        "the arena is not reserved",
        PROGRAM,
        "  call.slices = *made;\n  call.arena.bytes = ArenaBytes(*made);\n",
        "  call.slices = *made;\n",
        CALLS,
    ),
]
