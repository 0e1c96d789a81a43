// The kernels that move rows, on the smallest groups, in all executions that a relaxed memory model and GIN allow:
// dispatch and combine in a node and between nodes, all_to_all_v, and route_and_dispatch. Rings of bulk copies have two
// stages of 16 bytes.
#include <algorithm>
#include <vector>

#include "fakes/litmus_nodes.h"
// Must follow it, as NCCL's headers go before gin.h.
#include "../../ffi/cuda/kernels/rail_combine.cuh"
#include "../../ffi/cuda/kernels/rail_dispatch.cuh"
#include "../../ffi/cuda/kernels/route_and_dispatch.cuh"
#include "../../ffi/cuda/kernels/slices.cuh"
#include "../check.h"

namespace jaxcomm {
namespace cuda {
namespace {

using memory_model::Program;
using memory_model::Require;

constexpr int32_t kRanks = 2;
constexpr BulkStages kStages = {2, 16};

float Value(int64_t rank, int32_t run) { return static_cast<float>(10 * run + rank + 1); }

// Memory of the program with these values.
template <size_t kNum>
const int32_t* UploadTo(Program& program, const int32_t (&values)[kNum], const char* name) {
  auto* const to = program.Words<int32_t>(kNum, name);
  for (size_t i = 0; i < kNum; ++i) to[i] = values[i];
  return to;
}

// Adds the runs of a kernel whose arguments `call` have the operand x and the result y.
template <typename Args, typename X, typename Y, typename Run>
void AddRunsOf(Program& program, int32_t rank, unsigned threads, int32_t runs, Args& call, int64_t num_x, X x,
               int64_t num_y, Y y, Run run) {
  auto* const from = program.Words<float>(num_x, "x");
  auto* const to = program.Words<float>(num_y, "y");
  call.x = reinterpret_cast<char*>(from);
  call.y = reinterpret_cast<char*>(to);
  AddRuns(program, rank, threads, runs, from, num_x, x, to, num_y, y, run);
}

// Tables of one token per rank have by rank the first packed choice of each expert, sizes, slots, sizes. Not in vectors
// of int32_t: the model uses functions of these, which would be compiled as parts of the program.
constexpr int32_t kRows[] = {0, 0};  // of the payload

// The token goes to the experts of both ranks, which have one each.
constexpr int32_t kTable[] = {0, 1, 1, 1, 0, 0, 1, 1, /**/ 0, 1, 1, 1, 1, 1, 1, 1};
constexpr int32_t kExperts[kRanks][2] = {{0, 1}, {1, 0}};  // by rank and choice
constexpr int32_t kSlots[kRanks][2] = {{0, 0}, {1, 1}};

// The token goes to both experts of the other rank.
constexpr int32_t kPeerTable[] = {0, 0, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0, /**/
                                  0, 1, 2, 2, 1, 1, 0, 0, 0, 1, 1, 2, 0, 0, 1, 1};

struct RowCase {
  bool combines;
  int32_t num_nodes;  // 0: the kernel inside a node. 1: messages that do not cross the network
  bool to_peer = false, sums_at_source = false;
};

void CheckRows(const RowCase& test, unsigned threads) {
  Program program;
  InterNodeRowArgs sizes;
  sizes.sums_at_source = test.sums_at_source;
  RowArgs& rows = sizes.rows;
  rows.combines = test.combines;
  rows.dtype = DType::kF32;
  rows.num_rows = 1, rows.num_slots = 2, rows.num_choices = 2, rows.choices_per_row = 2;
  rows.row_bytes = sizeof(float), rows.piece_bytes = 128;
  rows.num_ranks = kRanks, rows.num_experts = test.to_peer ? 4 : 2;
  CHECK(GroupsPlaces(rows) == test.to_peer);
  const bool rails = test.num_nodes > 0;
  const int32_t num_nodes = std::max(test.num_nodes, 1);
  const LitmusNodes nodes(program, num_nodes, kRanks / num_nodes,
                          rails ? RailArenaBytes(sizes, num_nodes) : ArenaBytes(rows));
  std::vector<InterNodeRowArgs> args(kRanks, sizes);
  for (int32_t r = 0; r < kRanks; ++r) {
    const InterNodeRowArgs* const call = &args[r];
    RowArgs& own = args[r].rows;
    args[r].gin = nodes.handles[r];
    args[r].node = nodes.comms[r];
    own.comm = rails ? nodes.handles[r].comm : nodes.comms[r];
    own.state = program.Words<uint64_t>(1, "state");
    own.table = test.to_peer ? UploadTo(program, kPeerTable, "table") : UploadTo(program, kTable, "table");
    own.index = test.combines ? UploadTo(program, kSlots[r], "index") : UploadTo(program, kRows, "index");
    own.expert = UploadTo(program, kExperts[r], "expert");
    const auto num_threads = static_cast<int32_t>(threads);
    char* const shared =
        program.Take(rails ? RailSharedBytes(own, num_threads) : RowSharedBytes(own, num_threads), "shared memory");
    const ncclDevComm* const nccl_comm = &nodes.nccl_comms[r];
    // Slot s belongs to rank s, or all slots to the peer. Experts return rows as they are.
    const auto slots = [r, peer = test.to_peer](int64_t s, int32_t run) { return Value(peer ? 1 - r : s, run); };
    const auto tokens = [r](int64_t, int32_t run) { return Value(r, run); };
    const auto sums = [r](int64_t, int32_t run) { return 2 * Value(r, run); };
    const auto run = [=] {
      if (!rails) return RowCall(call->rows, 0, shared).Run();
      const device::Gin gin(call->gin, *nccl_comm);
      if (call->rows.combines) {
        RailCombine<device::Gin>(*call, gin, 0, shared).Run();
      } else {
        RailDispatch<device::Gin>(*call, gin, 0, shared).Run();
      }
    };
    if (test.combines) {
      AddRunsOf(program, r, threads, 2, own, 2, slots, 1, sums, run);
    } else {
      AddRunsOf(program, r, threads, 2, own, 1, tokens, 2, slots, run);
    }
  }
  ExpectSound(program);
}

TEST_CASE("dispatch and combine, by one thread and by two") {
  const RowCase cases[] = {{false, 0},
                           {false, 0, true},
                           {true, 0},
                           {false, 1},
                           {false, 2},
                           {true, 1},
                           {true, 2},
                           {true, 1, false, true},
                           {true, 2, false, true}};
  for (const RowCase& test : cases) {
    for (const unsigned threads : {1u, 2u}) CheckRows(test, threads);
  }
}

// One slice of one row for each rank: by rank input offsets, sizes, output offsets, sizes.
constexpr int32_t kSlices[] = {0, 0, 1, 1, 0, 0, 1, 1, /**/ 0, 0, 1, 1, 1, 1, 1, 1};

// `bulk`: number of ranks that make bulk copies. With three `pieces`, a copy uses a stage twice.
void CheckSlices(bool puts, unsigned threads, int32_t bulk, int64_t pieces = 1) {
  Program program;
  const int64_t row = bulk > 0 ? 4 * pieces : 1;
  const LitmusNodes nodes(program, 1, kRanks, 512);
  std::vector<SliceArgs> args(kRanks);
  for (int32_t r = 0; r < kRanks; ++r) {
    SliceArgs& own = args[r];
    own.comm = nodes.comms[r];
    own.input_rows = puts ? 3 : 1, own.output_rows = 2;
    CHECK(Reads(own) == !puts);
    own.row_bytes = row * int64_t{sizeof(float)};
    own.slices_per_rank = kRanks;
    CHECK(ArenaBytes(own) <= 512);
    own.table = UploadTo(program, kSlices, "table");
    if (r < bulk) own.bulk = kStages;
    const auto num_threads = static_cast<int32_t>(threads);
    char* const shared =
        program.Take(SliceSharedBytes(num_threads, bulk > 0 ? kStages : BulkStages{}), "shared memory");
    AddRunsOf(
        program, r, threads, 2, own, row, [r](int64_t, int32_t run) { return Value(r, run); }, 2 * row,
        [row](int64_t i, int32_t run) { return Value(i / row, run); },
        [call = &own, shared] { SliceCall(*call, 0, shared).Run(); });
  }
  ExpectSound(program);
}

TEST_CASE("one slice per pair: read and put, by one thread and by two, in bulk by one rank and by both") {
  for (const bool puts : {false, true}) {
    for (const unsigned threads : {1u, 2u}) CheckSlices(puts, threads, 0);
    for (const int32_t bulk : {1, 2}) CheckSlices(puts, 1, bulk);
    CheckSlices(puts, 2, 2);
    CheckSlices(puts, 1, 2, 3);
  }
}

// `runs` calls of route_and_dispatch on one arena, of one token per rank, whose first choice is the expert of the same
// rank, or of the other one if `crossed`, and its second one, if there is one, is the other expert.
void CheckRouteAndDispatch(int32_t choices, bool crossed, int32_t runs, unsigned threads) {
  Program program;
  RouteAndDispatchArgs sizes;
  sizes.comm.local.size = kRanks;
  sizes.tokens = 1, sizes.choices = choices, sizes.num_experts = kRanks, sizes.capacity = choices;
  sizes.row_bytes = sizeof(float), sizes.piece_bytes = 8;
  // ArenaBytes: one channel, two sets of slots of 16 bytes.
  const LitmusNodes nodes(program, 1, kRanks,
                          EpochBytes(sizes.num_epochs) + int64_t{2} * kRanks * ChannelUnits(sizes) * 16);
  std::vector<RouteAndDispatchArgs> args(kRanks, sizes);
  for (int32_t r = 0; r < kRanks; ++r) {
    RouteAndDispatchArgs& own = args[r];
    own.comm = nodes.comms[r];
    own.comm.ll_slots = SlotsOfArena(own.comm, sizes.num_epochs);
    auto* const ids = program.Words<int32_t>(choices, "ids");
    for (int32_t k = 0; k < choices; ++k) ids[k] = (r + k + (crossed ? 1 : 0)) % kRanks;
    own.ids = ids;
    own.slot = program.Words<int32_t>(choices, "slot");
    own.expert = program.Words<int32_t>(choices, "expert");
    own.group_sizes = program.Words<int32_t>(1, "group_sizes");
    own.group_counts = program.Words<int32_t>(1, "group_counts");
    own.demand = program.Words<int32_t>(1, "demand");
    own.dropped = program.Words<int32_t>(1, "dropped");
    own.table = program.Words<int32_t>(kRanks * kRanks, "table");
    char* const shared = program.Take(RouteAndDispatchSharedBytes(own), "shared memory");
    AddRunsOf(
        program, r, threads, runs, own, 1, [r](int64_t, int32_t run) { return Value(r, run); }, choices,
        [=](int64_t s, int32_t run) {
          return Value(choices == kRanks ? s : crossed ? 1 - r : r, run);
        },
        [=, call = &own] {
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
TEST_CASE("route_and_dispatch: rows that cross, that stay, and that go to both ranks, by one thread and by two") {
  CheckRouteAndDispatch(1, true, 3, 1);
  CheckRouteAndDispatch(1, false, 3, 1);
  CheckRouteAndDispatch(2, true, 3, 1);
  CheckRouteAndDispatch(1, true, 3, 2);
  CheckRouteAndDispatch(2, false, 1, 2);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
