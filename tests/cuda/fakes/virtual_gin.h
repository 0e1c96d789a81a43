// GIN between the emulated ranks of a group: a network, and the arguments of kernels that use it.
#pragma once

#include <deque>
#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "gin_fake.h"
#include "../../../ffi/cuda/kernels/gin_network.cuh"
// clang-format on
#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

// Lives longer than a call, because the counts of signals do.
class VirtualGin : public gin_fake::Network {
 public:
  VirtualGin(int32_t num_ranks, int32_t num_channels, uint64_t seed)
      : Network(num_ranks, num_channels, seed), puts_(num_ranks, std::vector<uint64_t>(num_channels)) {}

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

 private:
  // Windows begin at some distance before the buffers.
  GinBuffer BufferIn(const device::Window& buffer, int64_t offset) {
    windows_.push_back({buffer.base - offset, buffer.stride});
    return {&windows_.back(), offset};
  }

  std::vector<std::vector<uint64_t>> puts_;
  std::deque<ncclWindow_vidmem> windows_;
};

}  // namespace cuda
}  // namespace jaxcomm
