// The kernels of dispatch and combine, emulated, inside a node and between nodes, over a network that guarantees no
// more than GIN: series of calls on one arena, with random routings, ranks that begin late, and thread blocks that run
// ahead. Slots are compared with the payload that the routing names, sums with those of the CPU, and bytes between
// nodes with the formula. Wrong routings end on all ranks before a row moves.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fakes/row_calls.h"
// Must follow it: see gin_cluster.h.
#include "../check.h"
#include "fakes/seed.h"

namespace jaxcomm {
namespace cuda {
namespace {

using Sent = gin_fake::Network::Sent;

// The rows that a rank has to move for tokens of its own, and the choices among them, in a node.
struct Share {
  int64_t rows = 0, choices = 0;
};
Share ShareOf(const Drawn& drawn, int32_t source_rank, int32_t node) {
  const Routed& routed = drawn.routed;
  Share share;
  int64_t last = -1;
  for (size_t c = 0; c < routed.expert[source_rank].size(); ++c) {
    const int32_t e = routed.expert[source_rank][c];
    if (e < 0 || routed.RankOf(e) / drawn.ranks_per_node != node) continue;
    ++share.choices;
    const auto row = static_cast<int64_t>(drawn.per_choice ? c : c / routed.choices);
    if (row != last) ++share.rows;
    last = row;
  }
  return share;
}

// Bytes and puts of a call from one rank to another between nodes. dispatch: each row that the node needs once, and for
// each channel 4 bytes per choice, rounded up to a multiple of 256. combine with sums by node: the list of the tokens
// of `from` (16 bytes, 4 per choice, the weights, and 4 per token), and a row for each token of `to`. At the source:
// the rows of all choices.
Sent SentOf(const Drawn& drawn, int32_t from, int32_t to) {
  const RowArgs& args = drawn.args[0].rows;
  const Share asked = ShareOf(drawn, from, to / drawn.ranks_per_node);
  const Share returned = ShareOf(drawn, to, from / drawn.ranks_per_node);
  const auto aligned = [](int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; };
  Sent sent;
  if (!drawn.combines) {
    sent.bytes = asked.rows * args.row_bytes + args.num_channels * aligned(asked.choices * 4, 256);
    sent.puts = asked.choices > 0 ? args.num_channels : 0;
    return sent;
  }
  if (returned.choices > 0) sent.puts += args.num_channels;
  if (drawn.sums_at_source || drawn.per_choice) {
    sent.bytes = returned.choices * args.row_bytes;
    return sent;
  }
  sent.bytes = returned.rows * args.row_bytes;
  if (asked.choices == 0) return sent;
  const int64_t weight = !drawn.weighted ? 0 : drawn.dtype == DType::kF64 ? 8 : 4;
  sent.puts += args.num_channels;
  sent.bytes +=
      args.num_channels * (16 + aligned(asked.choices * 4, 16) + aligned(asked.choices * weight, 16) + asked.rows * 4);
  return sent;
}

// Slots of every rank before the first expert.
void AddLead(Routed& routed, int32_t lead) {
  for (size_t i = 0; i < routed.table.size(); ++i) {
    if (i / routed.experts % 4 == 2) routed.table[i] += lead;
  }
  for (std::vector<int32_t>& own : routed.slot) {
    for (int32_t& slot : own) slot += slot < 0 ? 0 : lead;
  }
  routed.capacity += lead;
}

int num_calls = 0;

Drawn DrawCall(GinCluster& cluster, int32_t ranks_per_node, std::mt19937_64& random) {
  Drawn drawn;
  drawn.ranks_per_node = ranks_per_node;
  const int32_t n = cluster.n, experts = n * (1 + static_cast<int32_t>(random() % 3));
  const int32_t token_counts[] = {0, 1, 3, 8, drawn.rails() ? 70 : 17}, choice_counts[] = {1, 2, 3, 9};
  const int32_t tokens = token_counts[random() % 5], choices = choice_counts[random() % 4];
  const int32_t align = random() % 2 == 0 ? 1 : 4, slots = random() % 4 == 0 ? n * tokens * choices + 1 : 0;
  drawn.routed = Route(n, tokens, choices, experts, align, slots, static_cast<int32_t>(random() % 7),
                       DrawIds(n, tokens, choices, experts, random));
  AddLead(drawn.routed, random() % 4 == 0 ? 2 : 0);
  drawn.combines = random() % 2 == 0;
  drawn.per_choice = random() % 3 == 0;
  drawn.sums_at_source = drawn.rails() && random() % 3 == 0;
  constexpr DType kSums[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  const bool adds = drawn.combines && !drawn.per_choice;
  drawn.dtype = adds ? kSums[random() % 4] : random() % 2 == 0 ? DType::kU8 : DType::kF32;
  drawn.weighted = adds && (choices == 1 || random() % 2 == 0);
  const int64_t counts[] = {1, 3, 7, 16, 33, 64, 100};
  drawn.row_count = counts[random() % (tokens > 17 ? 5 : 7)];
  Prepare(cluster, drawn, 1 + static_cast<int32_t>(random() % cluster.num_channels),
          random() % 3 == 0 ? ItemBytes(drawn.dtype) : 0, random);
  ++num_calls;
  return drawn;
}

// Runs a series of calls, and compares their results and what went between nodes. `num_nodes`: 0 for the kernel inside
// a node.
void RunSeries(uint64_t seed, int32_t num_nodes, int32_t locals, int length) {
  std::mt19937_64 random(seed);
  const auto made = MakeCluster(num_nodes, locals, 1 + static_cast<int32_t>(random() % 3), seed);
  GinCluster& cluster = *made;
  std::vector<Drawn> series;
  for (int i = 0; i < length; ++i) series.push_back(DrawCall(cluster, num_nodes > 0 ? locals : 0, random));
  std::vector<Drawn*> calls;
  for (Drawn& drawn : series) calls.push_back(&drawn);
  constexpr unsigned kThreads[] = {1, 3, 4, 8};
  Launch(cluster, calls, kThreads[random() % 4], seed);
  for (size_t i = 0; i < series.size(); ++i) CheckDrawn(cluster, series[i], seed, i);
  CHECK(cluster.network.empty());
  for (int32_t from = 0; from < cluster.n; ++from) {
    for (int32_t to = 0; to < cluster.n; ++to) {
      Sent sum;
      for (const Drawn& drawn : series) {
        if (!drawn.Crosses(from, to)) continue;
        const Sent of_call = SentOf(drawn, from, to);
        sum.puts += of_call.puts, sum.bytes += of_call.bytes;
      }
      const Sent sent = cluster.network.sent(from, to);
      CHECK(sent.puts == sum.puts && sent.bytes == sum.bytes);
    }
  }
}

TEST_CASE("dispatch and combine in any order on one arena") {
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + 20; ++seed) {
    for (const int32_t n : {1, 2, 3, 5, 8}) RunSeries(seed, 0, n, 4);
  }
  CHECK(num_calls == 400);
}

constexpr std::pair<int32_t, int32_t> kNodes[] = {{2, 1}, {2, 2}, {3, 2}, {2, 3}, {4, 1}};  // and ranks of each

TEST_CASE("dispatch and combine between nodes") {
  num_calls = 0;
  for (uint64_t seed = FirstSeed(); seed < FirstSeed() + 12; ++seed) {
    for (const auto& [num_nodes, locals] : kNodes) RunSeries(seed, num_nodes, locals, 3);
  }
  CHECK(num_calls == 12 * 15);
}

TEST_CASE("many series [full]") {
  for (uint64_t seed = FirstSeed() + 1000; seed < FirstSeed() + 1300; ++seed) {
    for (const int32_t n : {1, 2, 3, 4, 8}) RunSeries(seed, 0, n, 6);
  }
  for (uint64_t seed = FirstSeed() + 1000; seed < FirstSeed() + 1140; ++seed) {
    for (const auto& [num_nodes, locals] : kNodes) RunSeries(seed, num_nodes, locals, 5);
    RunSeries(seed, 10, 1, 2);  // more puts than may be outstanding
  }
}

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// The kernels, one row each.
struct Kernel {
  bool combines, rails, sums_at_source;
};
constexpr Kernel kKernels[] = {
    {false, false, false}, {true, false, false}, {false, true, false}, {true, true, false}, {true, true, true}};

// Four ranks: of one node, or of two. Two experts each, five tokens of two choices.
struct Small {
  explicit Small(const Kernel& kernel, int32_t num_channels = 3, uint64_t timeout_ns = kRowDeadlineNs)
      : kernel(kernel),
        cluster(kernel.rails ? MakeCluster(2, 2, num_channels, 1, timeout_ns)
                             : MakeCluster(0, 4, num_channels, 1, timeout_ns)) {}

