// Kernels of examples/, in all executions that a relaxed memory model allows.
#include <cstdint>

#include "../../examples/all_gather_matmul/all_gather_matmul.cuh"
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

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
