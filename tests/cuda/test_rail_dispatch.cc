// The kernel of dispatch between nodes, emulated over a network that guarantees no more than GIN: series of calls on
// one arena, with random routings, ranks that begin late, and thread blocks that run ahead. Slots are compared with the
// payload that the routing names, and bytes between nodes with the formula. Wrong routings end on all ranks before a
// row moves.
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

int num_calls = 0;

RailDrawn DrawCall(GinCluster& cluster, int32_t locals, std::mt19937_64& random) {
  RailDrawn drawn = DrawSizes(cluster, locals, random);
  const int64_t row_bytes[] = {1, 7, 48, 130, 400};
  drawn.row_count = row_bytes[random() % (drawn.routed.tokens > 8 ? 3 : 5)];
  const auto channels = static_cast<int32_t>(1 + random() % cluster.num_channels);
  Prepare(cluster, drawn, channels, random() % 3 == 0 ? 4 : 0, random);
  ++num_calls;
  return drawn;
}

void RunSeries(uint64_t seed, int32_t num_nodes, int32_t locals, int length) {
  RunDrawn(seed, num_nodes, locals, length, DrawCall, DispatchSends);
}

TEST_CASE("dispatch between nodes: rows and bytes are those of the definition") {
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + 6; ++seed) {
    RunSeries(seed, 2, 1, 4);
    RunSeries(seed, 2, 2, 3);
    RunSeries(seed, 3, 2, 2);
    RunSeries(seed, 2, 3, 2);
    RunSeries(seed, 4, 1, 3);
  }
  CHECK(num_calls == 6 * 14);
}

TEST_CASE("many series between nodes [full]") {
  for (uint64_t seed = FirstSeed() + 1000; seed < FirstSeed() + 1060; ++seed) {
    RunSeries(seed, 2, 1, 5);
    RunSeries(seed, 2, 2, 5);
    RunSeries(seed, 3, 2, 4);
    RunSeries(seed, 2, 4, 3);
    RunSeries(seed, 5, 1, 4);
    RunSeries(seed, 10, 1, 2);  // more messages than puts may be outstanding
  }
}

RailDrawn Small(GinCluster& cluster, uint64_t seed) {
  std::mt19937_64 random(seed);
  RailDrawn drawn = SmallSizes();
  drawn.row_count = 320;
  Prepare(cluster, drawn, cluster.num_channels, 0, random);
  return drawn;
}

