// Puts to other nodes. Packed plans are correct, puts are packed where packing pays off, and no step waits for the
// network unnecessarily. test_executor.cc checks that kernels run the plans correctly.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "../../ffi/cuda/program/packing.h"
#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/channels.h"
#include "../../ffi/plan/validate.h"
#include "../check.h"
#include "fakes/random_request.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int64_t kItemBytes = 4;

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

RankProgram ProgramOf(Collective collective, const char* algorithm, Geometry geometry, int64_t block_count,
                      ContiguousCounts contiguous, int32_t num_channels, PackLimits limits = {}) {
  Request request;
  request.collective = collective;
  request.geometry = geometry;
  request.geometry.pull = true;
  request.geometry.all_addressable = false;
  request.block_count = ChannelCount(block_count, kItemBytes, num_channels);
  const Choice choice(*FindAlgorithm(collective, algorithm), request);
  return MakeRankProgram(choice, block_count, contiguous, kItemBytes, num_channels, 0, limits);
}

// Blocks of 1 MiB: in fragments of 64 bytes, which would be 16384 messages; of 32 KiB; contiguous.
TEST_CASE("short fragments are packed, long ones are not") {
  constexpr int64_t kCount = 1 << 18;
  const Geometry geometry = {2, 2, false, true};
  for (const int64_t count : {int64_t{16}, int64_t{8} << 10, int64_t{0}}) {
    const RankProgram program = ProgramOf(Collective::kAllToAll, "direct", geometry, kCount, {count, count}, 2);
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
  const RankProgram gather = ProgramOf(Collective::kAllGather, "direct", {2, 1}, kCount, {0, 16}, 1);
  CHECK(gather.scratch_count == kCount && gather.shares_input && !gather.shares_output);
  const RankProgram scatter = ProgramOf(Collective::kAllToAll, "direct", {2, 1}, kCount, {16, 0}, 1);
  CHECK(scatter.scratch_count == kCount && !scatter.shares_input && scatter.shares_output);
  // Little scratch for sends is enough.
  const PackLimits little = {32 << 10, 1};
  const RankProgram turns = ProgramOf(Collective::kAllToAll, "direct", {4, 1}, kCount, {16, 0}, 1, little);
  CHECK(turns.scratch_count == kCount);
  CHECK(ProgramOf(Collective::kAllToAll, "direct", {4, 1}, kCount, {16, 0}, 1).scratch_count == 3 * kCount);
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
      CHECK(CountFlushes(ProgramOf(Collective::kAllToAll, algorithm, {8, 1}, 1 << 10, {count, count}, 1)) == 0);
    }
  }
  CHECK(CountFlushes(ProgramOf(Collective::kAllGather, "direct", {8, 1}, 1 << 10, {}, 1)) == 0);
  CHECK(CountFlushes(ProgramOf(Collective::kAllGather, "ring", {8, 1}, 1 << 10, {}, 1)) == 0);
  // Before packing space is reused, its put must have been sent.
  const PackLimits little = {32 << 10, 1};
  CHECK(CountFlushes(ProgramOf(Collective::kAllToAll, "direct", {8, 1}, 1 << 10, {16, 16}, 1, little)) == 6);
  // 64 fragments of 32 KiB, at most eight at a time.
  CHECK(CountFlushes(ProgramOf(Collective::kAllToAll, "direct", {2, 1}, 1 << 19, {8 << 10, 8 << 10}, 1)) >= 7);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
