"""Mistakes in dispatch and combine on GPUs, the kernel aside, and in the prediction of their rows."""

from mutation.hand import Mutant

CHECK, EXCHANGE, EXPECTED = "jaxcomm/moe/check.py", "jaxcomm/moe/exchange.py", "jaxcomm/moe/expected.py"
PLACING = "jaxcomm/moe/places.py"
CALL, PROGRAM = "ffi/cuda/xla/call.cc", "ffi/cuda/program/call_program.cc"
ROW_ARGS, DEVICE_CALL = "ffi/cuda/program/row_args.cc", "ffi/cuda/runtime/device_call.cc"
ONE_SHOT, ONE_SHOT_SITE = "jaxcomm/moe/one_shot.py", "ffi/cuda/runtime/moe_one_shot.cc"
ONE_SHOT_CALL = "ffi/cuda/xla/moe_one_shot_call.cc"

ROWS, LOOPS, ROW_HEADER = "ffi/cuda/kernels/rows.cuh", "ffi/cuda/kernels/row_loops.cuh", "ffi/cuda/program/row_args.h"

LOWERING, EXPLAINED = "tests/cuda/test_moe_lowering.py", "tests/moe/test_expected.py"
ONE_SHOT_LOWERING = "tests/cuda/test_moe_one_shot_lowering.py"

