// Runs a collective's kernel in the emulation.
#pragma once

#include "../../check.h"
#include "spoiling.h"
#include "virtual_gin.h"
#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

using TestMemory = HostMemory;

// Same interface as on_gpu.cuh.
inline void PrepareDevice() {}
inline bool HasBulkCopies() { return true; }

// The inputs and outputs of every rank.
struct Data {
  std::vector<Bytes> inputs, outputs;  // by rank
};

inline std::vector<device::Report> Reports(const VirtualRanks& ranks) {
  return {ranks.reports(), ranks.reports() + ranks.n()};
}

template <typename Network>
void RunKernel(const VirtualRanks::Call& call, Data& data, Network& network) {
  const unsigned rank = blockIdx.y;
  FillExecuteSpoil(call.args[rank], network, {data.inputs[rank].data(), data.outputs[rank].data()});
}

// Ranks of other nodes are reached by GIN, over a network with arbitrary delays, or as if their memory were
// addressable.
class TestNetwork {
 public:
  TestNetwork(const VirtualRanks& ranks, int32_t num_channels, bool gin, uint64_t seed)
      : uses_gin_(gin), gin_(ranks.n(), num_channels, seed) {}

  void Run(const VirtualRanks::Call& call, Data& data, unsigned threads, uint64_t seed) {
    const auto num_ranks = static_cast<unsigned>(call.inputs.size());
    const auto num_channels = static_cast<unsigned>(call.num_channels);
    if (uses_gin_) {
      const std::vector<GinNetworkArgs> args = gin_.Args(call);
      const auto run = [&] {
        const ncclDevComm comm = gin_.CommOf(static_cast<int32_t>(blockIdx.y));
        GinNetwork network(args[comm.rank], comm);
        RunKernel(call, data, network);
      };
      gin_.Launch(num_channels, num_ranks, threads, seed, run, call.shared_bytes);
      CHECK(gin_.empty());
      return;
    }
    const auto run = [&] {
      PeerNetwork network(call.network[blockIdx.y]);
      RunKernel(call, data, network);
    };
    emulation::Launch(num_channels, num_ranks, threads, seed, run, call.shared_bytes);
  }

 private:
  const bool uses_gin_;
  VirtualGin gin_;
};

}  // namespace cuda
}  // namespace jaxcomm
