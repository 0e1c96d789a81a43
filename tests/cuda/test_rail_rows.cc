// The kernel of dispatch between nodes, emulated over a network that guarantees no more than GIN: series of calls on
// one arena, with random routings, ranks that begin late, and thread blocks that run ahead. Slots are compared with the
// payload that the routing names, and bytes between nodes with the formula. Wrong routings end on all ranks before a
// row moves.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "fakes/gin_cluster.h"
#include "../../ffi/cuda/kernels/rail_rows.cuh"
// clang-format on
#include "../../ffi/cuda/program/call_program.h"
#include "../check.h"
#include "fakes/seed.h"
#include "fakes/spoiling.h"
#include "fakes/virtual_rows.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr uint64_t kDeadlineNs = 1'000'000'000;
constexpr int64_t kArenaBytes = 1 << 21;

// A call of all ranks. Threads of the kernel bring x, take y away and spoil both, as XLA's kernels do.
struct Drawn {
  Routed routed;
  int32_t locals = 1;  // ranks of a node
  bool per_choice = false;
  std::vector<RailRowArgs> args;  // by rank
  std::vector<Bytes> x, y;        // by rank: brought and taken
  std::vector<uint64_t> late;     // by rank: polls before the call begins

  int32_t num_nodes() const { return routed.n / locals; }
};

void Prepare(GinCluster& cluster, Drawn& drawn, int64_t row_bytes, int32_t num_channels, int64_t shift,
             std::mt19937_64& random) {
  const Routed& routed = drawn.routed;
  CallSpec spec;
  spec.collective = Collective::kDispatch;
  spec.group_size = routed.n;
  spec.row_count = row_bytes;
  spec.choices = routed.choices;
  spec.num_experts = routed.experts;
  spec.per_choice = drawn.per_choice ? 1 : 0;
  const int64_t rows = int64_t{routed.tokens} * (drawn.per_choice ? routed.choices : 1);
  const int64_t x_bytes = rows * row_bytes, y_bytes = routed.capacity * row_bytes;
  for (int32_t r = 0; r < routed.n; ++r) {
    StatusOr<RailRowArgs> made = MakeRailRowArgs(spec, DType::kU8, x_bytes, y_bytes, num_channels);
    CHECK(made.ok());
    RailRowArgs args = *made;
    // As if there were enough bytes for all channels.
    const int64_t lines = (row_bytes + 127) / 128, per_channel = (lines + num_channels - 1) / num_channels;
    args.rows.piece_bytes = per_channel * 128;
    args.rows.num_channels = static_cast<int32_t>((lines + per_channel - 1) / per_channel);
    CHECK(RailArenaBytes(args.rows, drawn.num_nodes()) <= kArenaBytes);
    args.node = cluster.comms[r];
    args.gin = cluster.handles[r];
    args.rows.comm = args.gin.comm;
    args.rows.state = cluster.memory.Upload(std::vector<uint64_t>(1));
    drawn.x.emplace_back(x_bytes);
    for (char& byte : drawn.x.back()) byte = static_cast<char>(random());
    drawn.y.emplace_back(y_bytes);
    RowOperands operands;
    operands.table = cluster.memory.Upload(routed.table);
    operands.table_count = static_cast<int64_t>(routed.table.size());
    operands.index = cluster.memory.Upload(RowsOf(routed, r, drawn.per_choice));
    operands.index_count = static_cast<int64_t>(routed.slot[r].size());
    StatusOr<RailRowArgs> whole = WithBuffers(args, cluster.memory.Take(x_bytes + shift) + shift,
                                              cluster.memory.Take(y_bytes + shift) + shift, operands);
    CHECK(whole.ok());
    drawn.args.push_back(*whole);
    drawn.late.push_back(random() % 4 == 0 ? random() % 300 : 0);
  }
}

