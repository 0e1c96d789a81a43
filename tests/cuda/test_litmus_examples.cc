// Kernels of examples/, in all executions that a relaxed memory model and GIN allow.
#include <cstdint>
#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "fakes/litmus_gin.h"
#include "../../examples/all_gather_matmul/node_ring.cuh"
// clang-format on
#include "../../examples/all_gather_matmul/all_gather_matmul.cuh"
#include "../../examples/token_dispatch/token_dispatch.cuh"
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

// Each warp has one thread. Rank 0 sends two rows to rank 1 in the first call, and one in the second; rank 1 sends the
// others.
TEST_CASE("a dispatch by warps, two calls") {
  for (const unsigned warps : {1u, 2u}) {
    namespace dispatch = token_dispatch;
    Program program;
    LitmusRanks ranks(program, 2, 1);
    device::Comm shape = ranks.comm(0);
    const int64_t bytes = dispatch::ArenaBytes(shape, 2, 8);
    const device::Window arena = ranks.Window(program, bytes, "arena");
    auto* const x = program.Words<uint64_t>(8, "x");      // [call][rank][token]
    auto* const out = program.Words<uint64_t>(8, "out");  // [rank][source][place]
    auto* const order = program.Words<int32_t>(2, "order");
    auto* const begin = program.Words<int32_t>(8, "begin");    // [call][rank][receiver]
    auto* const counts = program.Words<int32_t>(4, "counts");  // [rank][source]
    order[1] = 1;
    begin[4 + 1] = 1;      // rank 0, second call: one row each
    begin[2 + 1] = 2;      // rank 1, first call: all to rank 0
    begin[4 + 2 + 1] = 1;  // second call: one row each
    for (int64_t i = 0; i < 8; ++i) x[i] = static_cast<uint64_t>(i + 10);
    ranks.AddBlocks(program, 1, warps, [=](const device::Comm& comm) {
      device::Comm own = comm;
      own.arena = arena;
      const int32_t rank = comm.local.rank;
      for (int call = 0; call < 2; ++call) {
        dispatch::Args args = dispatch::WithArena(own);
        args.x = reinterpret_cast<const char*>(x + 4 * call + 2 * rank);
        args.order = order;
        args.begin = begin + 4 * call + 2 * rank;
        args.out = reinterpret_cast<char*>(out + 4 * rank);
        args.counts = counts + 2 * rank;
        args.tokens = 2;
        args.row_bytes = 8;
        dispatch::Run(args);
        memory_model::EndKernel();
        if (threadIdx.x == 0) {
          const uint64_t* const from_peer = out + 4 * rank + 2 * (1 - rank);
          const uint64_t* const sent = x + 4 * call + 2 * (1 - rank);
          Require(counts[2 * rank + 1 - rank] == 2 - call, "another number of rows");
          Require(from_peer[0] == (call == 0 || rank == 0 ? sent[0] : sent[1]), "stale row");
          Require(from_peer[1] == (call == 0 ? sent[1] : 0), "stale row");
        }
        memory_model::EndKernel();
      }
    });
    ExpectSound(program);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
