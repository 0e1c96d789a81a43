// GIN between the emulated ranks of a group, with thread blocks for the network.
#pragma once

#include <deque>
#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "gin_fake.h"
#include "../../../ffi/cuda/kernels/gin_network.cuh"
#include "../../../ffi/cuda/program/packing.h"
// clang-format on
#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

// Lives longer than a call, because the counts of signals do.
class VirtualGin {
 public:
  VirtualGin(int32_t num_ranks, int32_t num_channels, uint64_t seed)
      : num_contexts_(1 + static_cast<int32_t>(seed % 3)),
        network_(num_contexts_, NumGinSignals(num_channels, num_ranks), NumGinCounters(num_channels), num_channels,
                 seed),
        puts_(num_ranks, std::vector<uint64_t>(num_channels)) {}

  // By rank. Valid as long as this object.
  std::vector<GinNetworkArgs> Args(const VirtualRanks::Call& call) {
    std::vector<GinNetworkArgs> args(puts_.size());
    for (size_t r = 0; r < args.size(); ++r) {
      const PeerNetworkArgs& peers = call.network[r];
      args[r].comm = peers.comm;
      args[r].puts = puts_[r].data();
      args[r].input = BufferIn(peers.input, 16);
      args[r].output = BufferIn(peers.output, 48);
      args[r].scratch = BufferIn(peers.scratch, 0);
    }
    return args;
  }

  ncclDevComm CommOf(int32_t rank) { return {rank, static_cast<uint32_t>(num_contexts_), &network_}; }

  gin_fake::Network& network() { return network_; }

  // Called by the threads of the last row of a launch. The other threads leave when they have ended.
  void Serve() {
    constexpr unsigned kThreads = 2;  // active threads per block
    if (threadIdx.x < kThreads) network_.Serve(static_cast<int>((gridDim.y - 1) * gridDim.x * blockDim.x));
  }

 private:
  // Windows begin at some distance before the buffers.
  GinBuffer BufferIn(const device::Window& buffer, int64_t offset) {
    windows_.push_back({buffer.base - offset, buffer.stride});
    return {&windows_.back(), offset};
  }

  const int32_t num_contexts_;
  gin_fake::Network network_;
  std::vector<std::vector<uint64_t>> puts_;
  std::deque<ncclWindow_vidmem> windows_;
};

}  // namespace cuda
}  // namespace jaxcomm
