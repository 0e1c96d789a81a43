// Collective operations of the threads of a block.
#pragma once

#include "portable.h"

namespace jaxcomm {
namespace device {

constexpr int kBlockSumParts = 32;

// Bytes of shared memory that BlockSum needs in blocks of `num_threads` threads.
JAXCOMM_BOTH constexpr int64_t BlockSumBytes(int64_t num_threads) {
  return (num_threads + kBlockSumParts) * static_cast<int64_t>(sizeof(float));
}

}  // namespace device
}  // namespace jaxcomm

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace device {

// Returns the sum of `value` over the threads of a block to all of them. Called by all threads of the block. The order
// of summation depends only on the number of threads, so equal values give the same bits in every block and on every
// rank. `shared`: BlockSumBytes() of the block's shared memory. No other code may use it between the first call and a
// __syncthreads() after the last call. The call orders memory accesses of the block as __syncthreads() does.
JAXCOMM_DEVICE float BlockSum(float value, float* shared) {
  const auto thread = static_cast<int>(threadIdx.x);
  const auto num_threads = static_cast<int>(blockDim.x);
  const int num_parts = num_threads < kBlockSumParts ? num_threads : kBlockSumParts;
  float* const parts =
      shared + num_threads;  // written only after all threads have left the last loop of the previous call
  shared[thread] = value;
  __syncthreads();
  if (thread < num_parts) {
    float part = shared[thread];
    for (int i = thread + num_parts; i < num_threads; i += num_parts) part += shared[i];
    parts[thread] = part;
  }
  __syncthreads();
  float sum = parts[0];
  for (int i = 1; i < num_parts; ++i) sum += parts[i];
  return sum;
}

}  // namespace device
}  // namespace jaxcomm
#endif
