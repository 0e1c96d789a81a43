// The kernel of moe_one_shot on the smallest group, in all executions that a relaxed memory model allows.
#include <cstdio>
#include <vector>

#include "../../ffi/cuda/kernels/moe_one_shot.cuh"
#include "../check.h"
#include "fakes/litmus_ranks.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::EndKernel;
using memory_model::Program;
using memory_model::Require;

constexpr int32_t kRanks = 2;

// Of rank r, in run `run`.
float Value(int32_t rank, int32_t run) { return static_cast<float>(10 * run + rank + 1); }

// `runs` calls on one arena, of one token per rank, whose first choice is `id` of its rank, and its second one, if
// there is one, is the other expert. A rank writes its row just before the kernel begins, and reads and overwrites the
// result as soon as the kernel has ended, as XLA's kernels do.
void CheckCalls(int32_t choices, bool crossed, int32_t runs, unsigned threads) {
  Program program;
  LitmusRanks ranks(program, kRanks, 1);
  std::vector<MoeOneShotArgs> args(kRanks);
  std::vector<char*> shared;
  MoeOneShotArgs sizes;
  sizes.comm.local.size = kRanks;
  sizes.tokens = 1, sizes.choices = choices, sizes.num_experts = kRanks, sizes.capacity = choices;
  sizes.row_bytes = sizeof(float), sizes.piece_bytes = 8;
  // ArenaBytes: one channel, two sets of slots of 16 bytes.
  const int64_t arena_bytes = EpochBytes(sizes.num_epochs) + int64_t{2} * kRanks * ChannelUnits(sizes) * 16;
  const device::Window arena = ranks.Window(program, arena_bytes, "arena");
  for (int32_t r = 0; r < kRanks; ++r) {
    device::Comm comm = ranks.comm(r);
    comm.arena = arena;
    comm.arena_bytes = arena_bytes;
    MoeOneShotArgs own = sizes;
    own.comm = comm;
    own.comm.ll_slots = SlotsOfArena(comm, sizes.num_epochs);
    auto* const ids = program.Words<int32_t>(choices, "ids");
    for (int32_t k = 0; k < choices; ++k) ids[k] = (r + k + (crossed ? 1 : 0)) % kRanks;
    own.ids = ids;
    own.x = reinterpret_cast<char*>(program.Words<float>(1, "x"));
    own.slot = program.Words<int32_t>(choices, "slot");
    own.expert = program.Words<int32_t>(choices, "expert");
    own.group_sizes = program.Words<int32_t>(1, "group_sizes");
    own.group_counts = program.Words<int32_t>(1, "group_counts");
    own.demand = program.Words<int32_t>(1, "demand");
    own.dropped = program.Words<int32_t>(1, "dropped");
    own.table = program.Words<int32_t>(kRanks * kRanks, "table");
    own.y = reinterpret_cast<char*>(program.Words<float>(choices, "y"));
    args[r] = own;
    shared.push_back(program.Take(MoeOneShotSharedBytes(own), "shared memory"));
  }
  for (int32_t r = 0; r < kRanks; ++r) {
    program.AddBlock(r, 0, threads, [=, &args, &shared] {
      const MoeOneShotArgs& own = args[r];
      auto* const x = reinterpret_cast<float*>(const_cast<char*>(own.x));
      auto* const y = reinterpret_cast<float*>(own.y);
      for (int32_t run = 1; run <= runs; ++run) {
        if (threadIdx.x == 0) *x = Value(r, run);
        EndKernel();
        MoeOneShotCall(own, 0, shared[r]).Run();
        EndKernel();
        for (int32_t s = 0; s < choices && threadIdx.x == 0; ++s) {
          const int32_t from = choices == kRanks ? s : crossed ? 1 - r : r;
          Require(y[s] == Value(from, run), "a wrong row");
          y[s] = -1;
        }
        if (threadIdx.x == 0) {
          Require(*own.group_counts == choices && *own.demand == choices, "a wrong routing");
          Require(own.slot[0] == (choices == kRanks ? r : 0), "a wrong slot");
        }
        EndKernel();
      }
    });
  }
  ExpectSound(program);
}

// Three runs: the third one uses the set of slots of the first one again.
TEST_CASE("rows that cross, and rows that stay, by one thread") {
  CheckCalls(1, true, 3, 1);
  CheckCalls(1, false, 3, 1);
}

TEST_CASE("rows that go to both ranks, by one thread and by two") {
  CheckCalls(2, true, 3, 1);
  CheckCalls(1, true, 3, 2);
  CheckCalls(2, false, 1, 2);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