// The work of a thread block.
void RunCall(Drawn& drawn, int32_t rank, int32_t channel, const ncclDevComm& nccl_comm) {
  const RowArgs& args = drawn.args[rank].rows;
  auto* const x = const_cast<char*>(args.x);
  Bytes &brought = drawn.x[rank], &taken = drawn.y[rank];
  ForPieces(args, channel, static_cast<int64_t>(brought.size()), [&](int64_t i) { x[i] = brought[i]; });
  ForPieces(args, channel, static_cast<int64_t>(taken.size()), [&](int64_t i) { args.y[i] = kUnwritten; });
  __syncthreads();
  const device::Gin gin(drawn.args[rank].gin, nccl_comm);
  RailDispatch<device::Gin>(drawn.args[rank], gin, channel, device::DynamicShared()).Run();
  __syncthreads();
  ForPieces(args, channel, static_cast<int64_t>(taken.size()), [&](int64_t i) { taken[i] = args.y[i]; });
  ForPieces(args, channel, static_cast<int64_t>(brought.size()), [&](int64_t i) { x[i] = kSpoiled; });
}

// A kernel begins once all thread blocks of the previous one on its GPU have ended. `absent`: a rank that does not run.
void Launch(GinCluster& cluster, const std::vector<Drawn*>& calls, unsigned threads, uint64_t seed,
            int32_t absent = -1) {
  size_t shared = 0;
  std::vector<std::atomic<int32_t>> ended(cluster.n);  // thread blocks, by rank
  for (const Drawn* drawn : calls) {
    shared = std::max(shared, static_cast<size_t>(RailSharedBytes(drawn->args[0].rows, static_cast<int>(threads))));
  }
  const auto body = [&](int32_t rank, const ncclDevComm& nccl_comm) {
    const auto channel = static_cast<int32_t>(blockIdx.x);
    if (rank == absent) return;
    for (size_t call = 0; call < calls.size(); ++call) {
      Drawn* const drawn = calls[call];
      if (threadIdx.x == 0) {
        while (ended[rank] < static_cast<int32_t>(call) * cluster.num_channels) emulation::Pause();
      }
      __syncthreads();
      if (channel < drawn->args[rank].rows.num_channels) {
        for (uint64_t i = 0; i < drawn->late[rank]; ++i) emulation::Pause();
        RunCall(*drawn, rank, channel, nccl_comm);
      }
      __syncthreads();
      if (threadIdx.x == 0) ++ended[rank];
    }
  };
  cluster.Launch(cluster.num_channels, threads, seed, body, shared);
}

// By the definition: slot(t, k) of the rank of its expert holds the row of the token; all other slots are zero.
std::vector<Bytes> Dispatched(const Drawn& drawn) {
  const Routed& routed = drawn.routed;
  const int64_t row = drawn.args[0].rows.row_bytes;
  std::vector<Bytes> y(routed.n, Bytes(routed.capacity * row));
  for (int32_t r = 0; r < routed.n; ++r) {
    for (size_t c = 0; c < routed.slot[r].size(); ++c) {
      if (routed.slot[r][c] < 0) continue;
      const auto from = static_cast<int64_t>(drawn.per_choice ? c : c / routed.choices);
      std::copy_n(drawn.x[r].begin() + from * row, row,
                  y[routed.RankOf(routed.expert[r][c])].begin() + routed.slot[r][c] * row);
    }
  }
  return y;
}

void CheckDrawn(const GinCluster& cluster, const Drawn& drawn, uint64_t seed, size_t place) {
  const std::vector<Bytes> expected = Dispatched(drawn);
  for (int32_t r = 0; r < cluster.n; ++r) {
    const device::Report& report = cluster.reports[r];
    const bool same = expected[r] == drawn.y[r];
    if (same && report.state == device::Report::kNone) continue;
    std::fprintf(stderr,
                 "dispatch of %d nodes of %d ranks, %d tokens, %d choices, %d experts, %d slots, rows of %lld bytes, "
                 "%d channels, seed %llu, call %zu: rank %d %s (report: state %llu, step %d, peer %d)\n",
                 drawn.num_nodes(), drawn.locals, drawn.routed.tokens, drawn.routed.choices, drawn.routed.experts,
                 drawn.routed.capacity, static_cast<long long>(drawn.args[r].rows.row_bytes),
                 drawn.args[r].rows.num_channels, static_cast<unsigned long long>(seed), place, r,
                 same ? "aborted" : "has other bits", static_cast<unsigned long long>(report.state), report.step,
                 report.peer);
    std::exit(1);
  }
}

