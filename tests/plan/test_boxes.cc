// Plans of reshard where several nodes want the same elements: times and bytes of ports by hand.
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/plan/boxes.h"
#include "../../ffi/plan/cost.h"
#include "../../ffi/plan/partition.h"
#include "written.h"

namespace jaxcomm {
namespace {

constexpr int64_t kChunk = 60;

// Boxes of rows: [begin, end) per rank. The ranks of a node have the same destination.
Request AskForRows(int32_t locals, const std::vector<std::pair<int64_t, int64_t>>& sources,
                   const std::vector<std::pair<int64_t, int64_t>>& destinations) {
  Request request = AskApart(Collective::kReshard, static_cast<int32_t>(sources.size()), locals, 0, kChunk);
  std::vector<Box> from, to;
  for (size_t node = 0; node < sources.size(); ++node) {
    for (int32_t local = 0; local < locals; ++local) {
      const auto [begin, end] = local == 0 ? sources[node] : std::pair<int64_t, int64_t>();
      from.push_back({{begin}, {end}});
      to.push_back({{destinations[node].first}, {destinations[node].second}});
      request.block_count = std::max(request.block_count, to.back().count());
    }
  }
  request.boxes = ValueOf(MakeBoxes(from, to, request.geometry));
  for (const BoxMoves* moves : {&request.boxes->direct, &request.boxes->chains, &request.boxes->trees}) {
    std::set<std::pair<int64_t, int32_t>> senders, receivers;
    for (const BoxPair& pair : moves->pairs) {
      CHECK(senders.emplace(pair.matching, pair.from).second && receivers.emplace(pair.matching, pair.to).second);
    }
  }
  return request;
}

// Elements that each node sends to others.
std::vector<int64_t> SentByNode(const std::vector<Plan>& plans, const Request& request) {
  std::vector<int64_t> sent(static_cast<size_t>(request.geometry.num_nodes));
  for (const Plan& plan : plans) {
    for (const Step& step : plan.steps) {
      if (step.kind == StepKind::kPut) sent[static_cast<size_t>(request.geometry.node(plan.rank))] += step.count;
    }
  }
  return sent;
}

// The predicted time if a chunk takes one second on the link of a node, and all else takes none.
double Rounds(const Request& request) {
  Machine machine;
  machine.links = {LinkModel{0, 1e30, 0}, LinkModel{0, 1e30, 0}, LinkModel{0, kChunk, 0}};
  machine.shared_network = true;
  return CostOf(*FindAlgorithm(Collective::kReshard, "hierarchical"), request, 1, machine).time_s;
}

bool Near(double a, double b) { return std::abs(a - b) < 1e-6; }

TEST_CASE("copies for R nodes follow a chain: chunks + R - 1 rounds, and each port sends one copy") {
  for (const int32_t copies : {1, 2, 3, 7}) {
    for (const int32_t locals : {1, 2}) {
      for (const int64_t chunks : {8, 30}) {
        const int64_t count = chunks * kChunk;
        std::vector<std::pair<int64_t, int64_t>> sources(copies + 1), destinations(copies + 1, {0, count});
        std::swap(sources[0], destinations[0]);
        const Request request = AskForRows(locals, sources, destinations);
        const std::vector<Plan> plans = Build("hierarchical", request);
        Expect("", plans, request);
        // Four slots at each receiver, and none at the owner: pieces that are contiguous are not packed.
        CHECK(plans[0].scratch_count == 0 && plans[copies * locals].scratch_count == 4 * kChunk);
        std::vector<int64_t> sent(copies + 1, count);
        sent.back() = 0;
        CHECK(SentByNode(plans, request) == sent);
        CHECK(Near(Rounds(request), static_cast<double>(chunks + copies - 1)));
        CHECK(SentByNode(Build("direct", request), request)[0] == copies * locals * count);
      }
    }
  }
}

TEST_CASE("copies of at most half a chunk follow a binomial tree") {
  for (const int32_t copies : {1, 2, 3, 7, 20}) {
    const int64_t count = kChunk / 4;
    std::vector<std::pair<int64_t, int64_t>> sources(copies + 1), destinations(copies + 1, {0, count});
    std::swap(sources[0], destinations[0]);
    const Request request = AskForRows(1, sources, destinations);
    const std::vector<Plan> plans = Build("hierarchical", request);
    Expect("", plans, request);
    CHECK(plans.back().scratch_count == count);  // a slot for its only message
    CHECK(Near(Rounds(request), 0.25 * CeilLog2(copies + 1)));
  }
}

TEST_CASE("owners send what they can while a node receives all") {
  // Three nodes have a third each, and all want all: each owner sends two copies in the time in which it receives two.
  const int64_t part = 8 * kChunk, all = 3 * part;
  const std::vector<std::pair<int64_t, int64_t>> thirds = {{0, part}, {part, 2 * part}, {2 * part, all}};
  const Request gather = AskForRows(1, thirds, {{0, all}, {0, all}, {0, all}});
  CHECK(gather.boxes->chains.depth == 0 && gather.boxes->trees.pairs.empty());
  CHECK(SentByNode(Build("hierarchical", gather), gather) == std::vector<int64_t>(3, 2 * part));
  // A node that sends three copies is no bottleneck while another one receives eight times as much as each of them.
  const std::pair<int64_t, int64_t> few = {0, kChunk}, many = {kChunk, 9 * kChunk}, none;
  const Request uneven = AskForRows(1, {few, many, none, none, none}, {none, none, few, few, {0, 9 * kChunk}});
  CHECK(uneven.boxes->chains.depth == 0 && uneven.boxes->chains.busiest == 9 * kChunk);  // the last node receives all
  // Node 0 has sent both copies when node 2 has received all.
  const Request exact = AskForRows(1, {few, none, none, {kChunk, 2 * kChunk}}, {none, few, {0, 2 * kChunk}, none});
  CHECK(exact.boxes->chains.depth == 0);
  // Two owners of a half each and three readers: a port would send 3/2, and sends 1. The readers send the rest.
  const std::pair<int64_t, int64_t> whole = {0, 2 * part};
  const Request halves =
      AskForRows(1, {{0, part}, {part, 2 * part}, none, none, none}, {none, none, whole, whole, whole});
  const std::vector<Plan> plans = Build("hierarchical", halves);
  Expect("", plans, halves);
  const std::vector<int64_t> sent = SentByNode(plans, halves);
  CHECK(*std::max_element(sent.begin(), sent.end()) == 2 * part);
}

TEST_CASE("cells of two dimensions: their runs, and messages of several pieces") {
  const Box whole = {{0, 0}, {4, 6}}, left = {{0, 0}, {4, 3}}, right = {{0, 3}, {4, 6}}, top = {{0, 0}, {2, 6}};
  const Box none = {{1, 1}, {1, 1}};
  Request request = AskApart(Collective::kReshard, 3, 1, 12, 4);
  const auto boxes = [&](const std::vector<Box>& from, const std::vector<Box>& to) {
    return MakeBoxes(from, to, request.geometry);
  };
  const auto split = ValueOf(boxes({whole, none, none}, {none, left, none}));
  CHECK(split->shortest_run == 3 && split->contiguous_outputs && split->direct.moves.size() == 1);
  const auto joined = ValueOf(boxes({left, right, none}, {whole, left, none}));
  CHECK(joined->shortest_run == 3 && !joined->contiguous_outputs);
  // Cells of 6 elements. Messages of 4 for `left`, and `top` lies in memory row by row.
  request.boxes = ValueOf(boxes({whole, none, none}, {none, left, top}));
  const std::vector<Plan> plans = Build("direct", request);
  Expect("", plans, request);
  CHECK(plans[0].scratch_count == 4 && plans[1].scratch_count == 12 && plans[2].scratch_count == 12);
  for (const Step& step : plans[0].steps) CHECK(step.kind != StepKind::kPut || step.dst.space == Space::kScratch);
  Expect("no source has elements [12, 24) of the destination of rank 1",
         boxes({left, none, none}, {none, whole, none}).status().message());
  Expect("the source of rank 1 is [-1, 4) in dimension 1",
         boxes({whole, {{0, -1}, {1, 4}}, none}, {none, none, none}).status().message());
  CHECK(DecodeBoxes({0, 1, 2}, 1).empty());
}

TEST_CASE("pieces that part on their way have messages of their own") {
  // Node 0 has all. Node 1 wants it, node 2 too, and the others want a part that cuts no message of the first hop.
  const std::pair<int64_t, int64_t> all = {0, 9 * kChunk}, part = {kChunk / 2, 6 * kChunk},
                                    last = {6 * kChunk, 9 * kChunk};
  for (const int32_t locals : {1, 3}) {
    const Request request = AskForRows(locals, {all, {}, {}, {}, {}, {}}, {{}, all, all, part, last, part});
    const std::vector<Plan> plans = Build("hierarchical", request);
    Expect("", plans, request);
    for (const int64_t sent : SentByNode(plans, request)) CHECK(sent <= all.second);
  }
}

TEST_CASE("a rank sends its own and forwarded messages to a rank, and waits count the signals in their order") {
  for (const auto& [forwarded, own] : {std::pair{16, 3}, {16, 9}, {16, 15}, {64, 20}}) {  // chunks
    const std::pair<int64_t, int64_t> none, all = {0, (forwarded + own) * kChunk};
    const std::pair<int64_t, int64_t> first = {0, forwarded * kChunk}, second = {first.second, all.second};
    const Request request = AskForRows(1, {first, second, none, none}, {none, first, all, all});
    const std::vector<Plan> plans = Build("hierarchical", request);
    Expect("", plans, request);
    CHECK(request.boxes->chains.depth == 2 && request.boxes->chains.pairs.size() == 5);
  }
}

}  // namespace
}  // namespace jaxcomm