MUTANTS = [
    Mutant(
        "an overflow by padding is not marked",
        CHECK,
        "jnp.where(overfull, padding[:, -1], 0)",
        "0 * padding[:, -1]",
        LOWERING,
    ),
    Mutant("groups after an overflow may be negative", PLACING, "jnp.maximum(sizes, 0)", "sizes", LOWERING),
    Mutant(
        "groups after an overflow may exceed the slots",
        PLACING,
        "own_counts = jnp.clip(own_counts, 0, sizes)",
        "own_counts = jnp.maximum(own_counts, 0)",
        LOWERING,
    ),
    Mutant(
        "unknown ids are not marked",
        CHECK,
        "jnp.where(unknown > 0, -unknown, ",
        "jnp.where(unknown < 0, -unknown, ",
        LOWERING,
    ),
    Mutant("nothing checks an overflow", EXCHANGE, "if layout.call.raises and ctx", "if False and ctx", LOWERING),
    Mutant("hosts are one node", "jaxcomm/_lowering.py", "and is_on_one_host(ctx, call)", "", LOWERING),
    Mutant(
        "rails are for one host too",
        "jaxcomm/_lowering.py",
        "if uses_xla(call, platform) or is_on_one_host(ctx, call):",
        "if uses_xla(call, platform):",
        LOWERING,
    ),
    Mutant(
        "rails are the default without a self-test between nodes",
        "jaxcomm/_lowering.py",
        "return call.algorithm is not None or _selftest_record.passed_between_nodes()",
        "return True",
        LOWERING,
    ),
    Mutant(
        "XLA's program adds the sums of a combine between nodes",
        EXCHANGE,
        "adds = one_node or _uses_rails(ctx, layout, platform)",
        "adds = one_node",
        LOWERING,
    ),
    Mutant(
        "the default between nodes takes sizes that the kernels do not",
        EXCHANGE,
        "return layout.call.algorithm is not None or fits_rails(tokens, choices, ctx.avals_in[-2].shape[1])",
        "return True",
        LOWERING,
    ),
    Mutant(
        "the default between nodes forgets the gradient",
        EXCHANGE,
        "marks = 12 * -(-tokens * choices // 64)",
        "marks = 12 * -(-tokens // 64)",
        LOWERING,
    ),
    Mutant(
        "between nodes, route refuses what dispatch checks",
        CHECK,
        'if platform != "cuda" or _lowering.uses_xla(call, platform):',
        "if not _lowering.uses_row_kernel(ctx, call, platform):",
        LOWERING,
    ),
    Mutant(
        "explain predicts rails without a self-test",
        "jaxcomm/_explain.py",
        "gin and _selftest_record.passed_between_nodes():",
        "gin:",
        EXPLAINED,
    ),
    Mutant(
        "explain counts the lists of a combine once per local rank",
        "jaxcomm/_explain.py",
        "choices_between * 2 / ranks_per_node",
        "choices_between * 2",
        EXPLAINED,
    ),
    Mutant(
        "a combine between nodes takes weights for ones",
        "ffi/cuda/program/rail_row_args.cc",
        "(operands.weights != nullptr) != (args.weight_bytes > 0)",
        "false",
        "test_cuda_row_calls",
    ),
    Mutant(
        "a combine that asks for rails inside a node fails",
        PROGRAM,
        'if (spec.algorithm == "hierarchical") direct.algorithm.clear();',
        'if (spec.algorithm == "hierarchical" && spec.collective == Collective::kDispatch) direct.algorithm.clear();',
        "test_cuda_row_calls",
    ),
    Mutant(
        "places of sums exceed their integers",
        PROGRAM,
        "!made->at_home && rows.num_rows * num_nodes > std::numeric_limits<int32_t>::max()",
        "false",
        "test_cuda_rail_combine",
    ),
    Mutant(
        "rows for other nodes are counted per choice",
        EXPECTED,
        "tokens * groups_of_token(num_nodes, num_experts, choices)",
        "tokens * choices",
        EXPLAINED,
    ),
    Mutant(
        "explain predicts a row per choice between nodes",
        "jaxcomm/_explain.py",
        "        once = (rows.between_nodes + numbers * sms / row_bytes) / counted\n",
        "",
        EXPLAINED,
    ),
    Mutant(
        "explain predicts rails without GIN",
        "jaxcomm/_explain.py",
        'algorithm == "hierarchical" and gin:',
        'algorithm == "hierarchical":',
        EXPLAINED,
    ),
    Mutant(
        "nodes without GIN run the kernel of rails",
        PROGRAM,
        "if (placement.inter_node != InterNode::kGin) {",
        "if (false) {",
        "test_cuda_row_calls",
    ),
    Mutant(
        "a dispatch between nodes numbers ranks as in the node",
        DEVICE_CALL,
        "rails.rows.comm = rails.gin.comm;",
        "rails.rows.comm = comm;",
        "test_cuda_row_calls",
    ),
    Mutant(
        "the kernel of rails is not loaded",
        "ffi/cuda/runtime/communicator.cc",
        '  if (own.ok()) own = CheckCuda("kernels", LoadRailKernels());\n',
        "",
        "test_cuda_row_calls",
    ),
    Mutant(
        "sums of nodes are not rounded on GPUs",
        EXCHANGE,
        'layout.reduce == "home" or per_node == ctx.avals_in[-2].shape[0]',
        "True",
        LOWERING,
    ),
    Mutant("a rank receives every choice of a token", EXPECTED, "min(choices, local)", "choices", EXPLAINED),
    Mutant("groups have one expert", EXPECTED, "num_experts - num_experts // groups", "num_experts - 1", EXPLAINED),
    Mutant(
        "a row is read for each of its slots",
        LOOPS,
        "reinterpret_cast<Unit*>(slots + rows.slot[k] * row_bytes)[static_cast<int32_t>(i) - token * units] = unit;",
        "const auto at = static_cast<int32_t>(i) - token * units;\n"
        "          const auto* const from = reinterpret_cast<const Unit*>(rows.from[token]);\n"
        "          reinterpret_cast<Unit*>(slots + rows.slot[k] * row_bytes)[at] = from != nullptr ? from[at] : unit;",
        "test_cuda_row_reads",
    ),
    Mutant(
        "places are not grouped",
        ROW_HEADER,
        "args.choices_per_row > 1 && args.num_experts > args.num_ranks",
        "args.choices_per_row > 1 && false",
        "test_cuda_row_reads",
    ),
    Mutant(
        "the last token of a turn is read in two parts",
        ROWS,
        "if (first + num < total && tokens > 1) end",
        "if (first + num < 0 && tokens > 1) end",
        "test_cuda_row_reads",
    ),
    Mutant(
        "experts and slots are confused",
        CALL,
        "vector(3, &rows->expert)",
        "vector(2, &rows->expert)",
        "test_cuda_row_calls",
    ),
    Mutant(
        "calls have no weights", CALL, "if (num_weights > 0) rows", "if (num_weights < 0) rows", "test_cuda_row_calls"
    ),
    Mutant(
        "ranks may have different shapes",
        DEVICE_CALL,
        'communicator.CheckSameOnAllRanks("the hash of the shapes of the rows", shapes)',
        "OkStatus()",
        "test_cuda_row_calls",
    ),
    Mutant(
        "ranks without rows take no part in the check of shapes",
        DEVICE_CALL,
        "if (spec.collective == Collective::kDispatch || spec.collective == Collective::kCombine) {",
        "if (made->call_.rows) {",
        "test_cuda_row_calls",
    ),
    Mutant(
        "any type is added",
        ROW_ARGS,
        "(choices > 1 || spec.weighted != 0) && !HasSums(dtype)",
        "choices > 1 && !HasSums(dtype)",
        "test_cuda_row_calls",
    ),
    Mutant(
        "a dispatch without slots is not checked",
        PROGRAM,
        "(output_count == 0 && rows.num_choices == 0)",
        "output_count == 0",
        "test_cuda_row_calls",
    ),
    Mutant("rows of any length", ROW_ARGS, "args.piece_bytes > kMaxPieceBytes", "false", "test_cuda_row_calls"),
    Mutant(
        "numbers of a wrong routing have no sign",
        PROGRAM,
        "std::to_string(static_cast<int64_t>(report.expected))",
        "std::to_string(report.expected)",
        "test_cuda_rows",
    ),
    Mutant(
        "any number of experts fits into shared memory",
        "ffi/cuda/program/row_args.h",
        "kMaxSharedBytes = 48 << 10",
        "kMaxSharedBytes = 48 << 20",
        "test_cuda_row_calls",
    ),
    Mutant(
        "an overfull rank is reported as a timeout",
        PROGRAM,
        "!routing.empty()) return",
        "routing.empty() && false) return",
        "test_cuda_rows test_cuda_row_calls",
    ),
    Mutant(
        "rows of any size take one kernel",
        ONE_SHOT,
        "for most in (limit, LARGEST_ROWS_ON_GPUS)",
        "for most in (limit, 1 << 60)",
        ONE_SHOT_LOWERING,
    ),
    Mutant(
        "choices that may be dropped take one kernel",
        ONE_SHOT,
        '(algorithm is None and on_overflow == "raise" and size <= most)',
        "(algorithm is None and size <= most)",
        ONE_SHOT_LOWERING,
    ),
    Mutant(
        "one kernel takes more shared memory than there is",
        ONE_SHOT,
        "shared <= _MOST_SHARED_BYTES and",
        "shared > 0 and",
        ONE_SHOT_LOWERING,
    ),
    Mutant(
        "one kernel takes more slots than there are",
        ONE_SHOT,
        " and arena <= _MOST_ARENA_BYTES",
        " and arena > 0",
        ONE_SHOT_LOWERING,
    ),
    Mutant("one kernel takes calls without slots", ONE_SHOT, "spec.capacity > 0 and", "", ONE_SHOT_LOWERING),
    Mutant(
        "one kernel takes the first leaf",
        ONE_SHOT,
        "exchange.join(leaves), spec=dataclasses",
        "exchange.join(leaves[:1]), spec=dataclasses",
        ONE_SHOT_LOWERING,
    ),
    Mutant(
        "experts have the place of slots",
        ONE_SHOT_CALL,
        "{&buffers.expert, shape",
        "{&buffers.slot, shape",
        "test_cuda_moe_one_shot_calls",
    ),
    Mutant(
        "one kernel takes results of any size",
        ONE_SHOT_CALL,
        "fits = fits && static_cast",
        "fits = fits || static_cast",
        "test_cuda_moe_one_shot_calls",
    ),
    Mutant(
        "ranks of one kernel may have different shapes",
        ONE_SHOT_SITE,
        'communicator.CheckSameOnAllRanks("the hash of the shapes and of max_sms", shapes)',
        "OkStatus()",
        "test_cuda_moe_one_shot_calls",
    ),
    Mutant(
        "a rank refuses one kernel without a word to the others",
        ONE_SHOT_SITE,
        'communicator.AllDone("when it compared its sizes with the limits", args.status())',
        "args.status()",
        "test_cuda_moe_one_shot_calls",
    ),
    Mutant(
        "one kernel runs between nodes",
        ONE_SHOT_SITE,
        "placement.ranks_per_node != spec.group_size",
        "placement.ranks_per_node > spec.group_size",
        "test_cuda_moe_one_shot_calls",
    ),
]
