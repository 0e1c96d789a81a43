// The kernel of all_to_all_v on the smallest group, in all executions that a relaxed memory model allows.
#include "../../ffi/cuda/kernels/slices.cuh"
#include "../check.h"
#include "fakes/litmus_runs.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int32_t kRanks = 2;
constexpr int64_t kArenaBytes = 256;

// One slice of one row for each rank: by rank input offsets, sizes, output offsets, sizes.
constexpr int32_t kTable[] = {0, 0, 1, 1, 0, 0, 1, 1, /**/ 0, 0, 1, 1, 1, 1, 1, 1};

void CheckSlices(bool puts, unsigned threads) {
  LitmusRuns<SliceArgs> runs(kRanks, kArenaBytes);
  for (SliceArgs& own : runs.args) {
    own.input_rows = puts ? 3 : 1, own.output_rows = 2;
    CHECK(Reads(own) == !puts);
    own.row_bytes = sizeof(float);
    own.slices_per_rank = kRanks;
    CHECK(ArenaBytes(own) <= kArenaBytes);
    own.table = runs.Upload(kTable, "table");
  }
  runs.Check(
      threads, SliceSharedBytes(static_cast<int32_t>(threads)),                      //
      1, [](int32_t rank, int32_t, int32_t run) { return LitmusValue(rank, run); },  //
      2, [](int32_t, int32_t s, int32_t run) { return LitmusValue(s, run); },        //
      [](const SliceArgs& args, char* shared) { SliceCall(args, 0, shared).Run(); });
}

TEST_CASE("reads of one slice per pair by one thread and by two") {
  CheckSlices(false, 1);
  CheckSlices(false, 2);
}

TEST_CASE("puts of one slice per pair by one thread and by two") {
  CheckSlices(true, 1);
  CheckSlices(true, 2);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
