"""Mutants of dispatch and combine: the lists of rows, the sums, the barriers and the checks of a routing."""

from kernel_mutant import ROWS, Mutant

ROUTED = [
    # Barriers, in all executions of the memory model.
    Mutant(
        "rows are read before they are in the arena",
        ROWS,
        "    if (!device::Barrier(comm_, channel_, kEntryBarrier)) return false;\n"
        "    Move(NumSlotRows(), [&](int64_t j) {\n      const Row found = FindRow(j);\n      const int32_t row",
        "    Move(NumSlotRows(), [&](int64_t j) {\n      const Row found = FindRow(j);\n      const int32_t row",
        "litmus_rows",
    ),
    Mutant(
        "the next call overwrites rows that are still read",
        ROWS,
        "return device::Barrier(comm_, channel_, kExitBarrier);",
        "return true;",
        "litmus_rows",
    ),
    Mutant(
        "rows are put while those of the last call are added",
        ROWS,
        "    if (!device::Barrier(comm_, channel_, kEntryBarrier)) return false;\n"
        "    Move(NumSlotRows(), [&](int64_t j) {\n      const Row found = FindRow(j);\n      return",
        "    Move(NumSlotRows(), [&](int64_t j) {\n      const Row found = FindRow(j);\n      return",
        "litmus_rows",
    ),
    Mutant(
        "rows are added before they have arrived",
        ROWS,
        "    if (!device::Barrier(comm_, channel_, kExitBarrier)) return false;\n",
        "",
        "litmus_rows",
    ),
    Mutant(
        "rows are copied before all of them have been found",
        ROWS,
        "      __syncthreads();\n      switch (unit_bytes_) {",
        "      switch (unit_bytes_) {",
        "rows",
    ),
    # Lists and sums.
    Mutant(
        "the next rows are found while these are copied",
        ROWS,
        "          CopyMoves<device::Bytes16>(moves_, num, units);\n      }\n      __syncthreads();",
        "          CopyMoves<device::Bytes16>(moves_, num, units);\n      }",
        "rows",
    ),
    Mutant(
        "a row is looked for one slice too late", ROWS, "if (ends_[middle] > j) {", "if (ends_[middle] >= j) {", "rows"
    ),
    Mutant("a sum of sizes leaves out a slice", ROWS, "own && Thread() >= step ?", "own && Thread() > step ?", "rows"),
    Mutant("sums of sizes begin anew", ROWS, "if (Thread() == 0 && base > 0) value", "if (false) value", "rows"),
    Mutant(
        "the last piece has the length of all",
        ROWS,
        "left < args.piece_bytes ? left : args.piece_bytes;",
        "args.piece_bytes;",
        "rows",
    ),
    Mutant(
        "slots after the last group keep their contents",
        ROWS,
        "    Zero(EndOf(first_expert + num_local_ - 1), args_.num_slots, device::OfBlock());\n",
        "",
        "rows",
    ),
    Mutant(
        "slots between groups keep their contents",
        ROWS,
        "      Zero(begin, At(",
        "      if (i == 0) Zero(begin, At(",
        "rows",
    ),
    Mutant(
        "every token has the weights of the first",
        ROWS,
        "? sums.weights[choice + k + j]",
        "? sums.weights[k + j]",
        "rows",
    ),
    Mutant(
        "only the first rows of a token are added", ROWS, "k < sums.choices; k += kRowLoads) {", "k < 1; ++k) {", "rows"
    ),
    Mutant(
        "rows are added in another order",
        ROWS,
        "for (int32_t k = 0; k < sums.choices; k += kRowLoads) {",
        "for (int32_t k = (sums.choices - 1) / kRowLoads * kRowLoads; k >= 0; k -= kRowLoads) {",
        "rows",
    ),
    Mutant(
        "a choice without a row adds the first row", ROWS, "if (slot < 0) return -1;", "if (slot < 0) return 0;", "rows"
    ),
    # Checks.
    Mutant("an overfull rank is not noticed", ROWS, ": args_.num_slots;", ": args_.num_slots + 8;", "rows"),
    Mutant(
        "groups may overlap", ROWS, "output + size > Limit(from, expert)", "output + size > args_.num_slots", "rows"
    ),
    Mutant(
        "ids of unknown experts are not noticed",
        ROWS,
        "if (size < 0) return kNegativeSize;",
        "if (size < -100) return kNegativeSize;",
        "rows",
    ),
    Mutant(
        "the first problem that a thread finds is reported",
        ROWS,
        "if (ProblemOf(from, expert) != problem) return;",
        "const int32_t problem = ProblemOf(from, expert);\n        if (problem == kNoProblem) return;",
        "rows",
    ),
    Mutant(
        "an expert without slots is reported as a rank without slots",
        ROWS,
        "? kExpertOverflows : kRankOverflows;",
        "? kRankOverflows : kRankOverflows;",
        "rows",
    ),
    Mutant(
        "the first thread block that ends reports a wrong row",
        ROWS,
        "(state & (kWrong - 1)) != static_cast<uint64_t>(args_.num_channels)",
        "(state & (kWrong - 1)) > static_cast<uint64_t>(args_.num_channels)",
        "rows",
    ),
    Mutant(
        "the state of a call stays",
        ROWS,
        "    device::StoreRelease(args_.state, 0);\n",
        "",
        "rows",
    ),
    Mutant(
        "slices beyond the choices are not noticed", ROWS, "input + size > args_.num_choices", "input > 1000", "rows"
    ),
    Mutant(
        "a list may name any row",
        ROWS,
        "exists ? ArenaRow(found.home, row) : nullptr",
        "ArenaRow(found.home, row)",
        "rows",
    ),
    Mutant("a choice may have the slot of another rank", ROWS, "k < At(rank(), kSize, expert)", "k < 1000", "rows"),
    Mutant(
        "a wrong table moves rows all the same",
        ROWS,
        "|| !CheckTable()) return;",
        "|| (CheckTable(), false)) return;",
        "rows",
    ),
]
