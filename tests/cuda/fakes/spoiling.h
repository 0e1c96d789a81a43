// The executor of a rank whose own threads fill its buffers when the kernel begins, copy the result when the plan is
// over, and then overwrite the input. A peer that reads or writes too early or too late gets a wrong result.
#pragma once

#include "../../../ffi/cuda/kernels/executor.cuh"

namespace jaxcomm {
namespace cuda {

// Same layout as the rank's input and output.
struct Staged {
  const char* brought = nullptr;
  char* got = nullptr;
};

constexpr char kUnwritten = 0x5a;
constexpr char kSpoiled = 0x77;

// Calls f(byte) for every byte that this thread has of the channel's part of a buffer.
template <typename F>
JAXCOMM_DEVICE void Spread(const RankArgs& args, const ChannelSlice& slice, const F& f) {
  Elements elements;
  elements.slice = slice;
  for (int64_t i = threadIdx.x; i < slice.num_blocks * slice.count; i += blockDim.x) {
    const int64_t at = elements.Position(i) * args.item_bytes;
    for (int64_t byte = at; byte < at + args.item_bytes; ++byte) f(byte);
  }
}

template <typename Network>
JAXCOMM_DEVICE void FillExecuteSpoil(const RankArgs& args, Network& network, const Staged& staged) {
  const ChannelProgram& channel = args.channels[blockIdx.x];
  char* const input = args.input.At(args.comm.local.rank);
  char* const output = args.output.At(args.comm.local.rank);
  Spread(args, channel.input, [&](int64_t byte) { input[byte] = staged.brought[byte]; });
  Spread(args, channel.output, [&](int64_t byte) { output[byte] = kUnwritten; });
  __syncthreads();
  ChannelExecutor<Network>(args, network, static_cast<int32_t>(blockIdx.x), device::DynamicShared()).Run();
  __syncthreads();
  Spread(args, channel.output, [&](int64_t byte) { staged.got[byte] = output[byte]; });
  Spread(args, channel.input, [&](int64_t byte) { input[byte] = kSpoiled; });
}

}  // namespace cuda
}  // namespace jaxcomm
