// Threads of a block that execute a function of the device API together: all of them, or those of a warp.
#pragma once

#include "portable.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace device {

#if defined(__CUDACC__)
constexpr int32_t kWarpThreads = 32;
#else
constexpr int32_t kWarpThreads = emulation::kWarpThreads;
#endif

// The calling thread's number among the threads that call together, and how many there are.
struct Threads {
  int32_t rank = 0;
  int32_t size = 1;
};

JAXCOMM_DEVICE Threads OfBlock() { return {static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x)}; }

// The last warp of a block may have fewer than kWarpThreads threads.
JAXCOMM_DEVICE Threads OfWarp() {
  const Threads block = OfBlock();
  const int32_t first = block.rank / kWarpThreads * kWarpThreads;
  const int32_t left = block.size - first;
  return {block.rank - first, left < kWarpThreads ? left : kWarpThreads};
}

}  // namespace device
}  // namespace jaxcomm
#endif
