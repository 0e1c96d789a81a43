// Calls of dispatch and combine in the emulation: among the ranks of a node, or of several nodes, over the fake of GIN.
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

constexpr uint64_t kRowDeadlineNs = 1'000'000'000;
constexpr int64_t kRowArenaBytes = 1 << 20, kRailArenaBytes = 1 << 22;

// A cluster for calls between `num_nodes` nodes, or for the kernel inside a node if `num_nodes` is 0.
inline std::unique_ptr<GinCluster> MakeCluster(int32_t num_nodes, int32_t ranks_per_node, int32_t num_channels,
                                               uint64_t seed, uint64_t timeout_ns = kRowDeadlineNs) {
  return std::make_unique<GinCluster>(std::max(num_nodes, 1), ranks_per_node, num_channels,
                                      num_nodes > 0 ? kRailArenaBytes : kRowArenaBytes, seed, timeout_ns);
}

// With `ranks_per_node`, the kernels between nodes; else those inside a node, which read only `rows` of the arguments.
struct Drawn : DrawnRows {
  std::vector<InterNodeRowArgs> args;  // by rank

  bool rails() const { return ranks_per_node > 0; }
  bool Crosses(int32_t from, int32_t to) const {
    return rails() && from / ranks_per_node != to / ranks_per_node && from % ranks_per_node == to % ranks_per_node;
  }
  int32_t NumChannels() const { return args[0].rows.num_channels; }
};

// The buffers of a call with this routing.
inline void Prepare(GinCluster& cluster, Drawn& drawn, int32_t num_channels, int64_t shift, std::mt19937_64& random) {
  const int64_t item = ItemBytes(drawn.dtype), x_count = drawn.x_count(), y_count = drawn.y_count();
  for (int32_t r = 0; r < cluster.n; ++r) {
    InterNodeRowArgs args;
    if (drawn.rails()) {
      args = *MakeInterNodeRowArgs(SpecOf(drawn), drawn.dtype, x_count, y_count, num_channels);
    } else {
      args.rows = *MakeRowArgs(SpecOf(drawn), drawn.dtype, x_count, y_count, num_channels);
    }
    SpreadOver(num_channels, args.rows);
    CHECK((drawn.rails() ? RailArenaBytes(args, drawn.num_nodes()) : ArenaBytes(args.rows)) <= cluster.arenas.stride);
    args.node = cluster.comms[r];
    args.gin = cluster.handles[r];
    args.rows.comm = drawn.rails() ? args.gin.comm : args.node;
    args.rows.state = cluster.memory.Upload(std::vector<uint64_t>(1));
    const RowOperands operands = DrawOperands(cluster.memory, drawn, random);
    const char* const x = cluster.memory.Take(x_count * item + shift) + shift;
    char* const y = cluster.memory.Take(y_count * item + shift) + shift;
    if (drawn.rails()) {
      args = *WithBuffers(args, x, y, operands);
    } else {
      args.rows = *WithBuffers(args.rows, x, y, operands);
    }
    drawn.args.push_back(args);
  }
}

// `missing`: a rank that does not run.
inline void Launch(GinCluster& cluster, const std::vector<Drawn*>& calls, unsigned threads, uint64_t seed,
                   int32_t missing = -1) {
  int64_t shared = 0;
  std::vector<std::atomic<int32_t>> ended(cluster.n);
  for (const Drawn* drawn : calls) {
    const RowArgs& args = drawn->args[0].rows;
    const auto num = static_cast<int32_t>(threads);
    shared = std::max(shared, drawn->rails() ? RailSharedBytes(args, num) : RowSharedBytes(args, num));
  }
  const auto body = [&](int32_t, const ncclDevComm& nccl_comm) {
    RunInOrder(calls, ended, missing, [&](Drawn& drawn, int32_t rank, int32_t channel) {
      const InterNodeRowArgs& args = drawn.args[rank];
      RunAndSpoil(args.rows, channel, drawn.x[rank], drawn.y[rank], [&] {
        if (!drawn.rails()) return RowCall(args.rows, channel, device::DynamicShared()).Run();
        const device::Gin gin(args.gin, nccl_comm);
        if (drawn.combines) {
          RailCombine<device::Gin>(args, gin, channel, device::DynamicShared()).Run();
        } else {
          RailDispatch<device::Gin>(args, gin, channel, device::DynamicShared()).Run();
        }
      });
    });
  };
  cluster.Launch(cluster.num_channels, threads, seed, body, static_cast<size_t>(shared));
}

// Ends the test if a rank has other results than the definition, or has aborted.
inline void CheckDrawn(const GinCluster& cluster, const Drawn& drawn, uint64_t seed, size_t place) {
  const std::vector<Bytes> expected = ExpectedOf(drawn);
  for (int32_t r = 0; r < cluster.n; ++r) {
    const std::string what = (drawn.combines ? "combine of " : "dispatch of ") + std::to_string(drawn.num_nodes()) +
                             " nodes of " + std::to_string(drawn.ranks_per_node) + " ranks";
    CheckRank(expected[r] == drawn.y[r], cluster.reports[r], what, r, seed, place);
  }
}

inline void SetTable(Drawn& drawn, int32_t rank, int32_t vector, int32_t expert, int32_t value) {
  drawn.routed.table[(rank * 4 + vector) * drawn.routed.experts + expert] = value;
  for (InterNodeRowArgs& args : drawn.args) {
    std::memcpy(const_cast<int32_t*>(args.rows.table), drawn.routed.table.data(), drawn.routed.table.size() * 4);
  }
}

}  // namespace cuda
}  // namespace jaxcomm
