// Predicted times equal closed formulas, in bytes and seconds.
#include <algorithm>
#include <array>
#include <cmath>

#include "../../ffi/plan/cost.h"
#include "formulas.h"
#include "written.h"

namespace jaxcomm {
namespace {

constexpr LinkModel kNode = {3e-6, 2e9, 5e-6};
constexpr LinkModel kNetwork = {7e-6, 5e8, 2e-5};

Cost CostOf(const char* algorithm, const Request& request, int64_t item_bytes, const Machine& machine) {
  const Algorithm* found = FindAlgorithm(request.collective, algorithm);
  CHECK(found != nullptr && found->supports(request));
  return CostOf(*found, request, item_bytes, machine);
}

void CheckTime(const char* what, double got_s, double expected_s) {
  const bool close = std::abs(got_s - expected_s) <= 1e-9 * expected_s;
  if (!close) std::fprintf(stderr, "%s: %.9g s, expected %.9g s\n", what, got_s, expected_s);
  CHECK(close);
}

TEST_CASE("times on one level follow LogGP") {
  const Machine machine = MakeMachine(kFree, kNode, kNetwork);
  for (const Formula& formula : kFormulas) {
    for (int32_t n : {2, 4, 8, 16}) {
      for (int64_t block_count : {16, 16000}) {
        const Algorithm& algorithm = *FindAlgorithm(formula.collective, formula.algorithm);
        const Chain chain = formula.chain(n, std::log2(n));
        const double bytes = 4 * static_cast<double>(block_count);
        const Request request = Ask(formula.collective, 1, n, block_count);
        CheckTime(formula.algorithm, CostOf(algorithm, request, 4, machine).time_s, chain.time_s(bytes, kNode));
        if (formula.collective != Collective::kBroadcast && std::string(formula.algorithm) != "tree") {  // all the same
          CheckTime(formula.algorithm, CostOf(algorithm.build(request, n / 2), request.geometry, 4, machine).time_s,
                    chain.time_s(bytes, kNode));
        }
        // The last message of a rank takes one more latency.
        CheckTime(formula.algorithm,
                  CostOf(algorithm, AskApart(formula.collective, n, 1, block_count), 4, machine).time_s,
                  chain.time_s(bytes, kNetwork) + kNetwork.latency_s);
      }
    }
  }
}

TEST_CASE("short moves run at once and take one overhead") {
  const LinkModel self = {2e-6, 4e9, 0};
  Machine machine = MakeMachine(self, kNode, kNetwork);
  machine.concurrent_bytes = 4000;
  const double self_s = 4000 / 4e9, peers_s = 7 * 4000 / 2e9;
  const Request all_to_all = Ask(Collective::kAllToAll, 1, 8, 1000);
  CheckTime("all_to_all", CostOf("direct", all_to_all, 4, machine).time_s, 3e-6 + peers_s);
  CheckTime("longer", CostOf("direct", Ask(Collective::kAllToAll, 1, 8, 1001), 4, machine).time_s,
            2e-6 + 7 * 3e-6 + 1.001 * (self_s + peers_s));
  // Bytes of an element may be 0: less than a byte for each rank.
  CheckTime("empty", CostOf("direct", all_to_all, 0, machine).time_s, 3e-6);
  // Signals between the moves.
  machine.links[0] = kFree;
  CheckTime("pairwise", CostOf("pairwise", all_to_all, 4, machine).time_s,
            7 * (3e-6 + 4000 / 2e9) + 6 * (kNode.overhead_s + kNode.latency_s));
  const Request barrier = Ask(Collective::kBarrier, 1, 8, 0);
  CheckTime("rounds", CostOf("dissemination", barrier, 4, machine).time_s, 3 * (kNode.overhead_s + kNode.latency_s));
  CheckTime("all", CostOf("direct", barrier, 4, machine).time_s, kNode.overhead_s + kNode.latency_s);
  // Rank 1 forwards two chunks. On one node both waits come first, and the second put takes no overhead.
  const auto chain_s = [&](int32_t nodes, int64_t chunk, int64_t item_bytes = 4) {
    return CostOf("ring", Ask(Collective::kBroadcast, nodes, 3 / nodes, 2 * chunk, chunk), item_bytes, machine).time_s;
  };
  CheckTime("chain", chain_s(1, 1000), 2 * (3e-6 + 4000 / 2e9 + 3e-6) + 5e-6 + 3e-6 + 2 * 4000 / 2e9);
  CheckTime("long", chain_s(1, 1001), 2 * (3e-6 + 4004 / 2e9 + 3e-6) + 5e-6 + 3e-6 + 4004 / 2e9);
  CheckTime("wide", chain_s(1, 501, 8), 2 * (3e-6 + 4008 / 2e9 + 3e-6) + 5e-6 + 3e-6 + 4008 / 2e9);
  CheckTime("nodes", chain_s(3, 500), 2 * (7e-6 + 2000 / 5e8 + 7e-6) + 2e-5 + 7e-6 + 2000 / 5e8);
  CheckTime("signals", CostOf("direct", AskApart(Collective::kBarrier, 8, 1, 0), 4, machine).time_s,
            7 * kNetwork.overhead_s + 2 * kNetwork.latency_s);
  // A sum of a local and seven other operands, seven signals at once, and seven moves after as many waits.
  Request all_reduce = Ask(Collective::kAllReduce, 1, 8, 8000);
  all_reduce.geometry.pull = true;
  CheckTime("all_reduce", CostOf("direct", all_reduce, 4, machine).time_s,
            3e-6 + 7 * 4000 / 2e9 + kNode.overhead_s + kNode.latency_s + 3e-6 + 7 * 4000 / 2e9);
  // Puts to other nodes wait for the network one by one.
  CheckTime("apart", CostOf("direct", AskApart(Collective::kAllToAll, 8, 1, 1000), 4, machine).time_s,
            7 * (kNetwork.overhead_s + 4000 / kNetwork.bytes_per_s) + kNetwork.latency_s);
  // Links work at the same time: for the own operand and that of a peer.
  machine.links[0] = {2e-6, 1e9, 0};
  CheckTime("reduce", CostOf("direct", Ask(Collective::kReduceScatter, 1, 2, 1000), 4, machine).time_s,
            2e-6 + 3e-6 + std::max(4000 / 1e9, 4000 / 2e9));
  CheckTime("longer", CostOf("direct", Ask(Collective::kReduceScatter, 1, 2, 2000), 4, machine).time_s,
            2e-6 + 3e-6 + 8000 / 1e9 + 8000 / 2e9);
}

// A wait for the signal of an item follows the steps that issue the next items, so only each second one takes its time,
// or each third one if the stages are two items apart.
TEST_CASE("hierarchical plans hide latencies") {
  const struct {
    Collective collective;
    int64_t parts;                         // of a block; each is cut into chunks
    std::array<int, 3> network, put, get;  // latencies of other nodes and, by puts or gets, of the node: 1, 2, 5 chunks
  } kRows[] = {{Collective::kAllToAll, 1, {0, 0, 0}, {1, 2, 5}, {1, 2, 5}},
               {Collective::kAllGather, 1, {1, 2, 5}, {0, 0, 0}, {1, 2, 5}},
               {Collective::kReduceScatter, 1, {1, 1, 3}, {0, 0, 0}, {0, 0, 0}},
               {Collective::kAllReduce, 6, {2, 2, 3}, {0, 0, 0}, {1, 1, 3}},
               {Collective::kBroadcast, 2, {1, 1, 1}, {1, 1, 1}, {1, 1, 3}}};
  constexpr LinkModel kLate = {0, 1e30, 1};
  for (const auto& row : kRows) {
    for (size_t i = 0; i < 3; ++i) {
      for (const bool pull : {false, true}) {
        Request request = AskApart(row.collective, 3, 2, row.parts * std::array{1, 2, 5}[i] * 8, 8);
        request.geometry.pull = pull;
        const auto time_s = [&](const LinkModel& node, const LinkModel& network) {
          return CostOf("hierarchical", request, 4, MakeMachine(kFree, node, network)).time_s;
        };
        CheckTime(Name(row.collective), time_s(kFree, kLate), row.network[i] + 1);  // and the last message
        CheckTime(Name(row.collective), 1 + time_s(kLate, kFree), 1 + (pull ? row.get : row.put)[i]);
      }
    }
  }
  for (const int32_t nodes : {2, 4, 8, 16}) {  // the largest subtree of nodes comes first
    CheckTime("tree",
              CostOf("hierarchical", AskApart(Collective::kBroadcast, nodes, 2, 1000), 4,
                     MakeMachine(kFree, kFree, {0, 2000, 0}))
                  .time_s,
              std::log2(nodes));
  }
}

TEST_CASE("copies into and out of an arena take their time") {
  Machine machine = MakeMachine({2e-6, 4e9, 0}, kNode, kNetwork);
  const auto copies_s = [&](const char* algorithm, Request request) {
    request.geometry.pull = true;
    machine.arena = false;
    const Cost without = CostOf(algorithm, request, 4, machine);
    machine.arena = true;
    const Cost with = CostOf(algorithm, request, 4, machine);
    const auto self = static_cast<size_t>(Link::kSelf);
    CheckTime("bytes", static_cast<double>(with.traffic[self].bytes - without.traffic[self].bytes) / 4e9 + 1,
              with.time_s - without.time_s + 1);
    return with.time_s - without.time_s;
  };
  const double block_s = 4000 / 4e9;
  const auto ask = [](Collective collective) { return Ask(collective, 1, 8, 1000); };
  CheckTime("operand", copies_s("direct", ask(Collective::kAllToAll)), 8 * block_s);
  CheckTime("operand", copies_s("direct", ask(Collective::kAllGather)), block_s);
  CheckTime("both", copies_s("direct", ask(Collective::kAllReduce)), 2 * block_s);
  CheckTime("result", copies_s("ring", ask(Collective::kAllGather)), 8 * block_s);
  for (const auto& [receiver, source] : {std::pair{1, 0}, {3, 2}, {6, 5}}) {
    Request pair = ask(Collective::kPermute);
    pair.source_of.assign(8, -1);
    pair.source_of[7] = 7;  // reads its own operand
    CHECK(copies_s("direct", pair) == 0);
    pair.source_of[receiver] = source;
    CheckTime("operand of a permute", copies_s("direct", pair), block_s);
  }
  CHECK(copies_s("recursive_halving", ask(Collective::kReduceScatter)) == 0);  // peers use scratch
  CHECK(copies_s("direct", AskApart(Collective::kAllGather, 2, 4, 1000)) == 0);
}

// Each iteration takes the time of the busiest link. The first two chunks are copied before any transfer. No signal
// separates the last two iterations, so the waits of both come first and one latency shows.
TEST_CASE("staged copies overlap with the transfer") {
  Machine machine = MakeMachine({0, 4e9, 0}, {0, 2e9, 1e-6}, kNetwork);
  machine.concurrent_bytes = 1 << 20;
  machine.arena = true;
  Request request = Ask(Collective::kAllGather, 1, 4, 100'000);
  request.geometry.pull = true;
  const double block_s = 4e5 / 4e9, peers_s = 3 * 4e5 / 2e9;
  request.staged_count = 10'000;
  CheckTime("staged", CostOf("direct", request, 4, machine).time_s, 0.2 * block_s + peers_s + 1e-6);
  // The rank's own part is copied as well.
  CHECK(CostOf("direct", request, 4, machine).traffic[static_cast<size_t>(Link::kSelf)].bytes == 2 * 400'000);
}

TEST_CASE("the network runs beside the processor, but not in one address space") {
  // 4 peers of the node and 8 of other nodes, after a copy of the own block.
  const Machine machine = MakeMachine(kFree, kNode, kNetwork);
  const double node_s = 3e-6 + 4000 / 2e9, network_s = 7e-6 + 4000 / 5e8;
  CheckTime("one address space", CostOf("direct", Ask(Collective::kAllToAll, 3, 4, 1000), 4, machine).time_s,
            3 * node_s + 8 * network_s);
  // The first rank of a node puts to its 3 peers first; the last one starts with the other nodes.
  const Algorithm& direct = *FindAlgorithm(Collective::kAllToAll, "direct");
  const Request request = AskApart(Collective::kAllToAll, 3, 4, 1000);
  CheckTime("rank 0", CostOf(direct.build(request, 0), request.geometry, 4, machine).time_s,
            3 * node_s + 8 * network_s + 2e-5);
  CheckTime("rank 3", CostOf(direct.build(request, 3), request.geometry, 4, machine).time_s, 8 * network_s + 2e-5);
  CheckTime("all", CostOf(direct, request, 4, machine).time_s, 3 * node_s + 8 * network_s + 2e-5);
}

TEST_CASE("ranks of a node share its link to other nodes") {
  Machine machine = MakeMachine(kFree, kFree, {7e-6, 5e8, 0});
  machine.shared_network = true;
  const Algorithm& direct = *FindAlgorithm(Collective::kAllToAll, "direct");
  const Request request = AskApart(Collective::kAllToAll, 3, 4, 1000);
  CheckTime("all", CostOf(direct, request, 4, machine).time_s, 4 * 8 * (7e-6 + 4000 / 5e8));
  // The cost of one rank assumes that it has a fourth of the link.
  CheckTime("one", CostOf(direct.build(request, 5), request.geometry, 4, machine).time_s, 8 * (7e-6 + 4 * 4000 / 5e8));
  CheckTime("too large to simulate", CostOf(direct, AskApart(Collective::kAllToAll, 375, 8, 1000), 4, machine).time_s,
            8 * 374 * (7e-6 + 8 * 4000 / 5e8));
  // In one address space there is no such link.
  const Request together = Ask(Collective::kAllToAll, 3, 4, 1000);
  CheckTime("one address space", CostOf(direct, together, 4, machine).time_s, 8 * (7e-6 + 4000 / 5e8));
  CheckTime("one there", CostOf(direct.build(together, 5), together.geometry, 4, machine).time_s,
            8 * (7e-6 + 4000 / 5e8));
  // They use it in the order of time: rank 0 puts to rank 1 first, which takes 1 ms; rank 1 begins with the other node,
  // two messages of 10 ms.
  machine.links = {kFree, {1e-3, 1e30, 0}, {1e-2, 1e30, 0}};
  CheckTime("order", CostOf("direct", AskApart(Collective::kAllToAll, 2, 2, 1000), 4, machine).time_s, 4e-2);
}

TEST_CASE("ranks that share a processor take turns, but wait at the same time") {
  const LinkModel node = {3e-6, 2e9, 1};  // a second of latency
  for (double sharing : {1.0, 2.5, 8.0}) {
    Machine machine = MakeMachine(kFree, node, kNetwork);
    machine.ranks_per_processor = sharing;
    machine.launch_s = 0.125;
    machine.sync_overhead_s = 0.25;
    const double message_s = 3e-6 + 4000 / 2e9;
    const Request exchange = Ask(Collective::kAllToAll, 1, 8, 1000);
    CheckTime("direct", CostOf("direct", exchange, 4, machine).time_s, 0.375 + sharing * 7 * message_s);
    CheckTime("one", CostOf(Build("direct", exchange)[5], exchange.geometry, 4, machine).time_s,
              0.375 + sharing * 7 * message_s);
    // Too large to simulate.
    CheckTime("large", CostOf("direct", Ask(Collective::kAllToAll, 1, 3000, 1000), 4, machine).time_s,
              0.375 + sharing * 2999 * message_s);
    // 7 of 8 ranks wait while one works. The time is that of this rank until the work of all ranks takes longer.
    CheckTime("broadcast", CostOf("direct", Ask(Collective::kBroadcast, 1, 8, 1000), 4, machine).time_s,
              0.375 + std::max(1.0, sharing / 8) * 7 * message_s);
    CheckTime("dissemination", CostOf("dissemination", Ask(Collective::kBarrier, 1, 8, 0), 4, machine).time_s,
              0.375 + 3 * (3e-6 + 1));
  }
}

TEST_CASE("an LL exchange has a formula of its own") {
  Machine machine = MakeMachine(kNode, kNode, kNetwork);
  machine.launch_s = 1e-3;
  machine.sync_overhead_s = 1e-1;  // only around steps
  machine.ll = LinkModel{1e-6, 1e9, 3e-6};
  machine.ll_two_shot = LinkModel{2e-6, 2e9, 5e-6};
  const Request request = Ask(Collective::kAllReduce, 1, 8, 1001);
  CheckTime("ll", CostOf("ll", request, 4, machine).time_s, 1e-3 + 3e-6 + 7 * (1e-6 + 4004 / 1e9));
  CheckTime("ll_two_shot", CostOf("ll_two_shot", request, 4, machine).time_s,
            1e-3 + 2 * 5e-6 + 14 * (2e-6 + 4 * 126 / 2e9));  // ceil(1001 / 8) = 126
  CHECK(CostOf("ll", request, 4, machine).traffic[1].bytes == 7 * 4004);
  const Request alone = Ask(Collective::kAllReduce, 1, 1, 1001);
  CheckTime("alone", CostOf("ll", alone, 4, machine).time_s, 1e-3);
  machine.ll.reset();
  CHECK(CostOf("ll", request, 4, machine).time_s == CostOf("one_shot", request, 4, machine).time_s);
  CHECK(CostOf("ll_two_shot", request, 4, machine).time_s < 1e-1);
}

TEST_CASE("costs are of the rank that works most") {
  const Machine machine = MakeMachine(kNode, kNode, kNetwork);
  for (Request request : {AskApart(Collective::kBroadcast, 8, 1, 1000), Ask(Collective::kBroadcast, 8, 1, 1000)}) {
    request.root = 5;
    const Cost cost = CostOf("direct", request, 4, machine);
    CHECK(cost.rank == 5 && cost.steps == 8 && cost.traffic[2].bytes == 7 * 4000 && cost.traffic[0].bytes == 4000);
  }
  CHECK(CostOf("direct", Ask(Collective::kAllToAll, 1, 8, 1000), 4, machine).rank == 0);  // the first of equal ones
}

TEST_CASE("groups too large to simulate take as long as their samples and their longest chain") {
  const Machine machine = MakeMachine(kFree, kNode, kNetwork);
  // 3000 ranks of 2999 messages each are more than half a million steps; all ranks are alike, so it is exact.
  CheckTime("direct", CostOf("direct", AskApart(Collective::kAllToAll, 3000, 1, 1000), 4, machine).time_s,
            2999 * (7e-6 + 4000 / 5e8) + 2e-5);
  CheckTime("ring", CostOf("ring", AskApart(Collective::kAllGather, 3000, 1, 1000), 4, machine).time_s,
            2999 * (7e-6 + 4000 / 5e8) + 2998 * (7e-6 + 2e-5) + 2e-5);
  // A chain of 100,000 in 100 chunks: as long as a chain for one element of 4 bytes.
  CheckTime("chain", CostOf("ring", AskApart(Collective::kBroadcast, 100000, 1, 1000, 10), 4, machine).time_s,
            99999 * (7e-6 + 4 / 5e8) + 99998 * (7e-6 + 2e-5) + 2e-5);
  // The last rank of a sample: all of its messages but the first wrap.
  const Cost last = CostOf("bruck", AskApart(Collective::kAllGather, 40000, 1, 1), 4, machine);
  CHECK(last.rank == 39999 && last.traffic[2].messages == 16 + 15);
  // The root of a broadcast, wherever it is.
  Request request = AskApart(Collective::kBroadcast, 40000, 1, 1000, 10);
  request.root = 777;
  CHECK(CostOf("tree", request, 4, machine).rank == 777);
  // A permutation of more than 8192 ranks: the rank that sends most to other nodes.
  request = AskApart(Collective::kPermute, 5000, 2, 1000);
  for (int32_t rank = 0; rank < 10000; ++rank) request.source_of[static_cast<size_t>(rank)] = rank;
  for (int32_t rank = 100; rank < 140; ++rank) request.source_of[static_cast<size_t>(rank)] = 9000;
  for (int32_t rank = 200; rank < 220; ++rank) request.source_of[static_cast<size_t>(rank)] = 7000;
  const Cost cost = CostOf("direct", request, 4, machine);
  CHECK(cost.rank == 9000);
  CheckTime("permute", cost.time_s, 40 * (7e-6 + 4000 / 5e8) + 2e-5);
  // Messages within a node do not count.
  request = AskApart(Collective::kPermute, 10, 1000, 1000);
  for (int32_t rank = 0; rank < 10000; ++rank) request.source_of[static_cast<size_t>(rank)] = rank < 900 ? 42 : rank;
  for (int32_t rank = 3000; rank < 3020; ++rank) request.source_of[static_cast<size_t>(rank)] = 7000;
  CHECK(CostOf("direct", request, 4, machine).rank == 7000);
}

}  // namespace
}  // namespace jaxcomm
