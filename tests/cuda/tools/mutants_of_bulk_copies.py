"""Mutants of bulk copies: waits, fences between the proxies, stages, mbarriers and ends of ranges."""

from kernel_mutant import BULK_COPY, SLICES, Mutant

WAIT = "  WaitForStores();\n  FenceAsyncGlobal();"
EXPECT = "ExpectBytes(&piece.loaded, piece.bytes);"

BULK = [
    # In all executions of the memory model.
    Mutant("copies end before their writes", BULK_COPY, WAIT, "  FenceAsyncGlobal();", "litmus_bulk_copies"),
    Mutant("copies end when their stages are read", BULK_COPY, WAIT, WAIT.replace("Stores", "Reads<0>"), "bulk_copies"),
    Mutant("no fence behind bulk copies", BULK_COPY, WAIT, "  WaitForStores();", "litmus_bulk_copies"),
    Mutant("no fence before bulk copies", BULK_COPY, "const { FenceAsyncGlobal(); }", "const {}", "litmus_bulk_copies"),
    Mutant(
        "a store does not wait for its load",
        BULK_COPY,
        "while (!ring->failed && !IsPhaseComplete(&oldest.loaded, parity)) {",
        "while (false) {",
        "litmus_bulk_copies",
    ),
    Mutant("a stage is used again too early", BULK_COPY, "    WaitForReads<1>();", "    ", "litmus_bulk_copies"),
    Mutant("one more stage is unread", BULK_COPY, "WaitForReads<1>()", "WaitForReads<2>()", "litmus_bulk_copies"),
    # In the emulation.
    Mutant("one more piece than there are stages", BULK_COPY, "== num - 1)", "== num)", "bulk_copies"),
    Mutant("no fence behind new mbarriers", BULK_COPY, "    FenceAsyncShared();", "    ", "bulk_copies"),
    Mutant("a phase of another piece", BULK_COPY, "(piece & num) != 0 ? 1 : 0", "0", "bulk_copies"),
    Mutant(
        "too many bytes are expected", BULK_COPY, EXPECT, EXPECT.replace("piece.bytes", "shape.bytes"), "bulk_copies"
    ),
    Mutant(
        "a late load is a failure", BULK_COPY, "    if (now - begin < comm.timeout_ns) continue;", "", "bulk_copies"
    ),
    Mutant("pieces follow one that failed", BULK_COPY, "    ring->failed = true;\n", "", "bulk_copies"),
    Mutant(
        "short copies are left out",
        BULK_COPY,
        "return pays && Takes(of) ?",
        "return Takes(of) ?",
        "bulk_copies",
    ),
    Mutant("short ranges are taken", BULK_COPY, "range.bytes >= stages_.bytes / 4 && ", "", "bulk_copies"),
    Mutant("few bytes pay", BULK_COPY, "num * most_bytes >= HalfRing()", "num * most_bytes >= 0", "bulk_copies"),
    Mutant("tails are left out", BULK_COPY, "kMost = 32;", "kMost = 16;", "bulk_copies"),
    Mutant("tails are too long", BULK_COPY, "if (byte < of.bytes) of", "of", "bulk_copies"),
    Mutant(
        "heads are left out",
        BULK_COPY,
        "k % kMost < head ? k % kMost : k % kMost + body",
        "k % kMost + head + body",
        "bulk_copies",
    ),
    Mutant(
        "bodies begin at any address",
        BULK_COPY,
        "return to_boundary < range.bytes ? to_boundary : range.bytes;",
        "return to_boundary * 0;",
        "bulk_copies",
    ),
    Mutant("sides with other remainders", BULK_COPY, "(difference & 15) == 0", "(difference & 7) == 0", "bulk_copies"),
    Mutant("every other turn is left out", BULK_COPY, "at += turn)", "at += 2 * turn)", "bulk_copies"),
    Mutant("turns of a range overlap", BULK_COPY, "body.src + at, left", "body.src, left", "bulk_copies"),
    Mutant(
        "warps copy no range if bulk copies are possible",
        BULK_COPY,
        "return pays && Takes(of) ? device::CopyRange{} : of;",
        "return pays ? device::CopyRange{} : of;",
        "bulk_copies",
    ),
    Mutant("stripes begin inside of a unit", SLICES, "(move.begin | move.bytes)", "(move.bytes)", "slices"),
    Mutant("the operand is not copied to the arena", SLICES, "    MoveInBulk(1);\n", "", "slices"),
    Mutant("slices are not moved", SLICES, "      if (in_bulk) MoveInBulk(num);\n", "", "slices"),
]
