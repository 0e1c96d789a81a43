// The programs of plans. In groups of one node: steps that run at once, and the order of waits. Between nodes: packed
// plans are correct, puts are packed where packing pays off, and no step waits for the network unnecessarily.
// test_executor.cc checks that kernels run the programs correctly.
#include <algorithm>
#include <cstdio>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "../../ffi/cuda/program/packing.h"
#include "../../ffi/cuda/program/program.h"
#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/builder.h"
#include "../../ffi/plan/channels.h"
#include "../../ffi/plan/validate.h"
#include "../check.h"
#include "fakes/random_request.h"

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

bool IsInterNode(const Geometry& geometry, const ProgramStep& step, int32_t rank) {
  return step.step.kind == StepKind::kPut && geometry.node(step.step.peer) != geometry.node(rank);
}

// The ranks that put to another node without a later signal, and the receivers of such puts. Only these get an extra
// signal.
std::set<int32_t> OpenRanks(const std::vector<Plan>& plans, const Geometry& geometry) {
  std::set<int32_t> open;
  for (const Plan& plan : plans) {
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      const Step& put = plan.steps[i];
      if (put.kind != StepKind::kPut || geometry.node(put.peer) == geometry.node(plan.rank)) continue;
      const bool signalled = std::any_of(plan.steps.begin() + static_cast<int64_t>(i), plan.steps.end(),
                                         [&](auto& s) { return s.kind == StepKind::kSignal && s.peer == put.peer; });
      if (!signalled) open.insert({plan.rank, put.peer});
    }
  }
  return open;
}

// One channel of every plan.
TEST_CASE("packed plans are correct") {
  std::mt19937_64 random(1);
  int num_packed = 0;
  for (const Collective collective : kCollectives) {
    for (const Algorithm& algorithm : Algorithms(collective)) {
      for (int i = 0; i < 300; ++i) {
        const auto num_nodes = static_cast<int32_t>(2 + random() % 3);
        const Request request = RandomRequest(collective, num_nodes, static_cast<int32_t>(1 + random() % 3), random);
        const auto n = static_cast<uint64_t>(request.geometry.num_ranks());
        if (!algorithm.supports(request)) continue;
        const std::vector<Plan> plans = BuildAll(algorithm, request);
        const auto whole_count = request.block_count * static_cast<int64_t>(1 + random() % 2);
        const ContiguousCounts contiguous = {RandomContiguousCount(random), RandomContiguousCount(random)};
        const Fragments fragments(request.block_count, whole_count, contiguous);
        const PackLimits limits = {static_cast<int64_t>(random() % 100), static_cast<int64_t>(random() % 3000)};
        const PackedPlans packed = PackInterNodePuts(plans, request.geometry, fragments, kItemBytes, 1, limits);
        const std::set<int32_t> open = OpenRanks(plans, request.geometry);
        for (size_t r = 0; r < n; ++r) {
          CHECK(packed.origins[r].size() == packed.plans[r].steps.size());
          const auto& origins = packed.origins[r];
          const bool adds = std::find(origins.begin(), origins.end(), kExitBarrier) != origins.end();
          CHECK(!adds || open.count(static_cast<int32_t>(r)) > 0);
          if (packed.plans[r].scratch_count > plans[r].scratch_count) ++num_packed;
        }
        const Status valid = Validate(packed.plans, request);
        if (!valid.ok()) std::fprintf(stderr, "%s/%s: %s\n", Name(collective), algorithm.name, valid.message().c_str());
        CHECK(valid.ok());
      }
    }
  }
  CHECK(num_packed > 1000);
}

RankProgram PackedProgram(Collective collective, const char* algorithm, Geometry geometry, int64_t block_count,
                          ContiguousCounts contiguous, int32_t num_channels, PackLimits limits = {}) {
  geometry.pull = true;
  geometry.all_addressable = false;
  const Choice choice = ChoiceOf(collective, algorithm, geometry, ChannelCount(block_count, kItemBytes, num_channels));
  return MakeRankProgram(choice, block_count, contiguous, kItemBytes, num_channels, 0, limits);
}

