// The kernels of dispatch and combine between nodes on the smallest groups, in all executions that a relaxed memory
// model and GIN allow: two nodes of one rank, and one node of two ranks, whose messages do not cross the network.
// test_litmus_nodes.cc joins both.
#include <vector>

#include "fakes/litmus_nodes.h"
// Must follow it, as NCCL's headers go before gin.h.
#include "../../ffi/cuda/kernels/rail_combine.cuh"
#include "../../ffi/cuda/kernels/rail_dispatch.cuh"
#include "../check.h"
#include "fakes/litmus_runs.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int32_t kRanks = 2;

// One token per rank, which goes to the experts of both ranks: by rank the first packed choice of each expert, sizes,
// slots, sizes. No vectors of int32_t: see test_litmus_rows.cc.
constexpr int32_t kTable[] = {0, 1, 1, 1, 0, 0, 1, 1, /**/ 0, 1, 1, 1, 1, 1, 1, 1};
constexpr int32_t kRows[] = {0, 0};                           // of the payload
constexpr int32_t kExperts[] = {0, 1};                        // of each choice
constexpr int32_t kSlots[kRanks][kRanks] = {{0, 0}, {1, 1}};  // by rank and choice

enum Kind { kDispatches, kAddsByNode, kAddsAtHome };

// Two runs on one arena.
void CheckRails(Kind kind, int32_t num_nodes, unsigned threads) {
  memory_model::Program program;
  InterNodeRowArgs sizes;
  RowArgs& rows = sizes.rows;
  rows.combines = kind != kDispatches;
  rows.dtype = DType::kF32;
  rows.num_rows = 1, rows.num_slots = 2, rows.num_choices = 2;
  rows.row_bytes = sizeof(float), rows.piece_bytes = 128;
  rows.num_ranks = rows.num_experts = kRanks, rows.choices_per_row = 2;
  sizes.sums_at_source = kind == kAddsAtHome;
  LitmusNodes nodes(program, std::vector<int32_t>(num_nodes, kRanks / num_nodes), RailArenaBytes(sizes, num_nodes));
  const int32_t* const table = UploadTo(program, kTable, "table");
  std::vector<InterNodeRowArgs> args(kRanks, sizes);
  const int32_t num_x = rows.combines ? 2 : 1, num_y = rows.combines ? 1 : 2;
  for (int32_t r = 0; r < kRanks; ++r) {
    RowArgs& own = args[r].rows;
    args[r].gin = nodes.gins[r];
    args[r].node = nodes.comms[r];
    own.comm = args[r].gin.comm;
    own.state = program.Words<uint64_t>(1, "state");
    own.x = reinterpret_cast<char*>(program.Words<float>(num_x, "x"));
    own.y = reinterpret_cast<char*>(program.Words<float>(num_y, "y"));
    own.table = table;
    own.index = rows.combines ? UploadTo(program, kSlots[r], "index") : UploadTo(program, kRows, "index");
    own.expert = UploadTo(program, kExperts, "expert");
    char* const shared = program.Take(RailSharedBytes(own, static_cast<int32_t>(threads)), "shared memory");
    const InterNodeRowArgs* const call = &args[r];
    const ncclDevComm* const nccl_comm = &nodes.nccl_comms[r];
    // Slot s belongs to rank s. Experts return rows as they are.
    const auto x = [=](int32_t i, int32_t run) { return LitmusValue(num_x == 1 ? r : i, run); };
    const auto y = [=](int32_t i, int32_t run) { return num_y == 1 ? 2 * LitmusValue(r, run) : LitmusValue(i, run); };
    AddRuns(program, r, threads, 2, own.x, num_x, x, own.y, num_y, y, [=] {
      const device::Gin gin(call->gin, *nccl_comm);
      if (kind == kDispatches) {
        RailDispatch<device::Gin>(*call, gin, 0, shared).Run();
      } else {
        RailCombine<device::Gin>(*call, gin, 0, shared).Run();
      }
    });
  }
  ExpectSound(program);
}

TEST_CASE("two nodes of one rank, by one thread and by two") {
  CheckRails(kDispatches, 2, 1);
  CheckRails(kDispatches, 2, 2);
}

TEST_CASE("one node of two ranks, by one thread and by two") {
  CheckRails(kDispatches, 1, 1);
  CheckRails(kDispatches, 1, 2);
}

TEST_CASE("combine by nodes") {
  CheckRails(kAddsByNode, 2, 1);
  CheckRails(kAddsByNode, 2, 2);
  CheckRails(kAddsByNode, 1, 1);
  CheckRails(kAddsByNode, 1, 2);
}

TEST_CASE("combine with sums at the source rank") {
  CheckRails(kAddsAtHome, 2, 1);
  CheckRails(kAddsAtHome, 2, 2);
  CheckRails(kAddsAtHome, 1, 1);
  CheckRails(kAddsAtHome, 1, 2);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