// All ranks report `step` about `peer`, nothing moves, and the next call does not run.
void CheckRefused(GinCluster& cluster, RailDrawn& drawn, int32_t step, int32_t peer, uint64_t expected, uint64_t seen) {
  RailDrawn next = Small(cluster, 7);
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

TEST_CASE("a rank of another node with more rows than slots: all ranks report it before a row moves") {
  GinCluster cluster(2, 2, 3, kRailArenaBytes, 1);
  RailDrawn drawn = Small(cluster, 1);
  const int32_t first = drawn.routed.table[2 * 4 + 3], slots = drawn.args[0].rows.num_slots;
  SetTable(drawn, 0, 2, 3, first + slots);
  SetTable(drawn, 0, 1, 3, drawn.routed.table[4 + 3]);
  for (int32_t r = 1; r < 4; ++r) SetTable(drawn, r, 2, 3, drawn.routed.table[(r * 4 + 2) * 4 + 3] + slots);
  // Each slice of the expert is reported by the thread that finds it; the peer is the same.
  RailDrawn next = Small(cluster, 7);
  const Bytes arena(cluster.arenas.base, cluster.arenas.base + cluster.n * kRailArenaBytes);
  Launch(cluster, {&drawn, &next}, 4, 3);
  CHECK(std::memcmp(arena.data(), cluster.arenas.base, arena.size()) == 0);
  for (int32_t r = 0; r < 4; ++r) {
    CHECK(cluster.reports[r].step == kTooManyRows && cluster.reports[r].peer == 3 && cluster.reports[r].rank == r);
    CHECK(Untouched(drawn.y[r]) && Untouched(next.y[r]));
  }
  CHECK(FailureText(cluster.reports[0], "moe.dispatch at f.py:3", 30).find("rank 3 gets more rows") !=
        std::string::npos);
}

// As jaxcomm/moe/check.py marks them.
TEST_CASE("ids of experts that do not exist, at a rank of another node") {
  GinCluster cluster(2, 2, 2, kRailArenaBytes, 1);
  RailDrawn drawn = Small(cluster, 1);
  SetTable(drawn, 3, 1, 0, -6);
  CheckRefused(cluster, drawn, kUnknownExperts, 3, 6, 4);
}

// The positions of a message begin with the choice that comes first in the table.
TEST_CASE("packed choices with a gap") {
  GinCluster cluster(2, 2, 2, kRailArenaBytes, 1);
  RailDrawn drawn = Small(cluster, 1);
  const int32_t last = drawn.routed.table[2 * 16 + 3];
  SetTable(drawn, 2, 0, 3, last - 1);
  const int32_t size = drawn.routed.table[(2 * 4 + 1) * 4 + 3];
  CheckRefused(cluster, drawn, kUnknownRow, 2, last - 1 + size, 10);
}

// Never an address. The row counts as zero, and only the rank that has it reports it.
TEST_CASE("a list that names a row that does not exist") {
  for (const int32_t row : {-1, 5, 1 << 30}) {
    for (const int32_t expert : {0, 3}) {  // of the own node and of the other one
      GinCluster cluster(2, 2, 2, kRailArenaBytes, 1, kRailDeadlineNs);
      RailDrawn drawn = Small(cluster, 1);
      const int32_t packed = drawn.routed.table[expert], slot = drawn.routed.table[2 * 4 + expert];
      const_cast<int32_t*>(drawn.args[0].rows.index)[packed] = row;
      std::vector<Bytes> expected = ExpectedOf(drawn);
      std::fill_n(expected[expert].begin() + int64_t{slot} * 320, 320, 0);
      Launch(cluster, {&drawn}, 4, 3);
      for (int32_t r = 0; r < 4; ++r) {
        CHECK(expected[r] == drawn.y[r]);
        const device::Report& report = cluster.reports[r];
        CHECK(report.state == (r == 0 ? device::Report::kComplete : device::Report::kNone));
        CHECK(*drawn.args[r].rows.state == 0);
      }
      CHECK(cluster.reports[0].step == kUnknownRow && cluster.reports[0].peer == 0);
      CHECK(cluster.reports[0].expected == static_cast<uint64_t>(int64_t{row}) && cluster.reports[0].seen == 5);
    }
  }
}

TEST_CASE("a rank that does not arrive: its node and its rail name it") {
  GinCluster cluster(2, 2, 2, kRailArenaBytes, 1, 1'000'000);
  RailDrawn drawn = Small(cluster, 1);
  const uint64_t begin = emulation::NowNs();
  Launch(cluster, {&drawn}, 4, 3, 3);
  CHECK(emulation::NowNs() - begin < 5'000'000);
  for (const int32_t r : {1, 2}) {
    const device::Report& report = cluster.reports[r];
    CHECK(report.state == device::Report::kComplete && report.step == kEntryBarrier && report.peer == 3);
  }
  CHECK(cluster.reports[0].state == device::Report::kComplete);
}

TEST_CASE("a network that stops") {
  GinCluster cluster(2, 1, 1, kRailArenaBytes, 1, 1'000'000);
  std::mt19937_64 random(1);
  RailDrawn drawn;
  drawn.ranks_per_node = 1;
  drawn.row_count = 100;
  drawn.routed = Route(2, 3, 2, 2, 1, 0, 0, {{0, 1, 1, 0, 0, 1}, {1, 0, 0, 1, 1, 0}});
  Prepare(cluster, drawn, 1, 0, random);
  cluster.network.Stall();
  Launch(cluster, {&drawn}, 3, 1);
  for (int32_t r = 0; r < 2; ++r) {
    CHECK(cluster.reports[r].state == device::Report::kComplete && cluster.reports[r].peer == 1 - r);
  }
}

TEST_CASE("a call whose marks do not fit into shared memory") {
  CallSpec spec;
  spec.collective = Collective::kDispatch;
  spec.group_size = 2;
  spec.row_count = 1;
  spec.choices = 1;
  spec.num_experts = 2;
  spec.algorithm = "hierarchical";
  const auto message = [&](int64_t rows) {
    return MakeCallProgram(spec, DType::kU8, rows, 100, {0, 1}, 4).status().message();
  };
  CHECK(message(100'000).empty());
  CHECK(message(300'000).find("300000 choices of a rank, 1 per token, and 2 experts exceed the shared memory") == 0);
  CHECK(message(131'072).empty());  // the largest number of rows of the documentation
  // They would fit between nodes, but not into the kernel inside a node.
  spec.choices = 8;
  spec.num_experts = 8192;
  CHECK(message(64).empty());
  spec.num_experts = 9008;
  CHECK(::jaxcomm::RailSharedBytes(512, 9008, 8, kRailThreads) <= kMaxSharedBytes);
  CHECK(message(64).find("512 choices of a rank, 8 per token, and 9008 experts exceed the shared memory") == 0);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
