// Bulk copies between two ranks and in the kernel of all_to_all_v, in all executions that a relaxed memory model
// allows. Their rings have two stages of 16 bytes.
#include <vector>

#include "../../ffi/cuda/kernels/bulk_copy.cuh"
#include "../../ffi/cuda/kernels/slices.cuh"
#include "../check.h"
#include "fakes/litmus_runs.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::Program;
using memory_model::Require;

constexpr BulkStages kStages = {2, 16};

// Twice: writes x, puts it to the peer's window, copies what the peer has put out of the own window, reads the copy.
// With `num_pieces` of three, a stage is used twice by one copy.
void ExchangeInBulk(int64_t num_pieces, unsigned num_threads) {
  Program program;
  const LitmusRanks ranks(program, 2, 1);
  const int64_t bytes = num_pieces * kStages.bytes, count = bytes / int64_t{sizeof(int64_t)};
  const device::Window x = ranks.Window(program, bytes, "x"), y = ranks.Window(program, bytes, "y");
  const device::Window window = ranks.Window(program, bytes, "window");
  std::vector<char*> shared;
  for (int rank = 0; rank < 2; ++rank) shared.push_back(program.Take(BulkSharedBytes(kStages), "shared memory"));
  ranks.AddBlocks(program, 1, num_threads, [=](const device::Comm& comm) {
    const int32_t rank = comm.local.rank, peer = 1 - rank;
    const auto last = static_cast<unsigned>(num_threads - 1);  // another thread than the one that copies
    const auto value = [&](int32_t of, int64_t i, int64_t run) { return 100 * run + 10 * of + i; };
    const BulkCopies copies(comm, 0, kStages, shared[rank]);
    for (int64_t run = 1; run <= 2; ++run) {
      for (int64_t i = 0; i < count && threadIdx.x == last; ++i) x.At<int64_t>(rank)[i] = value(rank, i, run);
      __syncthreads();
      copies.Copy(window.At(peer), x.At(rank), bytes);
      device::Signal(comm, 0, peer, device::OfBlock());
      Require(device::Wait(comm, 0, peer, device::OfBlock()), "no signal");
      copies.Copy(y.At(rank), window.At(rank), bytes);
      __syncthreads();
      for (int64_t i = 0; i < count && threadIdx.x == last; ++i) {
        Require(y.At<int64_t>(rank)[i] == value(peer, i, run), "a wrong copy");
        y.At<int64_t>(rank)[i] = -1;
      }
      // The window may be overwritten.
      device::Signal(comm, 0, peer, device::OfBlock());
      Require(device::Wait(comm, 0, peer, device::OfBlock()), "no signal");
    }
  });
  ExpectSound(program);
}

TEST_CASE("bulk copies between two ranks") {
  ExchangeInBulk(1, 1);
  ExchangeInBulk(1, 2);
  ExchangeInBulk(3, 1);
}

// One slice of one row for each rank: by rank input offsets, sizes, output offsets, sizes.
constexpr int32_t kTable[] = {0, 0, 1, 1, 0, 0, 1, 1, /**/ 0, 0, 1, 1, 1, 1, 1, 1};

void ExchangeSlicesInBulk(bool puts, bool peer_too) {
  constexpr int32_t kRanks = 2, kRow = 4;
  constexpr int64_t kArenaBytes = 256;
  constexpr unsigned kThreads = 1;
  LitmusRuns<SliceArgs> runs(kRanks, kArenaBytes);
  for (SliceArgs& own : runs.args) {
    own.input_rows = puts ? 3 : 1, own.output_rows = 2;
    CHECK(Reads(own) == !puts);
    own.row_bytes = kRow * sizeof(float);
    own.slices_per_rank = kRanks;
    CHECK(ArenaBytes(own) <= kArenaBytes);
    own.table = runs.Upload(kTable, "table");
    if (peer_too || &own == runs.args.data()) own.bulk = kStages;
  }
  runs.Check(
      kThreads, SliceSharedBytes(kThreads, kStages),                                         //
      kRow, [](int32_t rank, int32_t, int32_t run) { return LitmusValue(rank, run); },       //
      2 * kRow, [](int32_t, int32_t s, int32_t run) { return LitmusValue(s / kRow, run); },  //
      [](const SliceArgs& args, char* shared) { SliceCall(args, 0, shared).Run(); });
}

TEST_CASE("slices, by both ranks and by one") {
  for (const bool puts : {false, true}) {
    for (const bool peer_too : {false, true}) ExchangeSlicesInBulk(puts, peer_too);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
