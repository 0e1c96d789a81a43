// Thread groups: the threads of a block that call a function of the device API together.
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

// Threads that can also wait for each other.
struct ThreadGroup : Threads {
  static constexpr int32_t kBlock = 0, kWarp = -1, kThread = -2;
  int32_t barrier = kThread;  // one of the above, or the number of one of the block's named barriers
};

JAXCOMM_DEVICE ThreadGroup OfThread() { return {}; }

JAXCOMM_DEVICE ThreadGroup OfBlock() {
  return {{static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x)}, ThreadGroup::kBlock};
}

// The last warp of a block may have fewer than kWarpThreads threads.
JAXCOMM_DEVICE ThreadGroup OfWarp() {
  const Threads block = OfBlock();
  const int32_t first = block.rank / kWarpThreads * kWarpThreads;
  const int32_t left = block.size - first;
  return {{block.rank - first, left < kWarpThreads ? left : kWarpThreads}, ThreadGroup::kWarp};
}

// The warps first_warp .. first_warp + num_warps - 1 of the block, all of kWarpThreads threads. Called by their threads
// only. `barrier`: 1 .. 15, another number for each group of the block that exists at the same time. The hardware has
// 16 barriers per block, of which __syncthreads() uses number 0.
JAXCOMM_DEVICE ThreadGroup OfWarps(int32_t first_warp, int32_t num_warps, int32_t barrier) {
  return {{OfBlock().rank - first_warp * kWarpThreads, num_warps * kWarpThreads}, barrier};
}

// Returns whether `value` is true in a thread of the group. Called by all threads of the group. Orders their memory
// accesses before the call with those after it, as __syncthreads_or() does for a block.
JAXCOMM_DEVICE bool AnyOf(const ThreadGroup& threads, bool value) {
  if (threads.barrier == ThreadGroup::kBlock) return __syncthreads_or(value) != 0;
  if (threads.barrier == ThreadGroup::kThread) return value;
#if defined(__CUDACC__)
  if (threads.barrier == ThreadGroup::kWarp) {
    const unsigned mask = threads.size == kWarpThreads ? ~0U : (1U << threads.size) - 1;
    const bool any = __any_sync(mask, value) != 0;
    __syncwarp(mask);  // __any_sync orders no memory accesses
    return any;
  }
  uint32_t any;
  asm volatile(
      "{\n\t.reg .pred p, q;\n\tsetp.ne.u32 p, %1, 0;\n\tbarrier.red.or.pred q, %2, %3, p;\n\t"
      "selp.u32 %0, 1, 0, q;\n\t}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(value)), "r"(threads.barrier), "r"(threads.size)
      : "memory");
  return any != 0;
#else
  const bool warp = threads.barrier == ThreadGroup::kWarp;
  return emulation::ArriveGroup(warp ? -1 - OfBlock().rank / kWarpThreads : threads.barrier, threads.size, value) != 0;
#endif
}

// A barrier of the group. Called by all of its threads. Orders memory accesses as __syncthreads() does for a block.
JAXCOMM_DEVICE void Sync(const ThreadGroup& threads) {
  if (threads.barrier == ThreadGroup::kBlock) {
    __syncthreads();
  } else {
    AnyOf(threads, false);
  }
}

}  // namespace device
}  // namespace jaxcomm
#endif
