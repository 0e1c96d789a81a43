// Steps between nodes by GIN, NCCL's puts from a kernel. NCCL's headers, or the tests' fake of them, must be included
// before this file.
//
// A channel puts and signals on one context. A strong signal arrives after all earlier puts to the same rank on the
// same context, as the plan requires. A weak signal does not. Signals and counters are never reset: jaxcomm compares
// them with counts of its own, which also begin at zero. ChannelExecutor ensures that an aborted channel neither puts
// nor signals.
//
// NCCL's own waits, including flush, have no deadline. So every put raises a counter once its source has been read, and
// this file polls signals and counters in its own loops. One unbounded wait remains: a put or signal waits in NCCL's
// code while NCCL's queue is full and the network takes nothing out of it. Programs never have that many operations
// outstanding (packing.h).
#pragma once

#include "cuda/kernels/executor.cuh"
#include "cuda/program/gin_args.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace cuda {

class GinNetwork {
 public:
  JAXCOMM_DEVICE GinNetwork(const GinNetworkArgs& args, const ncclDevComm& nccl_comm)
      : args_(args), nccl_comm_(nccl_comm) {}

  // The warps issue the puts of a step in turn, with one thread each. In NCCL's code, threads wait for each other's
  // entries in a queue. Threads of one warp could do so forever.
  JAXCOMM_DEVICE void Put(int32_t channel, int32_t number, const Place& to, int64_t to_offset, const Place& from,
                          int64_t from_offset, int64_t bytes) const {
    const unsigned num_warps = (blockDim.x + warpSize - 1) / warpSize;
    if (threadIdx.x == number % num_warps * warpSize) {
      PutByThread(channel, to.rank, args_.BufferOf(to), to_offset, args_.BufferOf(from), from_offset, bytes);
    }
    if (threadIdx.x == 0) ++args_.puts[channel];
  }

  // The calling thread need not be the one that issued the earlier puts: a __syncthreads() separates them. System
  // scope: the signal also covers accesses by other GPUs of the node.
  JAXCOMM_DEVICE_CALLED void Signal(int32_t channel, int32_t peer) const {
    ContextOf(channel).signal(ncclTeamWorld(nccl_comm_), peer,
                              ncclGin_StrongSignalInc{SignalFrom(channel, args_.comm.local.rank)}, ncclCoopThread{},
                              ncclGin_None{}, ::cuda::thread_scope_thread, ::cuda::thread_scope_system);
  }

  JAXCOMM_DEVICE_CALLED bool Wait(int32_t channel, int32_t peer, int32_t origin) const {
    uint64_t& received = args_.comm.signals.received[device::Row(args_.comm, channel) + peer];
    const uint64_t expected = received + 1;
    const ncclGin gin = ContextOf(channel);
    const ncclGinSignal_t signal = SignalFrom(channel, peer);
    if (!device::WaitUntil(args_.comm, channel, peer, origin, expected, [&] { return gin.readSignal(signal); })) {
      return false;
    }
    received = expected;
    return true;
  }

  JAXCOMM_DEVICE_CALLED bool Flush(int32_t channel) const {
    if (threadIdx.x != 0) return true;
    const ncclGin gin = ContextOf(channel);
    return device::WaitUntil(args_.comm, channel, args_.comm.local.rank, kFlush, args_.puts[channel],
                             [&] { return gin.readCounter(CounterOf(channel)); });
  }

 private:
  JAXCOMM_DEVICE_CALLED void PutByThread(int32_t channel, int32_t peer, const GinBuffer& to, int64_t to_offset,
                                         const GinBuffer& from, int64_t from_offset, int64_t bytes) const {
    // System scope: other GPUs of the node may have written the data.
    ContextOf(channel).put(ncclTeamWorld(nccl_comm_), peer, static_cast<ncclWindow_t>(to.window), to.offset + to_offset,
                           static_cast<ncclWindow_t>(from.window), from.offset + from_offset, bytes, ncclGin_None{},
                           ncclGin_WeakCounterInc{CounterOf(channel)}, ncclCoopThread{}, ncclGin_None{},
                           ::cuda::thread_scope_thread, ::cuda::thread_scope_system);
  }

  // The same on all ranks. Several channels may share a context.
  JAXCOMM_DEVICE ncclGin ContextOf(int32_t channel) const {
    return ncclGin(nccl_comm_, channel % static_cast<int32_t>(nccl_comm_.ginContextCount));
  }
  JAXCOMM_DEVICE ncclGinSignal_t SignalFrom(int32_t channel, int32_t sender) const {
    return static_cast<ncclGinSignal_t>(device::Row(args_.comm, channel) + sender);
  }
  JAXCOMM_DEVICE static ncclGinCounter_t CounterOf(int32_t channel) { return static_cast<ncclGinCounter_t>(channel); }

  const GinNetworkArgs& args_;
  const ncclDevComm& nccl_comm_;
};

}  // namespace cuda
}  // namespace jaxcomm
#endif
