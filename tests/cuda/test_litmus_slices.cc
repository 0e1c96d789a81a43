// The kernel of all_to_all_v on the smallest group, in all executions that a relaxed memory model allows.
#include <cstdio>
#include <vector>

#include "../../ffi/cuda/kernels/slices.cuh"
#include "../check.h"
#include "fakes/litmus_ranks.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::EndKernel;
using memory_model::Program;
using memory_model::Require;

constexpr int32_t kRanks = 2;
constexpr int64_t kArenaBytes = 256;

// One slice of one row for each rank: by rank input offsets, sizes, output offsets, sizes.
constexpr int32_t kTable[] = {0, 0, 1, 1, 0, 0, 1, 1, /**/ 0, 0, 1, 1, 1, 1, 1, 1};

float Value(int32_t rank, int32_t run) { return static_cast<float>(10 * run + rank + 1); }

// Two runs on one arena: a rank writes its operand just before the kernel begins, and reads and overwrites the result
// as soon as the kernel has ended, as XLA's kernels do.
void CheckSlices(bool puts, unsigned threads) {
  Program program;
  LitmusRanks ranks(program, kRanks, 1);
  const device::Window arena = ranks.Window(program, kArenaBytes, "arena");
  std::vector<SliceArgs> args(kRanks);
  std::vector<char*> shared;
  for (int32_t r = 0; r < kRanks; ++r) {
    SliceArgs& own = args[r];
    own.comm = ranks.comm(r);
    own.comm.arena = arena;
    own.comm.arena_bytes = kArenaBytes;
    own.input_rows = puts ? 3 : 1, own.output_rows = 2;
    CHECK(Reads(own) == !puts);
    own.row_bytes = sizeof(float);
    own.slices_per_rank = kRanks;
    CHECK(ArenaBytes(own) <= kArenaBytes);
    own.x = reinterpret_cast<char*>(program.Words<float>(3, "x"));
    own.y = reinterpret_cast<char*>(program.Words<float>(2, "y"));
    auto* const table = program.Words<int32_t>(sizeof kTable / sizeof *kTable, "table");
    for (size_t i = 0; i < sizeof kTable / sizeof *kTable; ++i) table[i] = kTable[i];
    own.table = table;
    shared.push_back(program.Take(SliceSharedBytes(static_cast<int32_t>(threads)), "shared memory"));
  }
  for (int32_t r = 0; r < kRanks; ++r) {
    program.AddBlock(r, 0, threads, [=, &args, &shared] {
      auto* const x = reinterpret_cast<float*>(const_cast<char*>(args[r].x));
      auto* const y = reinterpret_cast<float*>(args[r].y);
      for (int32_t run = 1; run <= 2; ++run) {
        if (threadIdx.x == 0) x[0] = Value(r, run);
        EndKernel();
        SliceCall(args[r], 0, shared[r]).Run();
        EndKernel();
        for (int32_t s = 0; s < kRanks && threadIdx.x == 0; ++s) {
          Require(y[s] == Value(s, run), "a wrong result");
          y[s] = -1;
        }
        EndKernel();
      }
    });
  }
  ExpectSound(program);
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
