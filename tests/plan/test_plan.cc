// Requests, and plans of all algorithms for many ranks.
#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/partition.h"
#include "written.h"

namespace jaxcomm {
namespace {

TEST_CASE("a block for all ranks goes to all of them chunk by chunk if the processor copies it") {
  for (Collective collective : {Collective::kAllGather, Collective::kBroadcast}) {
    const Plan plan = Build("direct", Ask(collective, 4, 1, 10, 5))[0];
    CHECK(plan.steps.size() == 8);
    for (size_t i = 0; i < 8; ++i) {  // the first chunk to all ranks, then the second
      CHECK(plan.steps[i].src.offset == (i < 4 ? 0 : 5) && plan.steps[i].dst.rank == static_cast<int32_t>(i % 4));
    }
  }
}

TEST_CASE("pipelined plans move and add chunks of the given size, which their scratch is made for") {
  std::map<std::string, int64_t> together, apart;  // elements of scratch
  for (Collective collective : kCollectives) {
    for (const Algorithm& algorithm : Algorithms(collective)) {
      for (const Request& request : {Ask(collective, 2, 3, 2400, 7), AskApart(collective, 2, 3, 2400, 7)}) {
        if (!algorithm.supports(request) || algorithm.protocol != Protocol::kSteps) continue;
        int64_t longest = 0;  // of sums and moves between nodes
        const std::vector<Plan> plans = BuildAll(algorithm, request);
        for (const Plan& plan : plans) {
          for (const Step& step : plan.steps) {
            const bool far = step.peer >= 0 && step.peer / 3 != plan.rank / 3;
            if (far || step.kind == StepKind::kReduce) longest = std::max(longest, step.count);
          }
        }
        const std::string name = std::string(Name(collective)) + "/" + algorithm.name;
        if (longest == 7) (request.geometry.all_addressable ? together : apart)[name] = plans[0].scratch_count;
      }
    }
  }
  // As in docs/reference/algorithms.md.
  std::map<std::string, int64_t> expected = {{"all_to_all/hierarchical", 4 * 3 * 7},
                                             {"all_gather/hierarchical", 0},
                                             {"reduce_scatter/ring", 6 * 7},
                                             {"reduce_scatter/hierarchical", (4 * 2 + 2) * 7},
                                             {"all_reduce/ring", 0},
                                             {"all_reduce/tree", 3 * 2400},
                                             {"all_reduce/hierarchical", (5 * 2 + 2) * 7},
                                             {"broadcast/tree", 0},
                                             {"broadcast/ring", 0},
                                             {"broadcast/hierarchical", 0}};
  CHECK(apart == expected);
  for (const char* name : {"all_gather/direct", "all_reduce/direct", "all_reduce/root", "broadcast/direct",
                           "broadcast/scatter_all_gather"}) {
    expected[name] = 0;
  }
  CHECK(together == expected);
}

TEST_CASE("ranks with the same steps have different peers at any time, and wait for signals in their order") {
  int num_checked = 0;
  for (Collective collective : kCollectives) {
    for (const Algorithm& algorithm : Algorithms(collective)) {
      for (const auto& [nodes, locals, pull] : {std::tuple{1, 5, false}, {1, 5, true}, {3, 4, false}, {3, 4, true}}) {
        // Ranks of a tree differ. A direct combine adds rows in the order of ranks.
        const std::string name = algorithm.name;
        if (name == "tree" || (collective == Collective::kCombine && name == "direct")) continue;
        Request request = AskApart(collective, nodes, locals, 600);
        request.geometry.pull = pull;
        if (!algorithm.supports(request)) continue;
        const std::vector<Plan> plans = BuildAll(algorithm, request);
        // Peers by rank, in the order of the steps. Without pulls, only ranks other than the root of a broadcast read.
        std::vector<std::vector<int32_t>> moves(plans.size()), signals = moves, waits = moves;
        for (const Plan& plan : plans) {
          for (const Step& step : plan.steps) {
            auto& peers = IsMove(step.kind) ? moves : step.kind == StepKind::kSignal ? signals : waits;
            if (step.peer >= 0 && (step.kind != StepKind::kGet || pull)) peers[plan.rank].push_back(step.peer);
          }
        }
        const auto alike = [](const auto& peers, const auto& others) {
          return std::all_of(peers.begin(), peers.end(),
                             [&](const auto& of_rank) { return of_rank.size() == others[0].size(); });
        };
        for (size_t k = 0; alike(moves, moves) && k < moves[0].size(); ++k, ++num_checked) {
          std::set<int32_t> at_once;
          for (const auto& of_rank : moves) at_once.insert(of_rank[k]);
          CHECK(at_once.size() == moves.size());
        }
        // In a dispatch that pulls, signals of the node come between those of other nodes.
        if (!alike(signals, waits) || !alike(waits, waits) || (collective == Collective::kDispatch && pull)) continue;
        for (size_t rank = 0; rank < waits.size(); ++rank) {
          for (size_t k = 0; k < waits[0].size(); ++k) CHECK(signals[waits[rank][k]][k] == static_cast<int32_t>(rank));
        }
      }
    }
  }
  CHECK(num_checked > 100);
}

TEST_CASE("waits pass the short moves before them, and nothing else") {
  Plan plan;
  const Step move = Put(Output(1), Input(0), 4), longer = Put(Output(1), Input(0), 5), sum = Reduce(Output(0), 0, 2, 4);
  plan.steps = {move, Wait(1), move, Wait(2), sum, move, Wait(1), longer, Wait(2), Signal(1), move, Wait(1)};
  CHECK(WaitsFirst(plan, 4) == (std::vector<size_t>{1, 3, 0, 2, 4, 6, 5, 7, 8, 9, 11, 10}));
}

TEST_CASE("every algorithm is correct for more ranks than a word has bits") {
  for (Collective collective : kCollectives) {
    for (const Algorithm& algorithm : Algorithms(collective)) {
      for (const auto& [nodes, locals] : {std::pair{1, 70}, {23, 3}, {32, 2}, {65, 1}}) {
        Request request = AskApart(collective, nodes, locals, 1000, 300);
        for (const bool pull : {false, true}) {
          request.geometry.pull = pull;
          if (algorithm.supports(request)) Expect("", BuildAll(algorithm, request), request);
        }
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
}

}  // namespace
}  // namespace jaxcomm