// Bytes and puts from one rank to another between nodes: each row that the node needs once, and for each channel 4
// bytes per choice, rounded up to a multiple of 256.
gin_fake::Network::Sent Expected(const Drawn& drawn, int32_t from, int32_t to) {
  const Routed& routed = drawn.routed;
  gin_fake::Network::Sent sent;
  if (from / drawn.locals == to / drawn.locals || from % drawn.locals != to % drawn.locals) return sent;
  std::set<size_t> rows;
  int64_t choices = 0;
  for (size_t c = 0; c < routed.expert[from].size(); ++c) {
    const int32_t e = routed.expert[from][c];
    if (e < 0 || routed.RankOf(e) / drawn.locals != to / drawn.locals) continue;
    ++choices;
    rows.insert(drawn.per_choice ? c : c / routed.choices);
  }
  const RowArgs& args = drawn.args[0].rows;
  sent.bytes =
      static_cast<int64_t>(rows.size()) * args.row_bytes + args.num_channels * ((choices * 4 + 255) / 256 * 256);
  sent.puts = choices > 0 ? args.num_channels : 0;
  return sent;
}

int num_calls = 0;

Drawn DrawCall(GinCluster& cluster, int32_t locals, std::mt19937_64& random) {
  Drawn drawn;
  const int32_t n = cluster.n, experts = n * (1 + static_cast<int32_t>(random() % 3));
  const int32_t token_counts[] = {0, 1, 3, 8, 70}, choice_counts[] = {1, 2, 3, 9};
  const int32_t tokens = token_counts[random() % 5], choices = choice_counts[random() % 4];
  const int32_t align = random() % 2 == 0 ? 1 : 4, slots = random() % 4 == 0 ? n * tokens * choices + 1 : 0;
  drawn.routed = Route(n, tokens, choices, experts, align, slots, static_cast<int32_t>(random() % 7),
                       DrawIds(n, tokens, choices, experts, random));
  drawn.locals = locals;
  drawn.per_choice = random() % 3 == 0;
  const int64_t row_bytes[] = {1, 7, 48, 130, 400};
  const auto channels = static_cast<int32_t>(1 + random() % cluster.num_channels);
  // Few bytes per row where there are many: the memory of the test is small.
  const int64_t shift = random() % 3 == 0 ? 4 : 0;
  Prepare(cluster, drawn, row_bytes[random() % (tokens > 8 ? 3 : 5)], channels, shift, random);
  ++num_calls;
  return drawn;
}

void RunSeries(uint64_t seed, int32_t num_nodes, int32_t locals, int length) {
  std::mt19937_64 random(seed);
  GinCluster cluster(num_nodes, locals, 1 + static_cast<int32_t>(random() % 3), kArenaBytes, seed, kDeadlineNs);
  std::vector<Drawn> series;
  for (int i = 0; i < length; ++i) series.push_back(DrawCall(cluster, locals, random));
  std::vector<Drawn*> calls;
  for (Drawn& drawn : series) calls.push_back(&drawn);
  constexpr unsigned kThreads[] = {1, 3, 4, 8};
  Launch(cluster, calls, kThreads[random() % 4], seed);
  for (size_t i = 0; i < series.size(); ++i) CheckDrawn(cluster, series[i], seed, i);
  CHECK(cluster.network.empty());
  for (int32_t from = 0; from < cluster.n; ++from) {
    for (int32_t to = 0; to < cluster.n; ++to) {
      gin_fake::Network::Sent sum;
      for (const Drawn& drawn : series) {
        const gin_fake::Network::Sent of_call = Expected(drawn, from, to);
        sum.puts += of_call.puts, sum.bytes += of_call.bytes;
      }
      const gin_fake::Network::Sent sent = cluster.network.sent(from, to);
      CHECK(sent.puts == sum.puts && sent.bytes == sum.bytes);
    }
  }
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

// Two nodes of two ranks, one expert each, five tokens.
Drawn Small(GinCluster& cluster, uint64_t seed) {
  std::mt19937_64 random(seed);
  Drawn drawn;
  drawn.locals = 2;
  std::vector<std::vector<int32_t>> ids;
  for (int32_t r = 0; r < 4; ++r) {
    ids.push_back({0, 1, 2, 3, 0, 3, 1, 2, 2, 3});
    std::rotate(ids[r].begin(), ids[r].begin() + r, ids[r].end());
  }
  drawn.routed = Route(4, 5, 2, 4, 4, 0, 0, ids);
  Prepare(cluster, drawn, 320, cluster.num_channels, 0, random);
  return drawn;
}

void SetTable(Drawn& drawn, int32_t rank, int32_t vector, int32_t expert, int32_t value) {
  drawn.routed.table[(rank * 4 + vector) * drawn.routed.experts + expert] = value;
  for (RailRowArgs& args : drawn.args) {
    std::memcpy(const_cast<int32_t*>(args.rows.table), drawn.routed.table.data(), drawn.routed.table.size() * 4);
  }
}

bool Untouched(const Bytes& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == kUnwritten; });
}

