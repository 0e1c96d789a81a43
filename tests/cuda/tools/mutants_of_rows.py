"""Mutants of dispatch and combine: the lists of rows, the sums, the barriers and the checks of a routing."""

from kernel_mutant import ROW_LOOPS, ROWS, Mutant

ROUTED = [
    # Barriers, in all executions of the memory model.
    Mutant(
        "rows are read before they are in the arena",
        ROWS,
        "    if (!device::Barrier(comm_, channel_, kEntryBarrier)) return false;\n    ReadPlaces();",
        "    ReadPlaces();",
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
        "    if (!device::Barrier(comm_, channel_, kEntryBarrier)) return false;\n    Move(",
        "    Move(",
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
        "      __syncthreads();\n      WithUnit([&](auto unit) { CopyMoves",
        "      WithUnit([&](auto unit) { CopyMoves",
        "rows",
    ),
    # Lists and sums.
    Mutant(
        "the next rows are found while these are copied",
        ROWS,
        "(moves_, num, units()); });\n      __syncthreads();",
        "(moves_, num, units()); });",
        "rows",
    ),
    Mutant(
        "a row is looked for one slice too late",
        ROW_LOOPS,
        "if (ends[middle] > j) {",
        "if (ends[middle] >= j) {",
        "rows",
    ),
    Mutant(
        "a sum of sizes leaves out a slice",
        ROW_LOOPS,
        "before = thread >= step ?",
        "before = thread > step ?",
        "rows",
    ),
    Mutant("sums of sizes begin anew", ROW_LOOPS, "total += sum.all;", "total += 0;", "rows"),
    Mutant(
        "the next sum begins before all have read the last",
        ROW_LOOPS,
        "  __syncthreads();  // the caller may overwrite them\n",
        "",
        "rows",
    ),
    # Places of dispatch.
    Mutant(
        "the next rows are found while these are copied by tokens",
        ROWS,
        "      __syncthreads();\n      first += end;",
        "      first += end;",
        "rows",
    ),
    Mutant(
        "places are listed while they are counted",
        ROWS,
        "{ device::FetchAdd(counter(i, row), 1); });\n      __syncthreads();",
        "{ device::FetchAdd(counter(i, row), 1); });",
        "litmus_rows",
    ),
    Mutant(
        "choices are counted before all counters are zero",
        ROWS,
        "counters[i] = 0;\n      __syncthreads();",
        "counters[i] = 0;",
        "litmus_rows",
    ),
    Mutant(
        "two threads take the same place",
        ROWS,
        "? static_cast<int64_t>(device::FetchAdd(counter(i, rows[k]), 1)) : i;",
        "? static_cast<int64_t>(*counter(i, rows[k])) : i;",
        "rows",
    ),
    Mutant("choices for all ranks are sorted together", ROWS, "to * args_.num_rows +", "0 * to +", "rows"),
    Mutant(
        "a token has the places of the next one",
        ROW_LOOPS,
        "rows.begin[token + 1] : end;",
        "rows.begin[token + 1] + 1 : end;",
        "rows",
    ),
    Mutant(
        "only the first place of a token is written",
        ROW_LOOPS,
        "k < last; ++k)",
        "k == rows.begin[token]; ++k)",
        "rows",
    ),
    Mutant("places of the last token are lost", ROWS, "      first += end;", "      first += num;", "rows"),
    Mutant(
        "each rank lists the places of all from the first",
        ROWS,
        "EndOfChoices(source_rank, rank() * num_local_ - 1)",
        "0",
        "rows",
    ),
    Mutant("slices may overlap at their sender", ROWS, "input != EndOfChoices(from, expert - 1) ||", "", "rows"),
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
        ROW_LOOPS,
        "? sums.weights[choice + k + j]",
        "? sums.weights[k + j]",
        "rows",
    ),
    Mutant(
        "only the first rows of a token are added",
        ROW_LOOPS,
        "k < choices; k += kRowLoads) {",
        "k < 1; ++k) {",
        "rows",
    ),
    Mutant(
        "rows are added in another order",
        ROW_LOOPS,
        "for (int32_t k = 0; k < choices; k += kRowLoads) {",
        "for (int32_t k = (choices - 1) / kRowLoads * kRowLoads; k >= 0; k -= kRowLoads) {",
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
        "{Exists(rows[k]) ? rows[k] : -1, ",
        "{rows[k], ",
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
