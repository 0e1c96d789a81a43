// Emulated ranks of several nodes that GIN connects, for kernels that use gin.h.
#pragma once

#include <functional>
#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "gin_fake.h"
#include "../../../ffi/include/jaxcomm/gin.h"
// clang-format on
#include "../../../ffi/cuda/program/gin_args.h"
#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

constexpr uint64_t kGinTimeoutNs = 20'000'000;

// The state of a communicator's ranks with an arena, from one launch to the next.
struct GinCluster {
  GinCluster(int32_t num_nodes, int32_t ranks_per_node, int32_t num_channels, int64_t arena_bytes, uint64_t seed,
             uint64_t timeout_ns = kGinTimeoutNs)
      : n(num_nodes * ranks_per_node),
        num_channels(num_channels),
        num_contexts(1 + static_cast<int32_t>(seed % 3)),
        network(num_contexts, NumGinSignals(num_channels, n), NumGinCounters(num_channels), num_channels, seed),
        arenas{memory.Take(n * arena_bytes + 16) + 16, arena_bytes},
        registered{arenas.base, arenas.stride},
        reports(memory.Upload(std::vector<device::Report>(n))) {
    const Counters counters = MakeCounters(memory, n, ranks_per_node, num_channels);
    for (int32_t r = 0; r < n; ++r) {
      const int32_t first = r / ranks_per_node * ranks_per_node;
      device::Comm comm;
      comm.world = {r, n, 0, 1};
      comm.local = {r - first, ranks_per_node, first, 1};
      comm.signals.pad = {counters.pads + first * counters.pad_bytes, counters.pad_bytes};
      comm.signals.sent = counters.sent[r];
      comm.signals.received = counters.received[r];
      comm.signals.num_channels = num_channels;
      comm.arena = {arenas.At(first), arena_bytes};
      comm.arena_bytes = arena_bytes;
      comm.timeout_ns = timeout_ns;
      comm.report = reports + r;
      comm.abort_flag = memory.Upload(std::vector<uint64_t>(1));
      comms.push_back(comm);
      device::GinHandle handle;
      handle.comm = comm;
      handle.comm.local = comm.world;
      handle.comm.signals = {};
      handle.comm.signals.received = memory.Upload(std::vector<uint64_t>(n * num_channels));
      handle.puts = memory.Upload(std::vector<uint64_t>(num_channels));
      handle.arena = &registered;
      handles.push_back(handle);
    }
  }

  // All ranks with `blocks` blocks each, and the network.
  void Launch(int32_t blocks, unsigned threads, uint64_t seed,
              const std::function<void(int32_t rank, const ncclDevComm&)>& body, size_t shared_bytes = 0) {
    network.Reopen();
    const auto run = [&] {
      if (static_cast<int32_t>(blockIdx.y) == n) {
        if (threadIdx.x < 2) network.Serve(static_cast<int>(n * blocks * threads));
        return;
      }
      const auto rank = static_cast<int32_t>(blockIdx.y);
      body(rank, {rank, static_cast<uint32_t>(num_contexts), &network});
      network.Leave();
    };
    emulation::Launch(static_cast<unsigned>(blocks), static_cast<unsigned>(n + 1), threads, seed, run, shared_bytes);
  }

  bool all_well() const {
    for (int32_t r = 0; r < n; ++r) {
      if (reports[r].state != device::Report::kNone) return false;
    }
    return true;
  }

  const int32_t n, num_channels, num_contexts;
  HostMemory memory;
  gin_fake::Network network;
  const device::Window arenas;  // of all ranks
  ncclWindow_vidmem registered;
  device::Report* const reports;
  std::vector<device::Comm> comms;
  std::vector<device::GinHandle> handles;
};

}  // namespace cuda
}  // namespace jaxcomm
