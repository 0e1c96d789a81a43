"""Mistakes in the staging ring: ffi/plan/staging.cc, and what other files of ffi/plan have for it."""

from mutation.hand import Mutant

STAGING, RING, BINDING = "ffi/plan/staging.cc", "ffi/plan/staging.h", "ffi/plan/plan_py.cc"
TESTS = "test_plan"

MUTANTS = [
    Mutant("a slot is reused too early", RING, "kStagingSlots = 2 * kStagingLead;", "kStagingSlots = 3;", TESTS),
    Mutant("a chunk goes to the slot of another", STAGING, "chunk % kStagingSlots", "chunk % 3", TESTS),
    Mutant(
        "peers are waited for too late",
        STAGING,
        "if (t >= kStagingLead) ForEach",
        "if (t > kStagingLead) ForEach",
        TESTS,
    ),
    Mutant(
        "sums are read before they are complete",
        STAGING,
        "for_chunk(t - 2 * kStagingLead,",
        "for_chunk(t - 2 * kStagingLead + 1,",
        TESTS,
    ),
    Mutant(
        "sums for peers go to the result only",
        STAGING,
        "Run(chunk, step, IsRead(chunk, step.dst.offset, step.count));",
        "Run(chunk, step, false);",
        TESTS,
    ),
    Mutant(
        "operands of the size of the ring are staged",
        STAGING,
        "bytes <= kStagingSlots *",
        "bytes < kStagingSlots *",
        TESTS,
    ),
    Mutant("large groups are staged", STAGING, "kMaxRanks = 72", "kMaxRanks = 256", TESTS),
    Mutant("calls have few large chunks", STAGING, "kMaxStagedParts = 1 << 17", "kMaxStagedParts = 1 << 13", TESTS),
    Mutant("chunks are not aligned", STAGING, "kChunkGrainBytes / item_bytes, 1)", "1, 1)", TESTS),
    Mutant("wide elements need larger chunks", STAGING, "kChunkGrainBytes / item_bytes, 1)", "128, 1)", TESTS),
    Mutant("small fragments are staged", STAGING, "return request.fragmented && count", "return false && count", TESTS),
    Mutant(
        "contiguous blocks count as fragments",
        "ffi/plan/request.cc",
        "|| count != request.block_count;",
        "|| count > 0;",
        TESTS,
    ),
    Mutant(
        "copies of a pair outside of the sample are free",
        "ffi/plan/cost.cc",
        "if (traits.TakesPermutation()) {\n    // Pairs",
        "if (false) {",
        TESTS,
    ),
    Mutant(
        "the cost of one rank is not that of its staged plan",
        BINDING,
        "CostOf(BuildPlan(found, request, rank), ",
        "CostOf(found.build(request, rank), ",
        "tests/plan/test_cost.py",
    ),
    Mutant(
        "algorithms that put are staged on request",
        BINDING,
        "request.staged_count == 0 || CanStage(algorithm, request)",
        "true",
        "tests/plan/test_validate.py",
    ),
]