// Blocks of 1 MiB: in fragments of 64 bytes, which would be 16384 messages; of 32 KiB; contiguous.
TEST_CASE("short fragments are packed, long ones are not") {
  constexpr int64_t kCount = 1 << 18;
  const Geometry geometry = {2, 2, false, true};
  for (const int64_t count : {int64_t{16}, int64_t{8} << 10, int64_t{0}}) {
    const RankProgram program = PackedProgram(Collective::kAllToAll, "direct", geometry, kCount, {count, count}, 2);
    const bool packs = count == 16;
    const Fragments fragments(kCount / 2, kCount, {count, count});
    for (const ChannelProgram& channel : program.channels) {
      int num_puts = 0, num_unpacked = 0;
      for (int32_t i = 0; i < channel.num_steps; ++i) {
        const ProgramStep& step = program.steps[channel.first_step + i];
        const Step& s = step.step;
        if (s.kind == StepKind::kCopy && s.src.space == Space::kScratch) ++num_unpacked;
        if (!IsInterNode(geometry, step, 0)) continue;
        ++num_puts;
        CHECK((s.src.space == Space::kScratch) == packs && (s.dst.space == Space::kScratch) == packs);
        CHECK(packs ? s.count == kCount / 2 : fragments.MostPuts(s) <= kMostPutsUnderWay);
      }
      CHECK(packs ? num_puts == 2 && num_unpacked == 2 : num_unpacked == 0);
      CHECK(count != 0 || num_puts == 2);
    }
    CHECK(program.scratch_count == (packs ? 4 * kCount : 0));
    CHECK(program.shares_input && program.shares_output == !packs);  // peers read the input
  }
  // Data that is contiguous on one side only is packed on the other.
  const RankProgram gather = PackedProgram(Collective::kAllGather, "direct", {2, 1}, kCount, {0, 16}, 1);
  CHECK(gather.scratch_count == kCount && gather.shares_input && !gather.shares_output);
  const RankProgram scatter = PackedProgram(Collective::kAllToAll, "direct", {2, 1}, kCount, {16, 0}, 1);
  CHECK(scatter.scratch_count == kCount && !scatter.shares_input && scatter.shares_output);
  // Little scratch for sends is enough.
  const PackLimits little = {32 << 10, 1};
  const RankProgram turns = PackedProgram(Collective::kAllToAll, "direct", {4, 1}, kCount, {16, 0}, 1, little);
  CHECK(turns.scratch_count == kCount);
  CHECK(PackedProgram(Collective::kAllToAll, "direct", {4, 1}, kCount, {16, 0}, 1).scratch_count == 3 * kCount);
}

// Of a channel with half of each block, or with all of it. By hand.
TEST_CASE("the number of fragments of a range") {
  const Fragments half(10, 20, {5, 0}), all(20, 20, {0, 5});  // the input, or the output, in fragments of five
  struct Row {
    const Fragments& fragments;
    Space space;
    int64_t offset, count, usual, most;
  };
  for (const Row& row : {Row{half, Space::kInput, 0, 10, 2, 3}, Row{half, Space::kInput, 8, 4, 2, 4},
                         Row{half, Space::kOutput, 0, 10, 1, 1}, Row{half, Space::kOutput, 8, 4, 2, 2},
                         Row{half, Space::kScratch, 8, 4, 1, 1}, Row{all, Space::kInput, 8, 24, 1, 1},
                         Row{all, Space::kOutput, 0, 20, 4, 5}, Row{all, Space::kOutput, 18, 3, 2, 4}}) {
    const Place place = {0, row.space, row.offset};
    CHECK(row.fragments.Usual(place, row.count) == row.usual && row.fragments.Most(place, row.count) == row.most);
  }
}

int CountFlushes(const RankProgram& program) {
  int count = 0;
  for (const ProgramStep& step : program.steps) count += step.flush ? 1 : 0;
  return count;
}

TEST_CASE("no step waits for the network unnecessarily") {
  // No step writes to the sources, and a rank has few puts for each other rank.
  for (const int64_t count : {int64_t{0}, int64_t{16}}) {
    for (const char* algorithm : {"direct", "pairwise"}) {
      CHECK(CountFlushes(PackedProgram(Collective::kAllToAll, algorithm, {8, 1}, 1 << 10, {count, count}, 1)) == 0);
    }
  }
  CHECK(CountFlushes(PackedProgram(Collective::kAllGather, "direct", {8, 1}, 1 << 10, {}, 1)) == 0);
  CHECK(CountFlushes(PackedProgram(Collective::kAllGather, "ring", {8, 1}, 1 << 10, {}, 1)) == 0);
  // Before packing space is reused, its put must have been sent.
  const PackLimits little = {32 << 10, 1};
  CHECK(CountFlushes(PackedProgram(Collective::kAllToAll, "direct", {8, 1}, 1 << 10, {16, 16}, 1, little)) == 6);
  // 64 fragments of 32 KiB, at most eight at a time.
  CHECK(CountFlushes(PackedProgram(Collective::kAllToAll, "direct", {2, 1}, 1 << 19, {8 << 10, 8 << 10}, 1)) >= 7);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