  Drawn Draw(uint64_t seed) const {
    std::mt19937_64 random(seed);
    Drawn drawn;
    drawn.ranks_per_node = kernel.rails ? 2 : 0;
    drawn.combines = drawn.weighted = kernel.combines;
    drawn.sums_at_source = kernel.sums_at_source;
    drawn.dtype = DType::kF32;
    drawn.row_count = 80;  // 320 bytes: several channels
    std::vector<std::vector<int32_t>> ids;
    for (int32_t r = 0; r < 4; ++r) {
      ids.push_back({0, 1, 2, 3, 4, 5, 6, 7, 7, 3});
      std::rotate(ids[r].begin(), ids[r].begin() + r, ids[r].end());
    }
    ids[0][0] = 7;  // rank 3 gets most rows
    drawn.routed = Route(4, 5, 2, 8, 4, 0, 0, ids);
    AddLead(drawn.routed, 2);
    Prepare(*cluster, drawn, cluster->num_channels, 0, random);
    drawn.late.assign(4, 0);
    return drawn;
  }

  // All ranks report `step` about `peer`, nothing moves, and the next call does not run.
  void CheckRefused(Drawn& drawn, int32_t step, int32_t peer, uint64_t expected, uint64_t seen,
                    const std::string& text) const {
    Drawn next = Draw(7);
    const auto untouched = [](const Bytes& bytes) {
      return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == kUnwritten; });
    };
    const Bytes arena(cluster->arenas.base, cluster->arenas.base + 4 * cluster->arenas.stride);
    Launch(*cluster, {&drawn, &next}, 4, 3);
    for (int32_t r = 0; r < 4; ++r) {
      const device::Report& report = cluster->reports[r];
      CHECK(report.state == device::Report::kComplete && report.rank == r);
      CHECK(report.step == step && report.peer == peer && report.expected == expected && report.seen == seen);
      CHECK(untouched(drawn.y[r]) && untouched(next.y[r]));
      for (int32_t to = 0; to < 4; ++to) CHECK(cluster->network.sent(r, to).puts == 0);
    }
    CHECK(std::memcmp(arena.data(), cluster->arenas.base, arena.size()) == 0);
    CHECK(Has(FailureText(cluster->reports[0], "moe.dispatch at f.py:3", 30), text));
  }

