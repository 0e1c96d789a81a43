// What the network between nodes is to a kernel that uses GIN. Plain data without NCCL's types, which come with names
// of their own for the whole program.
#pragma once

#include <cstdint>

#include "include/jaxcomm/comm.h"
#include "plan/plan.h"

namespace jaxcomm {
namespace cuda {

// A buffer in memory that NCCL has registered: the same bytes of a window at every rank.
struct GinBuffer {
  void* window = nullptr;  // ncclWindow_t
  int64_t offset = 0;
};

// Signals of GIN are counted where they arrive, by NCCL. Counts go on from kernel to kernel, as those of device::Comm.
struct GinNetworkArgs {
  // All ranks are its `local`. Of the signals only `received` is used: [channel][sender], of this rank alone.
  device::Comm comm;
  uint64_t* puts = nullptr;  // [channel], of this rank alone
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

}  // namespace cuda
}  // namespace jaxcomm
