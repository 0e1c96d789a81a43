"""Mutants of data movement, of reductions and of the fences between aliases. No data race shows them."""

from kernel_mutant import COPY, MULTICAST, PLAN, PROGRAM, REDUCE, REDUCTIONS, SYNC, Mutant

DATA = [
    Mutant("the tail stores one unit too many", COPY, "< count) store(", "<= count) store(", "reduce"),
    Mutant(
        "the body begins one unit too late",
        COPY,
        "first + (kUnroll - 1) * num_threads < count; first",
        "first + (kUnroll - 2) * num_threads < count; first",
        "reduce",
    ),
    Mutant("the tail leaves out the last thread's unit", COPY, "< count) units[k]", "< count - 1) units[k]", "reduce"),
    Mutant("the last tile is left out", COPY, "+ kTileBytes - 1) / kTileBytes);", ") / kTileBytes);", "reduce"),
    Mutant(
        "the first range's length is that of all",
        COPY,
        "+ kTileBytes < all.bytes ?",
        "+ kTileBytes < most_bytes ?",
        "reduce",
    ),
    Mutant("the first tile begins before the range", COPY, "    if (begin < 0) begin = 0;\n", "", "reduce"),
    Mutant("warps take one range after the other", COPY, "range(tile % num);", "range(tile / tiles);", "reduce"),
    Mutant(
        "long moves run at once", PROGRAM, "step.flat && step.step.count <= short_move &&", "step.flat &&", "program"
    ),
    Mutant("moves of fragments run at once", PROGRAM, "step.flat && step.step.count", "step.step.count", "program"),
    Mutant(
        "the first of several moves has the length of all",
        PROGRAM,
        "        most_count = std::max(most_count, steps[end].step.count);\n",
        "",
        "program",
    ),
    Mutant("dependent moves run at once", PROGRAM, " && !steps[end].sync && !steps", " && !steps", "program"),
    Mutant("waits pass signals", PLAN, "!IsMove(step.kind) || step.count", "step.count", "program"),
    Mutant("waits come last", PLAN, "first_move++, i);", "first_move, i);", "program"),
    Mutant(
        "sources are added in another order",
        REDUCE,
        "std::memcpy(&unit, &units[k][t], sizeof(unit));",
        "std::memcpy(&unit, &units[size - 1 - k][t], sizeof(unit));",
        "reduce",
    ),
    Mutant("each group of sources begins anew", REDUCE, "if (s + k == 0) {", "if (k == 0) {", "reduce"),
    Mutant("all groups read the first sources", REDUCE, "if (num_groups > 1) locate(s, size);", "", "reduce"),
    Mutant(
        "the last source is not loaded", REDUCE, "if (k < size && first + t", "if (k < size - 1 && first + t", "reduce"
    ),
    Mutant("8-bit floats have no infinity", REDUCTIONS, "magnitude == infinity ?", "magnitude == 0x100 ?", "reduce"),
    Mutant("8-bit floats have one kind of NaN", REDUCTIONS, "|| s == nan ?", "?", "reduce"),
    Mutant(
        "no fence before a barrier", SYNC, "  FenceAliases();\n  Sync(threads);\n", "  Sync(threads);\n", "multimem"
    ),
    Mutant(
        "no fence after a barrier",
        SYNC,
        "  FenceAliases();\n  return all_reached;",
        "  return all_reached;",
        "multimem",
    ),
    Mutant(
        "no fence before sums through the switch",
        MULTICAST,
        "const auto* from = window.At<const Bytes16>(byte_offset);\n  FenceAliases();",
        "const auto* from = window.At<const Bytes16>(byte_offset);",
        "device_api",
    ),
    Mutant(
        "no fence after puts through the switch",
        MULTICAST,
        "MulticastStore(to + i, value); });\n  FenceAliases();",
        "MulticastStore(to + i, value); });",
        "device_api",
    ),
]
