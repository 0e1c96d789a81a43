// The kernel of route_and_dispatch on the smallest group, in all executions that a relaxed memory model allows.
#include <vector>

#include "../../ffi/cuda/kernels/route_and_dispatch.cuh"
#include "../check.h"
#include "fakes/litmus_runs.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::Require;

constexpr int32_t kRanks = 2;

// `runs` calls on one arena, of one token per rank, whose first choice is `id` of its rank, and its second one, if
// there is one, is the other expert.
void CheckCalls(int32_t choices, bool crossed, int32_t runs, unsigned threads) {
  memory_model::Program program;
  LitmusRanks ranks(program, kRanks, 1);
  std::vector<RouteAndDispatchArgs> args(kRanks);
  RouteAndDispatchArgs sizes;
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
    RouteAndDispatchArgs own = sizes;
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
    char* const shared = program.Take(RouteAndDispatchSharedBytes(own), "shared memory");
    const RouteAndDispatchArgs* const call = &args[r];
    const auto x = [=](int32_t, int32_t run) { return LitmusValue(r, run); };
    const auto y = [=](int32_t s, int32_t run) {
      return LitmusValue(choices == kRanks ? s : crossed ? 1 - r : r, run);
    };
    AddRuns(program, r, threads, runs, own.x, 1, x, own.y, choices, y, [=] {
      RouteAndDispatchCall(*call, 0, shared).Run();
      memory_model::EndKernel();
      if (threadIdx.x != 0) return;
      Require(*call->group_counts == choices && *call->demand == choices, "a wrong routing");
      Require(call->slot[0] == (choices == kRanks ? r : 0), "a wrong slot");
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
