// Kernels of examples/, in all executions that a relaxed memory model allows.
#include <cstdint>

#include "../../examples/all_gather_matmul/all_gather_matmul.cuh"
#include "../../examples/token_dispatch/token_dispatch.cuh"
#include "../check.h"
#include "fakes/litmus_ranks.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::Program;
using memory_model::Require;
namespace ring = all_gather_matmul;

// One warp sends, another one multiplies; each has one thread. Rows have one element, and so has the last tile. There
// are two slots.
void RunRing(int32_t num_ranks, int64_t tiles, int num_calls) {
  Program program;
  LitmusRanks ranks(program, num_ranks, 1);
  const int64_t bytes = ring::ArenaBytes<ring::F32>(ranks.comm(0), 1);
  const device::Window arena = ranks.Window(program, bytes, "arena");
  const int64_t tokens = (tiles - 1) * ring::kTileRows + 1;
  auto* const x = program.Words<float>(num_ranks * tokens, "x");
  auto* const w = program.Words<float>(1, "w");
  auto* const y = program.Words<float>(num_ranks * num_ranks * tokens, "y");
  *w = 2;
  for (int64_t i = 0; i < num_ranks * tokens; ++i) x[i] = static_cast<float>(i + 1);
  ranks.AddBlocks(program, 1, 2, [=](const device::Comm& comm) {
    device::Comm own = comm;
    own.arena = arena;
    own.arena_bytes = bytes;
    ring::Args<ring::F32> args = ring::WithArena<ring::F32>(own);
    const int32_t rank = comm.local.rank;
    args.x = x + rank * tokens;
    args.w = w;
    args.y = y + rank * num_ranks * tokens;
    args.tokens = tokens;
    args.hidden = args.columns = 1;
    args.num_slots = 2;
    for (int call = 0; call < num_calls; ++call) {
      ring::Run(args);
      memory_model::EndKernel();
      if (threadIdx.x == 0) {
        for (int64_t i = 0; i < num_ranks * tokens; ++i) {
          Require(args.y[i] == 2 * static_cast<float>(i + 1), "stale rows");
          args.y[i] = 0;
        }
      }
      memory_model::EndKernel();
    }
  });
  ExpectSound(program);
}

TEST_CASE("a ring of two ranks") { RunRing(2, 3, 1); }

TEST_CASE("a ring of two ranks, two calls") { RunRing(2, 2, 2); }

TEST_CASE("a ring of three ranks") { RunRing(3, 1, 1); }

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
