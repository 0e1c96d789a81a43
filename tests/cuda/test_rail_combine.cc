// The kernel of combine between nodes, emulated over a network that guarantees no more than GIN: series of calls on one
// arena, also mixed with dispatch, with random routings, ranks that begin late, and thread blocks that run ahead. Sums
// are compared with those of the CPU, node by node or in the order of the choices, and bytes between nodes with the
// formula. Wrong routings end on all ranks before a row moves.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "fakes/rail_calls.h"
// Must follow it: see gin_cluster.h.
#include "../check.h"
#include "fakes/seed.h"

namespace jaxcomm {
namespace cuda {
namespace {

// Bytes and puts from one rank to another between nodes. Of sums by node: the list of the tokens of `from` (16 bytes, 4
// per choice, the weights, and 4 per token), and a row for each token of `to`. At the source: the rows of all choices.
gin_fake::Network::Sent Expected(const RailDrawn& drawn, int32_t from, int32_t to) {
  const RowArgs& args = drawn.args[0].rows;
  const RailShare asked = ShareOf(drawn, from, to / drawn.ranks_per_node);
  const RailShare returned = ShareOf(drawn, to, from / drawn.ranks_per_node);
  gin_fake::Network::Sent sent;
  if (returned.choices > 0) sent.puts += args.num_channels;
  if (drawn.sums_at_source || drawn.per_choice) {
    sent.bytes = returned.choices * args.row_bytes;
    return sent;
  }
  sent.bytes = returned.rows * args.row_bytes;
  if (asked.choices == 0) return sent;
  const int64_t weight = !drawn.weighted ? 0 : drawn.dtype == DType::kF64 ? 8 : 4;
  const auto aligned = [](int64_t bytes) { return (bytes + 15) / 16 * 16; };
  sent.puts += args.num_channels;
  sent.bytes +=
      args.num_channels * (16 + aligned(asked.choices * 4) + aligned(asked.choices * weight) + asked.rows * 4);
  return sent;
}

int num_calls = 0;

RailDrawn DrawCall(GinCluster& cluster, int32_t locals, std::mt19937_64& random) {
  RailDrawn drawn = DrawSizes(cluster, locals, random);
  drawn.combines = random() % 8 != 0;
  drawn.sums_at_source = random() % 3 == 0;
  constexpr DType kSums[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  const bool adds = drawn.combines && !drawn.per_choice;
  drawn.dtype = adds ? kSums[random() % 4] : DType::kU8;
  drawn.weighted = adds && (drawn.routed.choices == 1 || random() % 2 == 0);
  const int64_t counts[] = {1, 3, 16, 33, 100};
  drawn.row_count = counts[random() % (drawn.routed.tokens > 8 ? 3 : 5)];
  const auto channels = static_cast<int32_t>(1 + random() % cluster.num_channels);
  Prepare(cluster, drawn, channels, random() % 3 == 0 ? ItemBytes(drawn.dtype) : 0, random);
  ++num_calls;
  return drawn;
}

gin_fake::Network::Sent ExpectedOfEither(const RailDrawn& drawn, int32_t from, int32_t to) {
  return drawn.combines ? Expected(drawn, from, to) : DispatchSends(drawn, from, to);
}

void RunSeries(uint64_t seed, int32_t num_nodes, int32_t locals, int length) {
  RunDrawn(seed, num_nodes, locals, length, DrawCall, ExpectedOfEither);
}

TEST_CASE("combine between nodes: sums and bytes are those of the CPU and of the formula") {
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + 8; ++seed) {
    RunSeries(seed, 2, 1, 4);
    RunSeries(seed, 2, 2, 4);
    RunSeries(seed, 3, 2, 3);
    RunSeries(seed, 2, 3, 2);
    RunSeries(seed, 4, 1, 3);
  }
  CHECK(num_calls == 8 * 16);
}

TEST_CASE("many series of combine between nodes [full]") {
  for (uint64_t seed = FirstSeed() + 1000; seed < FirstSeed() + 1080; ++seed) {
    RunSeries(seed, 2, 1, 5);
    RunSeries(seed, 2, 2, 5);
    RunSeries(seed, 3, 2, 4);
    RunSeries(seed, 2, 4, 3);
    RunSeries(seed, 5, 1, 4);
    RunSeries(seed, 10, 1, 2);  // more puts than may be outstanding
  }
}

RailDrawn Small(GinCluster& cluster, bool sums_at_source, uint64_t seed) {
  std::mt19937_64 random(seed);
  RailDrawn drawn = SmallSizes();
  drawn.combines = drawn.weighted = true;
  drawn.sums_at_source = sums_at_source;
  drawn.dtype = DType::kF32;
  drawn.row_count = 80;
  Prepare(cluster, drawn, cluster.num_channels, 0, random);
  return drawn;
}

// The sums of the two kinds differ, and so do those of nodes in another order.
TEST_CASE("sums by node are rounded, sums at the source rank are not") {
  GinCluster cluster(2, 2, 1, kRailArenaBytes, 1, kRailDeadlineNs);
  RailDrawn drawn;
  drawn.ranks_per_node = 2;
  drawn.combines = true;
  drawn.dtype = DType::kF16;
  drawn.routed = Route(4, 1, 4, 4, 1, 0, 0, std::vector<std::vector<int32_t>>(4, {0, 2, 1, 3}));
  std::mt19937_64 random(1);
  Prepare(cluster, drawn, 1, 0, random);
  RailDrawn at_source = drawn;
  at_source.sums_at_source = true;
  for (InterNodeRowArgs& args : at_source.args) args.sums_at_source = true;
  // 2048 + 1 rounds to 2048. By node: (2048 + 1) + (1 + 1) = 2050; at the source: ((2048 + 1) + 1) + 1 = 2051 -> 2052.
  const uint16_t big = 0x6800, one = 0x3c00;
  for (int32_t r = 0; r < 4; ++r) {
    for (int32_t s = 0; s < 4; ++s) {
      std::memcpy(drawn.x[r].data() + 2 * s, r == 0 ? &big : &one, 2);
      std::memcpy(at_source.x[r].data() + 2 * s, r == 0 ? &big : &one, 2);
    }
  }
  Launch(cluster, {&drawn, &at_source}, 4, 3);
  for (int32_t r = 0; r < 4; ++r) {
    uint16_t by_node = 0, sums_at_source = 0;
    std::memcpy(&by_node, drawn.y[r].data(), 2);
    std::memcpy(&sums_at_source, at_source.y[r].data(), 2);
    CHECK(by_node == 0x6801 && sums_at_source == 0x6802);
  }
}

// All ranks report `step` about `peer`, nothing moves, and the next call does not run.
void CheckRefused(GinCluster& cluster, RailDrawn& drawn, int32_t step, int32_t peer, uint64_t expected, uint64_t seen) {
  RailDrawn next = Small(cluster, !drawn.sums_at_source, 7);
  const Bytes arena(cluster.arenas.base, cluster.arenas.base + cluster.n * kRailArenaBytes);
  Launch(cluster, {&drawn, &next}, 4, 3);
  for (int32_t r = 0; r < cluster.n; ++r) {
    const device::Report& report = cluster.reports[r];
    CHECK(report.state == device::Report::kComplete && report.rank == r);
    CHECK(report.step == step && report.peer == peer && report.expected == expected && report.seen == seen);
    CHECK(Untouched(drawn.y[r]) && Untouched(next.y[r]));
    for (int32_t to = 0; to < cluster.n; ++to) CHECK(cluster.network.sent(r, to).puts == 0);
  }
  CHECK(std::memcmp(arena.data(), cluster.arenas.base, arena.size()) == 0);
}

TEST_CASE("a wrong table: all ranks report it before a row moves") {
  for (const bool sums_at_source : {false, true}) {
    GinCluster unknown(2, 2, 2, kRailArenaBytes, 1);
    RailDrawn drawn = Small(unknown, sums_at_source, 1);
    SetTable(drawn, 3, 1, 0, -6);  // as jaxcomm/moe/check.py marks unknown ids
    CheckRefused(unknown, drawn, kUnknownExperts, 3, 6, 4);
    GinCluster gap(2, 2, 2, kRailArenaBytes, 1);
    drawn = Small(gap, sums_at_source, 1);
    const int32_t last = drawn.routed.table[2 * 16 + 3], size = drawn.routed.table[(2 * 4 + 1) * 4 + 3];
    SetTable(drawn, 2, 0, 3, last - 1);
    CheckRefused(gap, drawn, kUnknownRow, 2, last - 1 + size, 10);
  }
}

// Never an address. The choice counts as zero, and only the rank that has it reports it.
TEST_CASE("a slot or an expert of the routing that does not exist") {
  for (const bool sums_at_source : {false, true}) {
    for (const auto& [slot, expert] :
         {std::pair{1 << 30, 0}, std::pair{1 << 30, 3}, std::pair{0, 4}, std::pair{0, -1}}) {
      GinCluster cluster(2, 2, 2, kRailArenaBytes, 1, kRailDeadlineNs);
      RailDrawn drawn = Small(cluster, sums_at_source, 1);
      const_cast<int32_t*>(drawn.args[0].rows.index)[2] = slot;
      const_cast<int32_t*>(drawn.args[0].rows.expert)[2] = expert;
      drawn.routed.slot[0][2] = drawn.routed.expert[0][2] = -1;
      const std::vector<Bytes> expected = ExpectedOf(drawn);
      Launch(cluster, {&drawn}, 4, 3);
      for (int32_t r = 0; r < 4; ++r) {
        CHECK(expected[r] == drawn.y[r]);
        CHECK(cluster.reports[r].state == (r == 0 ? device::Report::kComplete : device::Report::kNone));
        CHECK(*drawn.args[r].rows.state == 0);
      }
      CHECK(cluster.reports[0].step == kUnknownRow && cluster.reports[0].peer == 0);
      CHECK(cluster.reports[0].expected == static_cast<uint64_t>(slot));
    }
  }
}

// The list of a node has no place for the second one.
TEST_CASE("a routing that names a slot twice") {
  for (const int32_t expert : {0, 3}) {
    GinCluster cluster(2, 2, 2, kRailArenaBytes, 1, kRailDeadlineNs);
    RailDrawn drawn = Small(cluster, false, 1);
    std::vector<int32_t> first;  // choices of this expert, and one of the other node
    for (int32_t c = 0; c < 10; ++c) {
      if (drawn.routed.expert[0][c] == expert) first.push_back(c);
    }
    int32_t other = 0;
    while (drawn.routed.expert[0][other] / 2 == expert / 2) ++other;
    const_cast<int32_t*>(drawn.args[0].rows.index)[other] = drawn.routed.slot[0][first[0]];
    const_cast<int32_t*>(drawn.args[0].rows.expert)[other] = expert;
    const std::vector<Bytes> expected = ExpectedOf(drawn);
    Launch(cluster, {&drawn}, 4, 3);
    for (int32_t r = 1; r < 4; ++r) {
      CHECK(expected[r] == drawn.y[r] && cluster.reports[r].state == device::Report::kNone);
    }
    CHECK(cluster.reports[0].state == device::Report::kComplete && cluster.reports[0].step == kUnknownRow);
    CHECK(cluster.reports[0].peer == 0);
  }
}

TEST_CASE("a rank that does not arrive: its node and its rail name it") {
  for (const bool sums_at_source : {false, true}) {
    GinCluster cluster(2, 2, 2, kRailArenaBytes, 1, 1'000'000);
    RailDrawn drawn = Small(cluster, sums_at_source, 1);
    const uint64_t begin = emulation::NowNs();
    Launch(cluster, {&drawn}, 4, 3, 3);
    CHECK(emulation::NowNs() - begin < 5'000'000);
    for (const int32_t r : {1, 2}) {
      const device::Report& report = cluster.reports[r];
      CHECK(report.state == device::Report::kComplete && report.peer == 3);
      CHECK(report.step == (sums_at_source && r == 1 ? 1 : static_cast<int32_t>(kEntryBarrier)));
    }
    CHECK(cluster.reports[0].state == device::Report::kComplete);
  }
}

TEST_CASE("a network that stops") {
  for (const bool sums_at_source : {false, true}) {
    GinCluster cluster(2, 1, 1, kRailArenaBytes, 1, 1'000'000);
    std::mt19937_64 random(1);
    RailDrawn drawn;
    drawn.ranks_per_node = 1;
    drawn.combines = true;
    drawn.sums_at_source = sums_at_source;
    drawn.dtype = DType::kF32;
    drawn.row_count = 25;
    drawn.routed = Route(2, 3, 2, 2, 1, 0, 0, {{0, 1, 1, 0, 0, 1}, {1, 0, 0, 1, 1, 0}});
    Prepare(cluster, drawn, 1, 0, random);
    cluster.network.Stall();
    Launch(cluster, {&drawn}, 3, 1);
    for (int32_t r = 0; r < 2; ++r) {
      CHECK(cluster.reports[r].state == device::Report::kComplete && cluster.reports[r].peer == 1 - r);
    }
  }
}

// The numbers of docs/internals/cuda-moe.md: T = 4096, K = 8, rows of 14336 bytes, 28 channels.
TEST_CASE("the arena of a combine") {
  CallSpec spec;
  spec.collective = Collective::kCombine;
  spec.group_size = 16;
  spec.row_count = 7168;
  spec.choices = 8;
  spec.num_experts = 256;
  spec.weighted = 1;
  const auto bytes = [&](int32_t num_nodes) {
    const StatusOr<InterNodeRowArgs> made = MakeInterNodeRowArgs(spec, DType::kBF16, 7168 * 40000, 7168 * 4096, 28);
    CHECK(made.ok() && made->rows.num_channels == 28);
    return RailArenaBytes(*made, num_nodes) / 1'000'000;
  };
  CHECK(bytes(2) == 1140 && bytes(8) == 1941);
  spec.home = 1;
  CHECK(bytes(2) == 1409 && bytes(8) == 1409);
  spec.home = 0;
  spec.choices = spec.row_count = 1;
  spec.algorithm = "hierarchical";
  const int64_t tokens = 1 << 28;
  const Status refused = MakeCallProgram(spec, DType::kF32, 100, tokens, {0, 1}, 4).status();
  CHECK(refused.message() == "more than 2^31 sums of 16 nodes");
  CHECK(MakeCallProgram(spec, DType::kF32, 100, tokens / 4, {0, 1}, 4).ok());
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
