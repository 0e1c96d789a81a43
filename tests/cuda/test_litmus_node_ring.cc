// The ring over nodes of examples/all_gather_matmul, in all executions that a relaxed memory model and GIN allow.
#include <cstdint>
#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "fakes/litmus_gin.h"
#include "../../examples/all_gather_matmul/node_ring.cuh"
// clang-format on
#include "../../ffi/cuda/program/gin_args.h"
#include "../check.h"
#include "fakes/litmus_ranks.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::EndKernel;
using memory_model::Program;
using memory_model::Require;
namespace ring = all_gather_matmul;

// Nodes of one rank. Rows have one element, the last tile has one row, and each thread has a column. There are two
// slots. A rank overwrites its operand and its result as soon as the kernel has ended, as XLA's kernels do.
void RunRing(int32_t num_ranks, unsigned threads, int64_t tiles, int num_calls) {
  Program program;
  LitmusRanks world(program, num_ranks, ring::kNumKinds);
  device::Comm sizes = world.comm(0);
  sizes.local = {0, 1, 0, 1};
  const device::Window arena = world.Window(program, ring::NodeArenaBytes<ring::F32>(sizes, 1), "arena");
  ncclWindow_vidmem registered{arena.base, arena.stride};
  const int32_t num_signals = NumGinSignals(ring::kNumKinds, num_ranks);
  auto* const signals = program.Words<uint64_t>(num_ranks * num_signals, "GIN signals");
  auto* const w = program.Words<float>(threads, "w");
  for (unsigned i = 0; i < threads; ++i) w[i] = 2;
  const int64_t tokens = (tiles - 1) * ring::kTileRows + 1;
  std::vector<ring::NodeArgs<ring::F32>> args(num_ranks);
  std::vector<ncclDevComm> comms(num_ranks);
  for (int32_t r = 0; r < num_ranks; ++r) {
    device::GinHandle gin;
    gin.comm = world.comm(r);
    gin.puts = program.Words<uint64_t>(ring::kNumKinds, "puts");
    gin.arena = &registered;
    device::Comm node = world.comm(r);
    node.local = {0, 1, r, 1};
    node.arena = {arena.At(r), arena.stride};
    node.arena_bytes = arena.stride;
    args[r] = ring::WithArena<ring::F32>(node, gin);
    args[r].x = program.Words<float>(tokens, "x");
    args[r].w = w;
    args[r].y = program.Words<float>(num_ranks * tokens * threads, "y");
    args[r].tokens = tokens;
    args[r].hidden = 1;
    args[r].columns = threads;
    args[r].num_slots = 2;
    comms[r].rank = r;
    comms[r].signals = signals;
    comms[r].num_signals = static_cast<uint32_t>(num_signals);
    comms[r].counters = program.Words<uint64_t>(NumGinCounters(ring::kNumKinds), "GIN counters");
    comms[r].arrivals = program.Words<uint64_t>(num_ranks, "arrivals");
  }
  for (int32_t r = 0; r < num_ranks; ++r) {
    program.AddBlock(r, 0, threads, [=, &args, &comms] {
      auto* const x = const_cast<float*>(args[r].x);
      const auto value = [&](int call, int64_t row) { return static_cast<float>(100 * call + row + 1); };
      for (int call = 0; call < num_calls; ++call) {
        for (int64_t i = 0; i < tokens && threadIdx.x == 0; ++i) x[i] = value(call, r * tokens + i);
        EndKernel();
        ring::RunOnNodes(args[r], comms[r]);
        EndKernel();
        for (int64_t i = 0; i < num_ranks * tokens * threads && threadIdx.x == 0; ++i) {
          Require(args[r].y[i] == 2 * value(call, i / threads), "stale rows");
          args[r].y[i] = 0;
        }
        EndKernel();
      }
    });
  }
  ExpectSound(program);
}

TEST_CASE("a ring of two nodes, by one thread and by two") {
  RunRing(2, 1, 3, 1);
  RunRing(2, 2, 3, 1);
}

TEST_CASE("a ring of two nodes, two calls") { RunRing(2, 1, 1, 2); }

TEST_CASE("a ring of three nodes") { RunRing(3, 1, 1, 1); }

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
