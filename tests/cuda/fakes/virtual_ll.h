// LL calls among virtual ranks, with the counters of a VirtualRanks: the kernel arguments of consecutive calls.
#pragma once

#include <vector>

#include "../../../ffi/cuda/kernels/ll.cuh"
#include "../../../ffi/cuda/program/call_program.h"
#include "virtual_ranks.h"
#if defined(__CUDACC__)
#include "../../../ffi/cuda/kernels/launch.h"  // kThreads
#endif

namespace jaxcomm {
namespace cuda {

// One of several consecutive calls on the same counters and slots: an LL call or a plan.
struct MixedCall {
  const LlArgs* ll = nullptr;  // by rank
  const RankArgs* planned = nullptr;
  const PeerNetworkArgs* network = nullptr;
  int32_t num_channels = 0;
};

#if JAXCOMM_HAS_DEVICE
// The work of a thread block in a call.
JAXCOMM_DEVICE void RunMixed(const MixedCall& call, int32_t rank, int32_t channel) {
  if (channel >= call.num_channels) return;
  if (call.ll != nullptr) {
    LlCall ll(call.ll[rank], channel);
    return ll.Run();
  }
  PeerNetwork network(call.network[rank]);
  ChannelExecutor<PeerNetwork> executor(call.planned[rank], network, channel);
  executor.Run();
}
#endif

#if defined(__CUDACC__)
// blockIdx.y is the rank. Runs all calls `repetitions` times.
__global__ void __launch_bounds__(kThreads, 1)
    RunCalls(const MixedCall* calls, int32_t num_calls, int32_t repetitions) {
  for (int32_t i = 0; i < num_calls * repetitions; ++i) {
    RunMixed(calls[i % num_calls], static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(blockIdx.x));
    __syncthreads();
  }
}
#endif

struct LlBuffers {
  MixedCall call;
  LlArgs* args = nullptr;              // of the call
  std::vector<char*> inputs, outputs;  // by rank
};

// Buffers that end with the data, at an address `shift` bytes after a multiple of 16.
inline LlBuffers PrepareLl(Memory& memory, const VirtualRanks& ranks, const VirtualSlots& slots, const Request& request,
                           ContiguousCounts contiguous, Operation operation, int32_t num_channels, int64_t shift,
                           bool two_shot = false) {
  LlBuffers made;
  std::vector<LlArgs> args;
  for (int32_t r = 0; r < ranks.n(); ++r) {
    LlArgs own = MakeLlArgs(request, contiguous, operation, num_channels, two_shot);
    const int64_t item = ItemBytes(operation.dtype);
    made.inputs.push_back(memory.Take(InputCount(request) * item + shift) + shift);
    made.outputs.push_back(memory.Take(OutputCount(request) * item + shift) + shift);
    own.comm = ranks.CommOfNode(r);
    own.comm.ll_slots = slots.Of(r);
    args.push_back(WithBuffers(own, made.inputs[r], made.outputs[r]));
  }
  made.args = memory.Upload(args);
  made.call = {made.args, nullptr, nullptr, num_channels};
  return made;
}

}  // namespace cuda
}  // namespace jaxcomm