  const Kernel kernel;
  const std::unique_ptr<GinCluster> cluster;
};

int32_t At(const Drawn& drawn, int32_t rank, int32_t vector, int32_t expert) {
  return drawn.routed.table[(rank * 4 + vector) * 8 + expert];
}

TEST_CASE("wrong tables: all ranks report them before a row moves") {
  struct Row {
    int32_t rank, vector, expert, change;  // of one number of the table
    int32_t step, peer, expected, seen;
    std::string text;
    int32_t choices = 10, slots = 0;  // of a rank; 0: as many as it has
  };
  for (const Kernel& kernel : kKernels) {
    const Drawn right = Small(kernel).Draw(1);
    const int32_t second = At(right, 0, 2, 1), size = At(right, 0, 1, 0), number = At(right, 3, 1, 0);
    const std::string rows = std::to_string(second - 1), slots = std::to_string(second - 2);
    const auto end = [&](int32_t rank) { return At(right, rank, 0, 7) + At(right, rank, 1, 7); };
    const Row table[] = {
        // An expert whose rows reach into those of the next one.
        {3, 1, 0, second - At(right, 3, 2, 0) + 1 - number, kTooManyRowsOfExpert, 0, second - 1, second - 2,
         "an expert of rank 0 gets " + rows + " rows, but has " + slots + " slots"},
        // Ids of experts that do not exist. As jaxcomm/moe/check.py marks them: the number of ids as the negative size
        // of the first slice of the rank.
        {0, 1, 0, -1 - size, kUnknownExperts, 0, 1, 8, "rank 0 has 1 expert ids"},
        {3, 1, 0, -6 - number, kUnknownExperts, 3, 6, 8, "rank 3 has 6 expert ids"},
        {3, 1, 0, -10 - number, kUnknownExperts, 3, 10, 8, "rank 3 has 10 expert ids"},
        // Slices beyond the choices of a rank, and slices that are not packed at their sender.
        {0, 0, 7, 1, kUnknownRow, 0, end(0) + 1, 10, "of the routing of rank 0 does not exist, expected one of 10"},
        {2, 0, 7, -1, kUnknownRow, 2, end(2) - 1, 10, "of the routing of rank 2 does not exist, expected one of 10"},
        {0, 0, 0, 0, kUnknownRow, 0, 10, 9, "of the routing of rank 0 does not exist, expected one of 9", 9},
        // The last group of the fullest rank does not fit, and a slice begins before the first slot.
        {0, 0, 0, 0, kTooManyRows, 3, 15, 14, "rank 3 gets", 10, 14},
        {0, 2, 2, -3, kTooManyRows, 1, At(right, 0, 1, 2) - 1, right.routed.capacity, "rank 1 gets"}};
    for (const Row& row : table) {
      const Small small(kernel);
      Drawn drawn = small.Draw(1);
      SetTable(drawn, row.rank, row.vector, row.expert, At(drawn, row.rank, row.vector, row.expert) + row.change);
      for (InterNodeRowArgs& args : drawn.args) {
        args.rows.num_choices = row.choices;
        if (row.slots > 0) args.rows.num_slots = row.slots;
      }
      small.CheckRefused(drawn, row.step, row.peer, row.expected, row.seen, row.text);
    }
  }
  device::Report report;  // its numbers are signed
  report.step = kTooManyRows;
  report.expected = static_cast<uint64_t>(-3);
  CHECK(Has(FailureText(report, "moe.dispatch at f.py:3", 30), "up to row -3 of 0"));
}

// Never an address. The row counts as zero. Only the rank that has it reports it, once its call has ended: a report
// ends waits. Peers get the signals of all channels.
TEST_CASE("a list that names a row, a slot or an expert that does not exist") {
  struct Wrong {
    int32_t index, expert;
    bool twice = false;  // the next choice is wrong too: either is reported
  };
  // expert: whose packed choice names the row
  const std::vector<Wrong> rows = {{-1, 1}, {5, 1}, {1 << 30, 1}, {1 << 30, 7}, {5, 7, true}};
  // Rank 0 has no choice of expert 0, whose slots begin with the third.
  const std::vector<Wrong> slots = {{1 << 30, 0}, {1 << 30, 7}, {0, 8}, {0, -1}, {1, 0}, {2, 0}, {5, 0, true}};
  for (const Kernel& kernel : kKernels) {
    for (const Wrong& wrong : kernel.combines ? slots : rows) {
      for (const uint64_t late : {0, 3000}) {
        const Small small(kernel);
        GinCluster& cluster = *small.cluster;
        Drawn drawn = small.Draw(1);
        for (int32_t r = 1; r < 4; ++r) drawn.late[r] = late;
        RowArgs& args = drawn.args[0].rows;
        const int32_t at = kernel.combines ? 2 : At(drawn, 0, 0, wrong.expert);
        const int32_t num = wrong.twice ? 2 : 1;
        for (int32_t i = 0; i < num; ++i) {
          const_cast<int32_t*>(args.index)[at + i] = wrong.index + i;
          if (!kernel.combines) continue;
          const_cast<int32_t*>(args.expert)[at + i] = wrong.expert;
          drawn.routed.slot[0][at + i] = drawn.routed.expert[0][at + i] = -1;
        }
        std::vector<Bytes> expected = ExpectedOf(drawn);
        if (!kernel.combines) {
          const int64_t slot = At(drawn, 0, 2, wrong.expert);
          std::fill_n(expected[wrong.expert / 2].begin() + slot * args.row_bytes, num * args.row_bytes, 0);
        }
        Launch(cluster, {&drawn}, 4, 3);
        for (int32_t r = 0; r < 4; ++r) {
          CHECK(expected[r] == drawn.y[r] && *drawn.args[r].rows.state == 0);
          CHECK(cluster.reports[r].state == (r == 0 ? device::Report::kComplete : device::Report::kNone));
          CHECK(*drawn.args[r].node.abort_flag == (r == 0 ? 1 : 0));
        }
        CHECK(cluster.reports[0].step == kUnknownRow && cluster.reports[0].peer == 0);
        const auto named = static_cast<int64_t>(cluster.reports[0].expected);
        CHECK(named >= wrong.index && named < wrong.index + num);
        CHECK(cluster.reports[0].seen == static_cast<uint64_t>(kernel.combines ? args.num_slots : args.num_rows));
      }
    }
  }
}

// The list of a node has no place for the second one.
TEST_CASE("a routing that names a slot twice") {
  for (const int32_t expert : {0, 7}) {
    const Small small({true, true, false}, 2);
    GinCluster& cluster = *small.cluster;
    Drawn drawn = small.Draw(1);
    const std::vector<int32_t>& experts = drawn.routed.expert[1];
    const auto first = std::find(experts.begin(), experts.end(), expert) - experts.begin();
    int32_t other = 0;  // a choice of the other node
    while (experts[other] / 4 == expert / 4) ++other;
    const_cast<int32_t*>(drawn.args[1].rows.index)[other] = drawn.routed.slot[1][first];
    const_cast<int32_t*>(drawn.args[1].rows.expert)[other] = expert;
    const std::vector<Bytes> expected = ExpectedOf(drawn);
    Launch(cluster, {&drawn}, 4, 3);
    for (const int32_t r : {0, 2, 3}) {
      CHECK(expected[r] == drawn.y[r] && cluster.reports[r].state == device::Report::kNone);
    }
    CHECK(cluster.reports[1].state == device::Report::kComplete && cluster.reports[1].step == kUnknownRow);
    CHECK(cluster.reports[1].peer == 1);
  }
}

TEST_CASE("a rank that does not arrive: its node and its rail name it") {
  for (const Kernel& kernel : kKernels) {
    const Small small(kernel, 2, 1'000'000);
    GinCluster& cluster = *small.cluster;
    Drawn drawn = small.Draw(1);
    const uint64_t begin = emulation::NowNs();
    Launch(cluster, {&drawn}, 4, 3, 3);
    CHECK(emulation::NowNs() - begin < 5'000'000);
    for (const int32_t r : {1, 2}) {
      const device::Report& report = cluster.reports[r];
      CHECK(report.state == device::Report::kComplete && report.peer == 3);
      CHECK(report.step == (kernel.sums_at_source && r == 1 ? 1 : static_cast<int32_t>(kEntryBarrier)));
    }
    CHECK(cluster.reports[0].state == device::Report::kComplete);
  }
}

TEST_CASE("a call whose marks do not fit into shared memory") {
  CallSpec spec;
  spec.collective = Collective::kDispatch, spec.algorithm = "hierarchical";
  spec.group_size = spec.num_experts = 2, spec.row_count = spec.choices = 1;
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
  spec.per_choice = 1;  // the operand has a row for each
  CHECK(message(64).find("64 choices of a rank, 8 per token") == 0);
  spec.collective = Collective::kCombine;  // the choices are those of the 100 results
  CHECK(message(64).find("100 choices of a rank, 8 per token") == 0);
}

// The numbers of docs/internals/cuda-moe.md: T = 4096, K = 8, rows of 14336 bytes, 28 channels.
TEST_CASE("the arena of a combine") {
  CallSpec spec;
  spec.collective = Collective::kCombine, spec.algorithm = "hierarchical";
  spec.group_size = 16, spec.row_count = 7168, spec.choices = 8, spec.num_experts = 256, spec.weighted = 1;
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
  const int64_t tokens = 1 << 28;
  const Status refused = MakeCallProgram(spec, DType::kF32, 100, tokens, {0, 1}, 4).status();
  CHECK(refused.message() == "more than 2^31 sums of 16 nodes");
  CHECK(MakeCallProgram(spec, DType::kF32, 100, tokens / 4, {0, 1}, 4).ok());
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
