// Runs a collective's kernel in the emulation.
#pragma once

#include "../native/check.h"
#include "spoiling.h"
#include "virtual_gin.h"
#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

using TestMemory = HostMemory;

// What every rank brings and what it gets.
struct Data {
  std::vector<Bytes> inputs, outputs;  // by rank
};

inline std::vector<device::Report> Reports(const VirtualRanks& ranks) {
  return {ranks.reports(), ranks.reports() + ranks.n()};
}

template <typename Network>
void RunRank(const VirtualRanks::Call& call, Data& data, Network& network) {
  const unsigned rank = blockIdx.y;
  FillWalkSpoil(call.args[rank], network, {data.inputs[rank].data(), data.outputs[rank].data()});
}

// Ranks of other nodes by GIN, over a network that is as late as it may be, or as if their memory could be addressed.
class TestNetwork {
 public:
  TestNetwork(const VirtualRanks& ranks, int32_t num_channels, bool gin, uint64_t seed)
      : uses_gin_(gin), gin_(ranks.n(), num_channels, seed) {}

  void Run(const VirtualRanks::Call& call, Data& data, unsigned threads, uint64_t seed) {
    const auto num_ranks = static_cast<unsigned>(call.inputs.size());
    const auto num_channels = static_cast<unsigned>(call.num_channels);
    if (uses_gin_) {
      const std::vector<GinNetworkArgs> args = gin_.Args(call);
      gin_.network().Reopen();
      emulation::Launch(num_channels, num_ranks + 1, threads, seed, [&] {
        const unsigned rank = blockIdx.y;
        if (rank == num_ranks) return gin_.Serve();
        const ncclDevComm comm = gin_.CommOf(static_cast<int32_t>(rank));
        GinNetwork network(args[rank], comm);
        RunRank(call, data, network);
        gin_.network().Leave();
      });
      CHECK(gin_.network().empty());
      return;
    }
    emulation::Launch(num_channels, num_ranks, threads, seed, [&] {
      PeerNetwork network(call.network[blockIdx.y]);
      RunRank(call, data, network);
    });
  }

 private:
  const bool uses_gin_;
  VirtualGin gin_;
};

}  // namespace cuda
}  // namespace jaxcomm
