// Runs a collective's kernel in the emulation.
#pragma once

#include <cstring>
#include <functional>

#include "../native/check.h"
#include "two_streams.h"
#include "virtual_gin.h"
#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

using TestMemory = HostMemory;

// What every rank brings and what it gets. Its own threads fill its buffers when the kernel begins, take the result
// when the plan is over and spoil the input: whoever reads or writes too early or too late is found
// out.
struct Data {
  std::vector<Bytes> inputs, outputs;  // by rank
};

inline void Spread(const RankArgs& args, const ChannelProgram& channel, bool input,
                   const std::function<void(int64_t)>& f) {
  const Part& part = input ? channel.input : channel.output;
  Elements elements;
  elements.part = part;
  for (int64_t i = threadIdx.x; i < part.num_blocks * part.count; i += blockDim.x) {
    f(elements.Position(i) * args.item_bytes);
  }
}

inline void RunRank(const VirtualRanks::Call& call, Data& data, const std::function<void()>& run) {
  const auto rank = static_cast<int32_t>(blockIdx.y);
  const RankArgs& args = call.args[rank];
  const ChannelProgram& channel = call.parts[blockIdx.x];
  const int64_t item = args.item_bytes;
  char* const input = call.inputs[rank];
  char* const output = call.outputs[rank];
  Spread(args, channel, true, [&](int64_t at) { std::memcpy(input + at, data.inputs[rank].data() + at, item); });
  Spread(args, channel, false, [&](int64_t at) { std::memset(output + at, 0x5a, item); });
  __syncthreads();
  run();
  __syncthreads();
  Spread(args, channel, false, [&](int64_t at) { std::memcpy(data.outputs[rank].data() + at, output + at, item); });
  Spread(args, channel, true, [&](int64_t at) { std::memset(input + at, 0x77, item); });
}

template <typename Network>
void RunKernel(const VirtualRanks::Call& call, Data& data, Network& network) {
  RunRank(call, data, [&] {
    Walk<Network> walk(call.args[blockIdx.y], network, static_cast<int32_t>(blockIdx.x));
    walk.Run();
  });
}

// The first stream of every rank is a thread block per channel, the second one more.
inline void RunInRounds(const VirtualRanks::Call& call, Data& data, unsigned threads, uint64_t seed) {
  const auto num_ranks = static_cast<unsigned>(call.inputs.size());
  const auto num_channels = static_cast<unsigned>(call.num_channels);
  TwoStreams streams(call);
  emulation::Launch(num_channels + 1, num_ranks, threads, seed, [&] {
    if (blockIdx.x == num_channels) return streams.RunSecond();
    RunRank(call, data, [&] { streams.RunFirst(); });
  });
}

// Ranks of other nodes by GIN, over a network that is as late as it may be, or as if their memory could be addressed.
class TestNetwork {
 public:
  TestNetwork(const VirtualRanks& ranks, int32_t num_channels, bool gin, uint64_t seed)
      : uses_gin_(gin), gin_(ranks.n(), num_channels, seed) {}

  void Run(const VirtualRanks::Call& call, Data& data, unsigned threads, uint64_t seed) {
    const auto num_ranks = static_cast<unsigned>(call.inputs.size());
    const auto num_channels = static_cast<unsigned>(call.num_channels);
    if (!call.rounds.empty()) return RunInRounds(call, data, threads, seed);
    if (uses_gin_) {
      const std::vector<GinNetworkArgs> args = gin_.Args(call);
      gin_.network().Reopen();
      emulation::Launch(num_channels, num_ranks + 1, threads, seed, [&] {
        const unsigned rank = blockIdx.y;
        if (rank == num_ranks) return gin_.Serve();
        const ncclDevComm comm = gin_.CommOf(static_cast<int32_t>(rank));
        GinNetwork network(args[rank], comm);
        RunKernel(call, data, network);
        gin_.network().Leave();
      });
      CHECK(gin_.network().empty());
      return;
    }
    emulation::Launch(num_channels, num_ranks, threads, seed, [&] {
      PeerNetwork network(call.network[blockIdx.y]);
      RunKernel(call, data, network);
    });
  }

 private:
  const bool uses_gin_;
  VirtualGin gin_;
};

}  // namespace cuda
}  // namespace jaxcomm
