// Emulated ranks of several nodes that GIN connects, for kernels that use gin.h.
#pragma once

#include <functional>

// clang-format off: in this order, as NCCL's headers go before it
#include "gin_fake.h"
#include "../../../ffi/include/jaxcomm/gin.h"
// clang-format on
#include "gin_nodes.h"

namespace jaxcomm {
namespace cuda {

constexpr uint64_t kGinTimeoutNs = 20'000'000;

struct OwnMemory {
  HostMemory memory;
};

// The state of a communicator's ranks with an arena, from one launch to the next.
struct GinCluster : OwnMemory, GinNodes {
  GinCluster(int32_t num_nodes, int32_t ranks_per_node, int32_t num_channels, int64_t arena_bytes, uint64_t seed,
             uint64_t timeout_ns = kGinTimeoutNs)
      : GinNodes(memory, VirtualRanks(memory, {num_nodes, ranks_per_node, false}, num_channels, timeout_ns),
                 num_channels, arena_bytes),
        n(num_nodes * ranks_per_node),
        num_channels(num_channels),
        network(n, num_channels, seed),
        reports(comms[0].report) {}

  // All ranks with `blocks` blocks each, and the network.
  void Launch(int32_t blocks, unsigned threads, uint64_t seed,
              const std::function<void(int32_t rank, const ncclDevComm&)>& body, size_t shared_bytes = 0) {
    const auto run = [&] {
      const auto rank = static_cast<int32_t>(blockIdx.y);
      body(rank, network.CommOf(rank));
    };
    network.Launch(static_cast<unsigned>(blocks), static_cast<unsigned>(n), threads, seed, run, shared_bytes);
  }

  bool all_well() const {
    for (int32_t r = 0; r < n; ++r) {
      if (reports[r].state != device::Report::kNone) return false;
    }
    return true;
  }

  const int32_t n, num_channels;
  gin_fake::Network network;
  device::Report* const reports;
};

}  // namespace cuda
}  // namespace jaxcomm
