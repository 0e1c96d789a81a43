// The kernel of dispatch and combine on the smallest group, in all executions that a relaxed memory model allows.
#include "../../ffi/cuda/kernels/rows.cuh"
#include "../check.h"
#include "fakes/litmus_runs.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int32_t kRanks = 2, kChoices = 2;
constexpr int64_t kArenaBytes = 1024;

// Tables of one token per rank have by rank the first packed choice of each expert, sizes, slots, sizes. Not in vectors
// of int32_t: the model uses functions of these, which would be compiled as parts of the program.
constexpr int32_t kRows[kChoices] = {0, 0};  // of the payload

// The token goes to the experts of both ranks, which have one each.
constexpr int32_t kTable[] = {0, 1, 1, 1, 0, 0, 1, 1, /**/ 0, 1, 1, 1, 1, 1, 1, 1};
constexpr int32_t kExperts[kRanks][kChoices] = {{0, 1}, {1, 0}};  // by rank and choice
constexpr int32_t kSlots[kRanks][kChoices] = {{0, 0}, {1, 1}};

// The token goes to both experts of the other rank.
constexpr int32_t kOtherTable[] = {0, 0, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 0, /**/
                                   0, 1, 2, 2, 1, 1, 0, 0, 0, 1, 1, 2, 0, 0, 1, 1};

void SetSizes(RowArgs& args, int32_t num_experts) {
  args.dtype = DType::kF32;
  args.num_rows = 1, args.num_slots = 2, args.num_choices = kChoices;
  args.row_bytes = sizeof(float), args.piece_bytes = 128;
  args.num_ranks = kRanks, args.num_experts = num_experts, args.choices_per_row = kChoices;
  CHECK(ArenaBytes(args) <= kArenaBytes);
}

void Run(const RowArgs& args, char* shared) { RowCall(args, 0, shared).Run(); }

void CheckDispatch(bool other, unsigned threads) {
  LitmusRuns<RowArgs> runs(kRanks, kArenaBytes);
  for (RowArgs& own : runs.args) {
    SetSizes(own, other ? 4 : 2);
    CHECK(GroupsPlaces(own) == other);
    own.state = runs.program.Words<uint64_t>(1, "state");
    own.table = other ? runs.Upload(kOtherTable, "table") : runs.Upload(kTable, "table");
    own.index = runs.Upload(kRows, "index");
  }
  const auto y = [other](int32_t rank, int32_t slot, int32_t run) { return LitmusValue(other ? 1 - rank : slot, run); };
  runs.Check(
      threads, RowSharedBytes(runs.args[0], static_cast<int32_t>(threads)),  //
      1, [](int32_t rank, int32_t, int32_t run) { return LitmusValue(rank, run); }, 2, y, Run);
}

void CheckCombine(unsigned threads) {
  LitmusRuns<RowArgs> runs(kRanks, kArenaBytes);
  for (int32_t r = 0; r < kRanks; ++r) {
    RowArgs& own = runs.args[r];
    own.combines = true;
    SetSizes(own, 2);
    own.state = runs.program.Words<uint64_t>(1, "state");
    own.table = runs.Upload(kTable, "table");
    own.index = runs.Upload(kSlots[r], "index");
    own.expert = runs.Upload(kExperts[r], "expert");
  }
  // Slot s of a rank belongs to rank s.
  runs.Check(
      threads, RowSharedBytes(runs.args[0], static_cast<int32_t>(threads)),    //
      2, [](int32_t, int32_t s, int32_t run) { return LitmusValue(s, run); },  //
      1, [](int32_t rank, int32_t, int32_t run) { return 2 * LitmusValue(rank, run); }, Run);
}

TEST_CASE("dispatch by one thread and by two") {
  CheckDispatch(false, 1);
  CheckDispatch(false, 2);
}

TEST_CASE("dispatch of tokens with two experts at one rank, by one thread and by two") {
  CheckDispatch(true, 1);
  CheckDispatch(true, 2);
}

TEST_CASE("combine by one thread and by two") {
  CheckCombine(1);
  CheckCombine(2);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
