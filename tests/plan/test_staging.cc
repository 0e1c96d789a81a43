// The staging ring: staged plans compute the collective in every order of execution, and their scratch does not depend
// on the size of the operand.
#include <algorithm>
#include <set>
#include <string>

#include "../../ffi/plan/channels.h"
#include "../../ffi/plan/partition.h"
#include "../../ffi/plan/request.h"
#include "../../ffi/plan/staging.h"
#include "written.h"

namespace jaxcomm {
namespace {

constexpr int64_t kLarge = int64_t{1} << 24;

Request AskOnGpus(Collective collective, int32_t n, int64_t block_count) {
  Request request = Ask(collective, 1, n, block_count);
  request.geometry = GpuGeometry(n, n, true);
  request.root = n / 2;
  return request;
}

TEST_CASE("direct plans of one node use the ring") {
  for (const int32_t n : {2, 3, 4, 5, 8, 16}) {
    std::set<std::string> staged;
    for (const Collective collective : kCollectives) {
      for (const Algorithm& algorithm : Algorithms(collective)) {
        const Request request = AskOnGpus(collective, n, OfLists(collective) ? 1 : kLarge);
        if (!algorithm.supports(request) || algorithm.protocol != Protocol::kSteps) continue;
        if (StagedCount(algorithm, request, 4) > 0) staged.insert(std::string(Name(collective)) + "/" + algorithm.name);
        CHECK(CanStage(algorithm, AskOnGpus(collective, n, 0)) == CanStage(algorithm, request));  // at any size
      }
    }
    CHECK(staged ==
          (std::set<std::string>{"all_to_all/direct", "all_gather/direct", "all_reduce/direct", "all_reduce/one_shot",
                                 "reduce_scatter/direct", "permute/direct", "broadcast/direct"}));
  }
}

TEST_CASE("operands that fit into the ring are not staged") {
  const auto staged = [](Collective collective, int32_t n, int64_t block_bytes) {
    return StagedCount(*FindAlgorithm(collective, "direct"), AskOnGpus(collective, n, block_bytes / 4), 4);
  };
  constexpr int64_t kRing = 1 << 20;
  CHECK(staged(Collective::kAllGather, 8, kRing) == 0 && staged(Collective::kAllGather, 8, kRing + 4) == 65536);
  const Algorithm& gather = *FindAlgorithm(Collective::kAllGather, "direct");
  CHECK(StagedCount(gather, AskOnGpus(Collective::kAllGather, 8, kRing), 16) == 65536 / 4);
  CHECK(staged(Collective::kAllToAll, 8, kRing / 8) == 0 && staged(Collective::kAllToAll, 8, kRing) == 8192);
  CHECK(staged(Collective::kReduceScatter, 3, kRing) == 21824);  // 256 KiB in three blocks, rounded down to 128 B
  CHECK(staged(Collective::kAllToAll, 72, kRing) == 896 && staged(Collective::kAllToAll, 73, kRing) == 0);
  CHECK(staged(Collective::kAllGather, 1, 2 * kRing) == 0);  // no peer
  // Larger moves run one after another, so the transfer takes longer.
  for (const int32_t n : {2, 8, 72})
    CHECK(4 * staged(Collective::kAllGather, n, (int64_t{31} << 30) / n) <= kConcurrentBytes);
  // At most 2^17 chunks, divided by the number of ranks.
  CHECK(staged(Collective::kAllGather, 2, int64_t{1} << 40) == int64_t{1} << 22);
  CHECK(staged(Collective::kAllGather, 8, (int64_t{4} << 30) + 4) == 65536 + 32);
  Request apart = AskOnGpus(Collective::kAllGather, 8, kRing);
  apart.geometry = GpuGeometry(8, 4, true);
  CHECK(StagedCount(*FindAlgorithm(Collective::kAllGather, "direct"), apart, 4) == 0);
  const Request lists = AskOnGpus(Collective::kAllToAllV, 8, 1);
  CHECK(StagedCount(*FindAlgorithm(Collective::kAllToAllV, "direct"), lists, 64 << 20) == 0);
}

// Moves of fragments run one after another.
TEST_CASE("a fragmented layout is staged only if the parts of a chunk are large") {
  const auto staged = [](Collective collective, int32_t n, int64_t contiguous_count) {
    CallSpec spec;
    spec.collective = collective;
    spec.group_size = n;
    spec.input_contiguous_count = contiguous_count;
    const int64_t count = int64_t{n} << 22;
    const Request request = ValueOf(MakeRequest(spec, GpuGeometry(n, n, true), count, count));
    return StagedCount(*FindAlgorithm(collective, "direct"), request, 4) > 0;
  };
  for (const int64_t contiguous_count : {0, 1 << 22}) CHECK(staged(Collective::kAllToAll, 72, contiguous_count));
  for (const int32_t n : {9, 72}) CHECK(!staged(Collective::kAllToAll, n, 1 << 10));
  for (const int32_t n : {2, 8}) CHECK(staged(Collective::kAllToAll, n, 1 << 10));  // 32 KiB and more
}

// Of all ranks for small blocks, with slots of 1 element to more than a block.
TEST_CASE("staged plans are correct in every order") {
  int num_checked = 0;
  for (const Collective collective : kCollectives) {
    for (const Algorithm& algorithm : Algorithms(collective)) {
      if (algorithm.protocol != Protocol::kSteps || OfLists(collective)) continue;
      for (const int32_t n : {2, 3, 5, 8, 16}) {
        if (!algorithm.supports(AskOnGpus(collective, n, kLarge))) continue;
        if (StagedCount(algorithm, AskOnGpus(collective, n, kLarge), 4) == 0) continue;
        for (const auto& [block_count, staged_count] :
             {std::pair{0, 4}, {1, 1}, {7, 1}, {40, 3}, {64, 8}, {300, 20}, {150, 149}, {10, 64}, {2048, 384}}) {
          Request request = AskOnGpus(collective, n, block_count);
          request.staged_count = staged_count;
          const std::vector<Plan> plans = BuildAll(algorithm, request);
          Expect("", plans, request);
          ++num_checked;
          for (const Plan& plan : plans) {
            CHECK(plan.scratch_count == plans[0].scratch_count);
            for (const Step& step : plan.steps) {  // peers access the ring only
              CHECK(step.kind != StepKind::kPut);
              CHECK(step.kind != StepKind::kGet || step.src.space == Space::kScratch);
              // Slots keep the alignment of elements.
              CHECK(!IsMove(step.kind) || block_count < 2048 || (step.src.offset - step.dst.offset) % 128 == 0);
            }
            for (const Place& source : plan.sources) {
              CHECK(source.rank == plan.rank || source.space == Space::kScratch);
            }
          }
        }
      }
    }
  }
  CHECK(num_checked == 7 * 5 * 9);
}

TEST_CASE("permutations of all kinds are staged correctly") {
  for (const std::vector<int32_t>& source_of : std::vector<std::vector<int32_t>>{
           {3, 2, 1, 0}, {1, 2, 3, 0}, {0, 1, 2, 3}, {2, 2, 2, 2}, {-1, -1, -1, -1}, {-1, 3, -1, 3}, {1, -1, 0, 0}}) {
    Request request = AskOnGpus(Collective::kPermute, 4, 50);
    request.source_of = source_of;
    request.staged_count = 6;
    Expect("", Build("direct", request), request);
  }
  Request own = AskOnGpus(Collective::kPermute, 4, kLarge);
  own.source_of = {0, -1, 2, 3};  // no peer reads
  CHECK(StagedCount(*FindAlgorithm(Collective::kPermute, "direct"), own, 4) == 0);
}

// The slots, and the lead of the writer over the readers.
TEST_CASE("the ring has a fixed size, and chunks are written ahead") {
  for (const int64_t block_count : {1 << 20, 1 << 22}) {
    Request request = AskOnGpus(Collective::kAllGather, 8, block_count);
    request.staged_count = StagedCount(*FindAlgorithm(Collective::kAllGather, "direct"), request, 4);
    const Plan plan = Build("direct", request)[3];
    CHECK(plan.scratch_count * 4 == kStagingSlots * kStagingSlotBytes);
    // Two chunks before the first wait; each later iteration waits once for each peer.
    int64_t num_copies = 0, num_waits = 0;
    for (const Step& step : plan.steps) {
      num_waits += step.kind == StepKind::kWait;
      if (num_waits == 0 && step.kind == StepKind::kCopy && step.dst.space == Space::kScratch) ++num_copies;
    }
    CHECK(num_copies == kStagingLead && num_waits == 7 * block_count / 65536);
  }
  // An all_reduce has slots for sums as well: one n-th of a chunk.
  Request request = AskOnGpus(Collective::kAllReduce, 8, 1 << 22);
  request.staged_count = 65536;
  CHECK(Build("direct", request)[0].scratch_count * 4 == kStagingSlots * kStagingSlotBytes / 8 * 9);
}

}  // namespace
}  // namespace jaxcomm