// All ranks report `step` about `peer`, nothing moves, and the next call does not run.
void CheckRefused(GinCluster& cluster, Drawn& drawn, int32_t step, int32_t peer, uint64_t expected, uint64_t seen) {
  Drawn next = Small(cluster, 7);
  const Bytes arena(cluster.arenas.base, cluster.arenas.base + cluster.n * kArenaBytes);
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
  GinCluster cluster(2, 2, 3, kArenaBytes, 1);
  Drawn drawn = Small(cluster, 1);
  const int32_t first = drawn.routed.table[2 * 4 + 3], slots = drawn.args[0].rows.num_slots;
  SetTable(drawn, 0, 2, 3, first + slots);
  SetTable(drawn, 0, 1, 3, drawn.routed.table[4 + 3]);
  for (int32_t r = 1; r < 4; ++r) SetTable(drawn, r, 2, 3, drawn.routed.table[(r * 4 + 2) * 4 + 3] + slots);
  // Each slice of the expert is reported by the thread that finds it; the peer is the same.
  Drawn next = Small(cluster, 7);
  const Bytes arena(cluster.arenas.base, cluster.arenas.base + cluster.n * kArenaBytes);
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
  GinCluster cluster(2, 2, 2, kArenaBytes, 1);
  Drawn drawn = Small(cluster, 1);
  SetTable(drawn, 3, 1, 0, -6);
  CheckRefused(cluster, drawn, kUnknownExperts, 3, 6, 4);
}

// The positions of a message begin with the choice that comes first in the table.
TEST_CASE("packed choices with a gap") {
  GinCluster cluster(2, 2, 2, kArenaBytes, 1);
  Drawn drawn = Small(cluster, 1);
  const int32_t last = drawn.routed.table[2 * 16 + 3];
  SetTable(drawn, 2, 0, 3, last - 1);
  const int32_t size = drawn.routed.table[(2 * 4 + 1) * 4 + 3];
  CheckRefused(cluster, drawn, kUnknownRow, 2, last - 1 + size, 10);
}

// Never an address. The row counts as zero, and only the rank that has it reports it.
TEST_CASE("a list that names a row that does not exist") {
  for (const int32_t row : {-1, 5, 1 << 30}) {
    for (const int32_t expert : {0, 3}) {  // of the own node and of the other one
      GinCluster cluster(2, 2, 2, kArenaBytes, 1, kDeadlineNs);
      Drawn drawn = Small(cluster, 1);
      const int32_t packed = drawn.routed.table[expert], slot = drawn.routed.table[2 * 4 + expert];
      const_cast<int32_t*>(drawn.args[0].rows.index)[packed] = row;
      std::vector<Bytes> expected = Dispatched(drawn);
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
  GinCluster cluster(2, 2, 2, kArenaBytes, 1, 1'000'000);
  Drawn drawn = Small(cluster, 1);
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
  GinCluster cluster(2, 1, 1, kArenaBytes, 1, 1'000'000);
  std::mt19937_64 random(1);
  Drawn drawn;
  drawn.routed = Route(2, 3, 2, 2, 1, 0, 0, {{0, 1, 1, 0, 0, 1}, {1, 0, 0, 1, 1, 0}});
  Prepare(cluster, drawn, 100, 1, 0, random);
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
  CHECK(MakeRailRowArgs(spec, DType::kU8, 100'000, 100, 4).ok());
  const Status refused = MakeRailRowArgs(spec, DType::kU8, 300'000, 100, 4).status();
  CHECK(refused.message().find("300000 rows and 2 experts need more shared memory between nodes") == 0);
  // The largest number of rows of the documentation.
  CHECK(RailSharedBytes(MakeRailRowArgs(spec, DType::kU8, 131'072, 100, 4)->rows, kRailThreads) <= kMaxSharedBytes);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
