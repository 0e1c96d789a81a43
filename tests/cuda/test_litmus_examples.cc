// Kernels of examples/, in all executions that a relaxed memory model and GIN allow.
#include <cstdint>
#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "fakes/litmus_gin.h"
#include "../../examples/all_gather_matmul/node_ring.cuh"
// clang-format on
#include "../../examples/all_gather_matmul/all_gather_matmul.cuh"
#include "../../ffi/cuda/program/gin_args.h"
#include "../check.h"
#include "fakes/litmus_runs.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::Program;
using memory_model::Require;
namespace ring = all_gather_matmul;

// Adds the runs of a rank. Rows have one element, and the last tile has one row.
template <typename Args, typename Run>
void AddRing(Program& program, int32_t rank, int32_t num_ranks, unsigned threads, int64_t tiles, int runs, Args& args,
             int64_t columns, Run run) {
  const int64_t tokens = (tiles - 1) * ring::kTileRows + 1;
  auto* const x = program.Words<float>(tokens, "x");
  auto* const w = program.Words<float>(columns, "w");
  for (int64_t i = 0; i < columns; ++i) w[i] = 2;
  args.x = x;
  args.w = w;
  args.y = program.Words<float>(num_ranks * tokens * columns, "y");
  args.tokens = tokens;
  args.hidden = 1;
  args.columns = columns;
  args.num_slots = 2;
  const auto value = [](int64_t row, int32_t number) { return static_cast<float>(100 * number + row + 1); };
  AddRuns(
      program, rank, threads, runs, x, tokens,
      [=](int64_t i, int32_t number) { return value(rank * tokens + i, number); }, args.y, num_ranks * tokens * columns,
      [=](int64_t i, int32_t number) { return 2 * value(i / columns, number); }, run);
}

// One warp sends, another one multiplies; each has one thread.
void RunRing(int32_t num_ranks, int64_t tiles, int runs) {
  Program program;
  LitmusRanks ranks(program, num_ranks, 1);
  const int64_t bytes = ring::ArenaBytes<ring::F32>(ranks.comm(0), 1);
  const device::Window arena = ranks.Window(program, bytes, "arena");
  std::vector<ring::Args<ring::F32>> args(num_ranks);
  for (int32_t r = 0; r < num_ranks; ++r) {
    device::Comm own = ranks.comm(r);
    own.arena = arena;
    own.arena_bytes = bytes;
    args[r] = ring::WithArena<ring::F32>(own);
    AddRing(program, r, num_ranks, 2, tiles, runs, args[r], 1, [call = &args[r]] { ring::Run(*call); });
  }
  ExpectSound(program);
}

// Nodes of one rank. Each thread has a column.
void RunRingOverNodes(int32_t num_ranks, unsigned threads, int64_t tiles, int runs) {
  Program program;
  LitmusRanks world(program, num_ranks, ring::kNumKinds);
  device::Comm sizes = world.comm(0);
  sizes.local = {0, 1, 0, 1};
  const device::Window arena = world.Window(program, ring::NodeArenaBytes<ring::F32>(sizes, 1), "arena");
  ncclWindow_vidmem registered{arena.base, arena.stride};
  const int32_t num_signals = NumGinSignals(ring::kNumKinds, num_ranks);
  auto* const signals = program.Words<uint64_t>(num_ranks * num_signals, "GIN signals");
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
    comms[r].rank = r;
    comms[r].signals = signals;
    comms[r].num_signals = static_cast<uint32_t>(num_signals);
    comms[r].counters = program.Words<uint64_t>(NumGinCounters(ring::kNumKinds), "GIN counters");
    comms[r].arrivals = program.Words<uint64_t>(num_ranks, "arrivals");
    AddRing(program, r, num_ranks, threads, tiles, runs, args[r], threads,
            [call = &args[r], comm = &comms[r]] { ring::RunOnNodes(*call, *comm); });
  }
  ExpectSound(program);
}

TEST_CASE("rings of two and three ranks") {
  RunRing(2, 3, 1);
  RunRing(2, 2, 2);
  RunRing(3, 1, 1);
}

TEST_CASE("rings of two and three nodes") {
  RunRingOverNodes(2, 1, 3, 1);
  RunRingOverNodes(2, 2, 3, 1);
  RunRingOverNodes(2, 1, 1, 2);
  RunRingOverNodes(3, 1, 1, 1);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
