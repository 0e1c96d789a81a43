// Calls of dispatch and combine among ranks of several nodes in the emulation, over the fake of GIN.
#pragma once

// clang-format off: in this order, as NCCL's headers go before it
#include "gin_cluster.h"
#include "../../../ffi/cuda/kernels/rail_combine.cuh"
#include "../../../ffi/cuda/kernels/rail_dispatch.cuh"
// clang-format on
#include "../../../ffi/cuda/program/call_program.h"
#include "drawn_rows.h"

namespace jaxcomm {
namespace cuda {

constexpr uint64_t kRailDeadlineNs = 1'000'000'000;
constexpr int64_t kRailArenaBytes = 1 << 22;

struct RailDrawn : DrawnRows {
  std::vector<InterNodeRowArgs> args;  // by rank

  bool Crosses(int32_t from, int32_t to) const {
    return from / ranks_per_node != to / ranks_per_node && from % ranks_per_node == to % ranks_per_node;
  }
};

// The buffers of a call with this routing.
inline void Prepare(GinCluster& cluster, RailDrawn& drawn, int32_t num_channels, int64_t shift,
                    std::mt19937_64& random) {
  const int64_t item = ItemBytes(drawn.dtype);
  for (int32_t r = 0; r < cluster.n; ++r) {
    StatusOr<InterNodeRowArgs> made =
        MakeInterNodeRowArgs(SpecOf(drawn), drawn.dtype, drawn.x_count(), drawn.y_count(), num_channels);
    CHECK(made.ok());
    InterNodeRowArgs args = *made;
    SpreadOver(num_channels, args.rows);
    CHECK(RailArenaBytes(args, drawn.num_nodes()) <= kRailArenaBytes);
    args.node = cluster.comms[r];
    args.gin = cluster.handles[r];
    args.rows.comm = args.gin.comm;
    args.rows.state = cluster.memory.Upload(std::vector<uint64_t>(1));
    const RowOperands operands = DrawOperands(cluster.memory, drawn, random);
    StatusOr<InterNodeRowArgs> whole =
        WithBuffers(args, cluster.memory.Take(drawn.x_count() * item + shift) + shift,
                    cluster.memory.Take(drawn.y_count() * item + shift) + shift, operands);
    CHECK(whole.ok());
    drawn.args.push_back(*whole);
  }
}

// `absent`: a rank that does not run.
inline void Launch(GinCluster& cluster, const std::vector<RailDrawn*>& calls, unsigned threads, uint64_t seed,
                   int32_t absent = -1) {
  size_t shared = 0;
  std::vector<std::atomic<int32_t>> ended(cluster.n);
  for (const RailDrawn* drawn : calls) {
    shared = std::max(shared, static_cast<size_t>(RailSharedBytes(drawn->args[0].rows, static_cast<int>(threads))));
  }
  const auto body = [&](int32_t rank, const ncclDevComm& nccl_comm) {
    const auto channel = static_cast<int32_t>(blockIdx.x);
    if (rank == absent) return;
    RunInOrder(calls, ended[rank], [&](RailDrawn& drawn) {
      const InterNodeRowArgs& args = drawn.args[rank];
      if (channel >= args.rows.num_channels) return;
      BeLate(drawn.late[rank]);
      RunAndSpoil(args.rows, channel, drawn.x[rank], drawn.y[rank], [&] {
        const device::Gin gin(args.gin, nccl_comm);
        if (drawn.combines) {
          RailCombine<device::Gin>(args, gin, channel, device::DynamicShared()).Run();
        } else {
          RailDispatch<device::Gin>(args, gin, channel, device::DynamicShared()).Run();
        }
      });
    });
  };
  cluster.Launch(cluster.num_channels, threads, seed, body, shared);
}

// Ends the test if a rank has other results than the definition, or has aborted.
inline void CheckDrawn(const GinCluster& cluster, const RailDrawn& drawn, uint64_t seed, size_t place) {
  const std::vector<Bytes> expected = ExpectedOf(drawn);
  for (int32_t r = 0; r < cluster.n; ++r) {
    const device::Report& report = cluster.reports[r];
    const bool same = expected[r] == drawn.y[r];
    if (same && report.state == device::Report::kNone) continue;
    std::fprintf(stderr,
                 "%s of %d nodes of %d ranks, %d tokens, %d choices, %d experts, %d slots, rows of %lld %s, %d "
                 "channels, sums at source %d, per choice %d, seed %llu, call %zu: rank %d %s (report: state %llu, "
                 "step %d, peer "
                 "%d)\n",
                 drawn.combines ? "combine" : "dispatch", drawn.num_nodes(), drawn.ranks_per_node, drawn.routed.tokens,
                 drawn.routed.choices, drawn.routed.experts, drawn.routed.capacity,
                 static_cast<long long>(drawn.row_count), Name(drawn.dtype), drawn.args[r].rows.num_channels,
                 drawn.sums_at_source ? 1 : 0, drawn.per_choice ? 1 : 0, static_cast<unsigned long long>(seed), place,
                 r, same ? "aborted" : "has other bits", static_cast<unsigned long long>(report.state), report.step,
                 report.peer);
    std::exit(1);
  }
}

// The rows that `from` has to move for tokens of its own, and the choices among them, in the node of `to`.
struct RailShare {
  int64_t rows = 0, choices = 0;
};
inline RailShare ShareOf(const RailDrawn& drawn, int32_t source_rank, int32_t node) {
  const Routed& routed = drawn.routed;
  RailShare share;
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

// Runs the calls of a series and compares their results, and the puts between nodes with expected(call, from, to).
template <typename Expected>
void RunSeriesOf(GinCluster& cluster, std::vector<RailDrawn>& series, std::mt19937_64& random, uint64_t seed,
                 const Expected& expected) {
  std::vector<RailDrawn*> calls;
  for (RailDrawn& drawn : series) calls.push_back(&drawn);
  constexpr unsigned kThreads[] = {1, 3, 4, 8};
  Launch(cluster, calls, kThreads[random() % 4], seed);
  for (size_t i = 0; i < series.size(); ++i) CheckDrawn(cluster, series[i], seed, i);
  CHECK(cluster.network.empty());
  for (int32_t from = 0; from < cluster.n; ++from) {
    for (int32_t to = 0; to < cluster.n; ++to) {
      gin_fake::Network::Sent sum;
      for (const RailDrawn& drawn : series) {
        if (!drawn.Crosses(from, to)) continue;
        const gin_fake::Network::Sent of_call = expected(drawn, from, to);
        sum.puts += of_call.puts, sum.bytes += of_call.bytes;
      }
      const gin_fake::Network::Sent sent = cluster.network.sent(from, to);
      CHECK(sent.puts == sum.puts && sent.bytes == sum.bytes);
    }
  }
}

// Bytes and puts of a dispatch from one rank to another between nodes: each row that the node needs once, and for each
// channel 4 bytes per choice, rounded up to a multiple of 256.
inline gin_fake::Network::Sent DispatchSends(const RailDrawn& drawn, int32_t from, int32_t to) {
  const RailShare share = ShareOf(drawn, from, to / drawn.ranks_per_node);
  const RowArgs& args = drawn.args[0].rows;
  gin_fake::Network::Sent sent;
  sent.bytes = share.rows * args.row_bytes + args.num_channels * ((share.choices * 4 + 255) / 256 * 256);
  sent.puts = share.choices > 0 ? args.num_channels : 0;
  return sent;
}

// Runs a series of `length` calls of draw(cluster, ranks per node, random) on a new cluster.
template <typename Draw, typename Expected>
void RunDrawn(uint64_t seed, int32_t num_nodes, int32_t locals, int length, const Draw& draw,
              const Expected& expected) {
  std::mt19937_64 random(seed);
  GinCluster cluster(num_nodes, locals, 1 + static_cast<int32_t>(random() % 3), kRailArenaBytes, seed, kRailDeadlineNs);
  std::vector<RailDrawn> series;
  for (int i = 0; i < length; ++i) series.push_back(draw(cluster, locals, random));
  RunSeriesOf(cluster, series, random, seed, expected);
}

// Sizes and routing of a call, so that its memory is small.
inline RailDrawn DrawSizes(const GinCluster& cluster, int32_t ranks_per_node, std::mt19937_64& random) {
  RailDrawn drawn;
  const int32_t n = cluster.n, experts = n * (1 + static_cast<int32_t>(random() % 3));
  const int32_t token_counts[] = {0, 1, 3, 8, 70}, choice_counts[] = {1, 2, 3, 9};
  const int32_t tokens = token_counts[random() % 5], choices = choice_counts[random() % 4];
  const int32_t align = random() % 2 == 0 ? 1 : 4, slots = random() % 4 == 0 ? n * tokens * choices + 1 : 0;
  drawn.routed = Route(n, tokens, choices, experts, align, slots, static_cast<int32_t>(random() % 7),
                       DrawIds(n, tokens, choices, experts, random));
  drawn.ranks_per_node = ranks_per_node;
  drawn.per_choice = random() % 3 == 0;
  return drawn;
}

// Two nodes of two ranks, one expert each, five tokens.
inline RailDrawn SmallSizes() {
  RailDrawn drawn;
  drawn.ranks_per_node = 2;
  std::vector<std::vector<int32_t>> ids;
  for (int32_t r = 0; r < 4; ++r) {
    ids.push_back({0, 1, 2, 3, 0, 3, 1, 2, 2, 3});
    std::rotate(ids[r].begin(), ids[r].begin() + r, ids[r].end());
  }
  drawn.routed = Route(4, 5, 2, 4, 4, 0, 0, ids);
  return drawn;
}

inline void SetTable(RailDrawn& drawn, int32_t rank, int32_t vector, int32_t expert, int32_t value) {
  drawn.routed.table[(rank * 4 + vector) * drawn.routed.experts + expert] = value;
  for (InterNodeRowArgs& args : drawn.args) {
    std::memcpy(const_cast<int32_t*>(args.rows.table), drawn.routed.table.data(), drawn.routed.table.size() * 4);
  }
}

inline bool Untouched(const Bytes& bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == kUnwritten; });
}

}  // namespace cuda
}  // namespace jaxcomm
