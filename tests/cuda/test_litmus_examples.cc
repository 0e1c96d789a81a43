// Kernels of examples/, in all executions that a relaxed memory model and GIN allow.
#include <type_traits>
#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "fakes/litmus_nodes.h"
#include "../../examples/all_gather_matmul/node_ring.cuh"
// clang-format on
#include "../../examples/all_gather_matmul/all_gather_matmul.cuh"
#include "../check.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::Program;
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

// In a node, one warp sends, another one multiplies; each has one thread. Over nodes of one rank, each thread has a
// column.
template <bool kNodes>
void RunRing(int32_t num_ranks, unsigned threads, int64_t tiles, int runs) {
  Program program;
  device::Comm sizes;
  sizes.local = {0, kNodes ? 1 : num_ranks, 0, 1};
  sizes.signals.num_channels = kNodes ? ring::kNumKinds : 1;
  const int64_t bytes = kNodes ? ring::NodeArenaBytes<ring::F32>(sizes, 1) : ring::ArenaBytes<ring::F32>(sizes, 1);
  const LitmusNodes nodes(program, kNodes ? num_ranks : 1, sizes.local.size, bytes, sizes.signals.num_channels);
  std::vector<std::conditional_t<kNodes, ring::NodeArgs<ring::F32>, ring::Args<ring::F32>>> args(num_ranks);
  for (int32_t r = 0; r < num_ranks; ++r) {
    if constexpr (kNodes) {
      args[r] = ring::WithArena<ring::F32>(nodes.comms[r], nodes.handles[r]);
      AddRing(program, r, num_ranks, threads, tiles, runs, args[r], threads,
              [call = &args[r], comm = &nodes.nccl_comms[r]] { ring::RunOnNodes(*call, *comm); });
    } else {
      args[r] = ring::WithArena<ring::F32>(nodes.comms[r]);
      AddRing(program, r, num_ranks, threads, tiles, runs, args[r], 1, [call = &args[r]] { ring::Run(*call); });
    }
  }
  ExpectSound(program);
}

TEST_CASE("rings of two and three ranks") {
  RunRing<false>(2, 2, 3, 1);
  RunRing<false>(2, 2, 2, 2);
  RunRing<false>(3, 2, 1, 1);
}

TEST_CASE("rings of two and three nodes") {
  RunRing<true>(2, 1, 3, 1);
  RunRing<true>(2, 2, 3, 1);
  RunRing<true>(2, 1, 1, 2);
  RunRing<true>(3, 1, 1, 1);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
