// Requests, and plans of all algorithms for many ranks.
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/partition.h"
#include "written.h"

namespace jaxcomm {
namespace {

// Validates all plans of the algorithm for the request, if it supports it.
void CheckPlans(const Algorithm& algorithm, Request request) {
  for (bool pull : {false, true}) {
    request.geometry.pull = pull;
    if (!algorithm.supports(request)) continue;
    Expect("", BuildAll(algorithm, request), request);
  }
}

TEST_CASE("a block for all ranks is split into chunks only if the processor copies it") {
  for (Collective collective : {Collective::kAllGather, Collective::kBroadcast}) {
    const Plan one_node = Build("direct", Ask(collective, 4, 1, 10, 5))[0];
    CHECK(one_node.steps.size() == 8);
    for (size_t i = 0; i < 8; ++i) {  // the first chunk to all ranks, then the second
      CHECK(one_node.steps[i].count == 5 && one_node.steps[i].src.offset == (i < 4 ? 0 : 5));
      CHECK(one_node.steps[i].dst.rank == static_cast<int32_t>(i % 4));
    }
    const Plan apart = Build("direct", AskApart(collective, 4, 1, 10, 5))[0];
    CHECK(apart.steps.size() == 4);
    for (const Step& step : apart.steps) CHECK(step.count == 10);
  }
}

TEST_CASE("every algorithm is correct for more ranks than a word has bits") {
  for (Collective collective : kCollectives) {
    for (const Algorithm& algorithm : Algorithms(collective)) {
      for (const auto& [nodes, locals] : {std::pair{1, 70}, {23, 3}, {32, 2}, {65, 1}}) {
        CheckPlans(algorithm, AskApart(collective, nodes, locals, 1000, 300));
      }
    }
  }
}

TEST_CASE("requests are well formed up to their limits") {
  const auto fits = [](const Request& request) {
    const bool fits = WellFormed(request);
    CHECK(kAnyGeometry(request) == fits);
    return fits;
  };
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  CHECK(fits(Request()) && Request().geometry.num_ranks() == 1);
  CHECK(fits(Ask(Collective::kAllToAll, 1, 4, kMost / 16)) && !fits(Ask(Collective::kAllToAll, 1, 4, kMost / 16 + 1)));
  CHECK(fits(Ask(Collective::kBarrier, 46340, 46340, 0)) && !fits(Ask(Collective::kBarrier, 46341, 46341, 0)));
  constexpr int32_t kMostRanks = std::numeric_limits<int32_t>::max();
  CHECK(fits(Ask(Collective::kBarrier, kMostRanks, 1, 0)) && fits(Ask(Collective::kBarrier, 1, kMostRanks, 0)));
  CHECK(!fits(Ask(Collective::kBarrier, 0, 4, 0)) && !fits(Ask(Collective::kBarrier, 4, 0, 0)));
  CHECK(!fits(Ask(Collective::kAllGather, 1, 4, -1)) && !fits(Ask(Collective::kAllGather, 1, 4, 1, -1)));
  Request request = Ask(Collective::kBroadcast, 1, 4, 1);
  for (int32_t root : {-1, 0, 3, 4}) {
    request.root = root;
    CHECK(fits(request) == (root == 0 || root == 3));
  }
  request = Ask(Collective::kPermute, 1, 4, 1);
  for (int32_t source : {-2, -1, 3, 4}) {
    request.source_of[3] = source;
    CHECK(fits(request) == (source == -1 || source == 3));
  }
  request.source_of = {0, 1, 2};
  CHECK(!fits(request));
}

TEST_CASE("the parts of a range cover it and differ by at most one element") {
  for (int64_t count : {0, 1, 7, 100}) {
    for (int64_t n : {1, 3, 8, 150}) {
      int64_t next = 5;
      for (int64_t i = 0; i < n; ++i) {
        const Range part = Subrange({5, count}, n, i);
        CHECK(part.begin == next && (part.count == count / n || part.count == count / n + 1));
        CHECK(part.count <= CeilDiv(count, n));
        next += part.count;
      }
      CHECK(next == 5 + count);
    }
  }
  CHECK(NumChunks(0, 4) == 0 && NumChunks(8, 4) == 2 && NumChunks(9, 4) == 3 && NumChunks(9, 0) == 1);
  CHECK(MaxChunk(9, 3) == 3 && MaxChunk(10, 3) == 4 && MaxChunk(0, 0) == 0);
  CHECK(CeilLog2(1) == 0 && CeilLog2(2) == 1 && CeilLog2(3) == 2 && CeilLog2(4) == 2 && CeilLog2(5) == 3);
}

}  // namespace
}  // namespace jaxcomm
