// The programs of groups of one node: steps that run at once, and the order of waits. Compared with the plans.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "../../ffi/cuda/program/program.h"
#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/builder.h"
#include "../../ffi/plan/channels.h"
#include "../check.h"
#include "fakes/random_request.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int64_t kItemBytes = 4;

Choice ChoiceOf(Collective collective, const char* algorithm, Geometry geometry, int64_t block_count,
                int64_t chunk_count = 0) {
  Request request;
  request.collective = collective;
  request.geometry = geometry;
  request.block_count = block_count;
  request.chunk_count = chunk_count;
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

// Whether the two ranges of memory overlap.
bool Overlap(const Place& a, int64_t a_count, const Place& b, int64_t b_count) {
  return a.rank == b.rank && a.space == b.space && a.offset < b.offset + b_count && b.offset < a.offset + a_count;
}

// No wait passes a signal of its rank. So whoever waits for whom is as in the plan, which the validator has run.
void CheckOrder(const Plan& plan, const RankProgram& program) {
  std::vector<std::multiset<int32_t>> waits[2];  // before each signal
  std::vector<int32_t> signals[2];
  std::map<int32_t, std::vector<int32_t>> waits_by_peer[2];
  std::vector<int32_t> origins;
  const auto add = [&](int which, const Step& step, int32_t origin) {
    if (step.kind == StepKind::kSignal) {
      signals[which].push_back(step.peer);
      waits[which].emplace_back();
    } else if (step.kind == StepKind::kWait) {
      if (waits[which].empty()) waits[which].emplace_back();
      waits[which].back().insert(step.peer);
      waits_by_peer[which][step.peer].push_back(origin);
    }
  };
  for (size_t i = 0; i < plan.steps.size(); ++i) add(0, plan.steps[i], static_cast<int32_t>(i));
  for (const ProgramStep& step : program.steps) {
    if (step.origin < 0) continue;
    origins.push_back(step.origin);
    add(1, step.step, step.origin);
  }
  CHECK(signals[0] == signals[1] && waits[0] == waits[1] && waits_by_peer[0] == waits_by_peer[1]);
  // Every step once, and data steps in the order of the plan.
  std::vector<int32_t> data;
  for (const int32_t origin : origins) {
    const StepKind kind = plan.steps[origin].kind;
    if (kind != StepKind::kSignal && kind != StepKind::kWait) data.push_back(origin);
  }
  CHECK(std::is_sorted(data.begin(), data.end()));
  std::sort(origins.begin(), origins.end());
  for (size_t i = 0; i < origins.size(); ++i) CHECK(origins[i] == static_cast<int32_t>(i));
  CHECK(origins.size() == plan.steps.size());
}

TEST_CASE("moves that run at once are independent, and no wait passes a signal") {
  int num_groups = 0;
  for (const Collective collective : kCollectives) {
    for (const Algorithm& algorithm : Algorithms(collective)) {
      for (const int32_t n : {2, 3, 4, 8}) {
        for (const bool pull : {false, true}) {
          for (const int64_t chunk_count : {0, 40}) {
            Choice choice = ChoiceOf(collective, algorithm.name, {1, n, true, pull, true}, 330, chunk_count);
            if (collective == Collective::kBarrier) choice.request.block_count = 0;
            if (OfLists(collective)) choice.request.block_count = 1;
            for (int32_t r = 0; r < n && collective == Collective::kPermute; ++r) {
              choice.request.source_of.push_back((r + 1) % n);
            }
            if (!algorithm.supports(choice.request)) continue;
            const RankProgram program = ProgramOf(choice, n - 1);
            CheckOrder(algorithm.build(choice.request, n - 1), program);
            for (size_t i = 0; i < program.steps.size(); i += program.steps[i].num_concurrent) {
              if (!Moves(program.steps[i].step.kind)) continue;
              if (program.steps[i].num_concurrent > 1) ++num_groups;
              for (int32_t a = 0; a < program.steps[i].num_concurrent; ++a) {
                for (int32_t b = 0; b < program.steps[i].num_concurrent; ++b) {
                  const Step& one = program.steps[i + a].step;
                  const Step& other = program.steps[i + b].step;
                  CHECK(a == b || (!Overlap(one.dst, one.count, other.dst, other.count) &&
                                   !Overlap(one.dst, one.count, other.src, other.count)));
                }
              }
            }
          }
        }
      }
    }
  }
  CHECK(num_groups > 50);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
