// Arguments of kernels that use GIN between nodes. Plain data without NCCL's types, because NCCL's headers bring names
// of their own into the whole program.
#pragma once

#include <cstdint>

#include "include/jaxcomm/comm.h"
#include "plan/plan.h"

namespace jaxcomm::cuda {

// A buffer in memory registered with NCCL: the same offset in a window on every rank.
struct GinBuffer {
  void* window = nullptr;  // ncclWindow_t
  int64_t offset = 0;
};

// NCCL counts GIN signals at the receiver. Like those of device::Comm, counts continue from kernel to kernel.
struct GinNetworkArgs : device::GinHandle {
  GinBuffer input;
  GinBuffer output;
  GinBuffer scratch;

  JAXCOMM_BOTH const GinBuffer& BufferOf(const Place& place) const {
    return place.space == Space::kInput ? input : place.space == Space::kOutput ? output : scratch;
  }
};

// One signal per channel and sender, one counter per channel.
constexpr int32_t NumGinSignals(int32_t num_channels, int32_t num_ranks) { return num_channels * num_ranks; }
constexpr int32_t NumGinCounters(int32_t num_channels) { return num_channels; }

}  // namespace jaxcomm::cuda
