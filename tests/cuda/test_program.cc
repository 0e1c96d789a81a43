// The programs of groups of one node: steps that run at once, and the order of waits. Compared with the plans.
#include <algorithm>
#include <utility>
#include <vector>

#include "../../ffi/cuda/program/program.h"
#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/builder.h"
#include "../../ffi/plan/channels.h"
#include "../check.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int64_t kItemBytes = 4;

Choice ChoiceOf(Collective collective, const char* algorithm, Geometry geometry, int64_t block_count) {
  Request request;
  request.collective = collective;
  request.geometry = geometry;
  request.block_count = block_count;
  return {*FindAlgorithm(collective, algorithm), request};
}

RankProgram ProgramOf(const Choice& choice, int32_t rank, ContiguousCounts contiguous = {}) {
  return MakeRankProgram(choice, choice.request.block_count, contiguous, kItemBytes, 1, rank);
}

bool Moves(StepKind kind) { return kind == StepKind::kCopy || kind == StepKind::kGet || kind == StepKind::kPut; }

// The numbers of moves that run at once, in the order of the program.
std::vector<int32_t> MovesAtOnce(const RankProgram& program) {
  std::vector<int32_t> found;
  for (size_t i = 0; i < program.steps.size(); i += program.steps[i].num_concurrent) {
    if (Moves(program.steps[i].step.kind)) found.push_back(program.steps[i].num_concurrent);
  }
  return found;
}

const Geometry kNode = {1, 8, true, true};

TEST_CASE("short moves between a rank and all peers run at once") {
  for (const Collective collective : {Collective::kAllToAll, Collective::kAllGather}) {
    const RankProgram program = ProgramOf(ChoiceOf(collective, "direct", kNode, 1000), 3);
    CHECK(MovesAtOnce(program) == std::vector<int32_t>{8});
  }
  // The sums of the peers, after one wait for all of them.
  const RankProgram program = ProgramOf(ChoiceOf(Collective::kAllReduce, "direct", kNode, 1001), 3);
  CHECK(MovesAtOnce(program) == std::vector<int32_t>{7});
  for (const ProgramStep& step : program.steps) {
    if (Moves(step.step.kind)) CHECK(step.longest_count == 126);  // 1001 = 8 * 125 + 1
  }
}

TEST_CASE("long moves, moves of fragments and dependent moves run one after the other") {
  const int64_t most = kConcurrentBytes / kItemBytes;
  const auto of_block = [](int64_t count, ContiguousCounts contiguous = {}) {
    return MovesAtOnce(ProgramOf(ChoiceOf(Collective::kAllToAll, "direct", kNode, count), 3, contiguous));
  };
  const std::vector<int32_t> one_by_one(8, 1);
  CHECK(of_block(most) == std::vector<int32_t>{8});
  CHECK(of_block(most + 1) == one_by_one);
  CHECK(of_block(1000, {10, 0}) == one_by_one);
  // The second copy of a ring reads what the first one has written.
  CHECK(MovesAtOnce(ProgramOf(ChoiceOf(Collective::kAllToAll, "bruck", {1, 2, true, true}, 1000), 0)).size() > 1);
}

// The network may still read the input of rank 0 when its second copy overwrites it.
Plan OverwriteAfterPut(const Request& request, int32_t rank) {
  const int64_t b = request.block_count;
  Builder plan(request, rank);
  if (rank == 1) plan.Wait(0);
  if (rank == 0) {
    plan.Move(plan.Input(0), Builder::At(1, Space::kOutput, 0), b);
    plan.Signal(1);
    plan.Move(plan.Scratch(0), plan.Output(0), b);
    plan.Move(plan.Scratch(b), plan.Input(0), b);
  }
  return std::move(plan).Finish(2 * b);
}

TEST_CASE("a move that must wait for the network begins a new group") {
  const Algorithm algorithm = {"overwrite", "", {}, OverwriteAfterPut};
  Request request;
  request.collective = Collective::kPermute;
  request.geometry = {2, 1, false, true};
  request.block_count = 100;
  const RankProgram program = ProgramOf(Choice(algorithm, request), 0);
  CHECK((MovesAtOnce(program) == std::vector<int32_t>{1, 1, 1}));  // the put to the other node is one of them
  const auto flushes = [](const ProgramStep& step) { return step.flush; };
  CHECK(std::count_if(program.steps.begin(), program.steps.end(), flushes) == 1);
}

// In their order, and past neither a signal nor a long move: so whoever waits for whom is as in the plan, which the
// validator has run. test_executor.cc would find moves that run at once and depend on each other.
TEST_CASE("waits pass the short moves before them") {
  Plan plan;
  using Kind = StepKind;
  for (const auto& [kind, count] : {std::pair{Kind::kPut, 5},
                                    {Kind::kWait, 0},
                                    {Kind::kWait, 0},
                                    {Kind::kSignal, 0},
                                    {Kind::kCopy, 8},
                                    {Kind::kWait, 0},
                                    {Kind::kGet, 9},
                                    {Kind::kWait, 0}}) {
    plan.steps.emplace_back();
    plan.steps.back().kind = kind, plan.steps.back().count = count;
  }
  CHECK((WaitsFirst(plan, 8) == std::vector<size_t>{1, 2, 0, 3, 5, 4, 6, 7}));
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
