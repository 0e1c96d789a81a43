// Steps between nodes by GIN, NCCL's puts from a kernel. NCCL's headers, or the tests' fake of them, must be included
// before this file.
//
// A strong signal arrives after all earlier puts to the same rank on the same context, as the plan requires. A program
// begins without outstanding puts, and flushes before a put or signal that may find NCCL's queue full: kMostEntries.
#pragma once

#include "cuda/kernels/executor.cuh"
#include "cuda/program/gin_args.h"
#include "include/jaxcomm/gin.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

class GinNetwork : device::Gin {
 public:
  static constexpr bool kSharesQueues = true;

  JAXCOMM_DEVICE GinNetwork(const GinNetworkArgs& args, const ncclDevComm& nccl_comm) : Gin(args, nccl_comm) {}

  // The warps issue the puts of a step in turn, with one thread each. In NCCL's code, threads wait for each other's
  // entries in a queue. Threads of one warp could do so forever.
  JAXCOMM_DEVICE void Put(int32_t channel, int32_t number, const Place& to, int64_t to_offset, const Place& from,
                          int64_t from_offset, int64_t bytes) const {
    const unsigned num_warps = (blockDim.x + warpSize - 1) / warpSize;
    if (threadIdx.x == number % num_warps * warpSize) {
      PutByThread(channel, to.rank, args().BufferOf(to), to_offset, args().BufferOf(from), from_offset, bytes);
    }
    if (threadIdx.x == 0) ++args().puts[channel];
  }

  // The calling thread need not be the one that issued the earlier puts: a __syncthreads() separates them.
  using Gin::Signal;

  JAXCOMM_DEVICE bool Wait(int32_t channel, int32_t peer, int32_t origin) const {
    return Gin::Wait(channel, peer, origin);
  }

  JAXCOMM_DEVICE bool Flush(int32_t channel) const { return threadIdx.x != 0 || Gin::Flush(channel); }

 private:
  JAXCOMM_DEVICE_CALLED void PutByThread(int32_t channel, int32_t peer, const GinBuffer& to, int64_t to_offset,
                                         const GinBuffer& from, int64_t from_offset, int64_t bytes) const {
    PutBetween(channel, peer, static_cast<ncclWindow_t>(to.window), to.offset + to_offset,
               static_cast<ncclWindow_t>(from.window), from.offset + from_offset, bytes);
  }

  // The constructor's. A member of its own would take a register.
  JAXCOMM_DEVICE const GinNetworkArgs& args() const { return static_cast<const GinNetworkArgs&>(handle_); }
};

}  // namespace jaxcomm::cuda
#endif
