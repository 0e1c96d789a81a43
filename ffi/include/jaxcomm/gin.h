// Puts and signals to ranks of other nodes by GIN, NCCL's puts from a kernel. Compile a kernel with the headers of the
// NCCL for which jaxcomm was built: host::Setup::UseGin.
//
// A channel puts and signals on one context of GIN. A strong signal arrives after all earlier puts to the same rank on
// the same context. Signals and counters are never reset: they are compared with counts that also begin at zero.
//
// NCCL's own waits, including flush, have no deadline. So every put raises a counter once its source has been read, and
// this file polls signals and counters in its own loops. One unbounded wait remains: a put or signal waits in NCCL's
// code while NCCL's queue is full and the network takes nothing out of it. A channel that has at most kMostEntries in
// the queue to each rank does not fill it. Put sees to that if each put has at most 1 GiB and one signal behind it. A
// kernel with more signals leaves at most kMostUnanswered of them without an answer of the peer: a signal that the peer
// sends once it has waited for them.
#pragma once

#include "comm.h"
#include "sync.h"

#if defined(__CUDACC__)
#include <nccl_device.h>
#if NCCL_VERSION_CODE < 23000  // all signals are strong, and all increments of counters weak
using ncclGin_StrongSignalInc = ncclGin_SignalInc;
using ncclGin_WeakCounterInc = ncclGin_CounterInc;
#endif
#endif

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace device {

// The channels of one communicator between nodes. Channel c of a rank communicates with channel c of other ranks only.
// `peer` is a number in Comm::world, of a rank of another node; rails (RailOf) have the fastest links. One thread of
// the channel calls the functions without a group, except Signal and Wait: one thread per peer.
class Gin {
 public:
  // With a signal in front of each put and one behind the last, these puts have 15 of kMostEntries.
  static constexpr int64_t kMostPuts = kMostPutsUnderWay - 1;
  static constexpr int64_t kMostUnanswered = kMostEntries - kMostPuts - 1;

  // Both arguments must outlive this object.
  JAXCOMM_DEVICE Gin(const GinHandle& handle, const ncclDevComm& nccl_comm) : handle_(handle), nccl_comm_(nccl_comm) {}

  // Puts bytes of this rank's arena into the arena of `peer`. Returns before the source has been read: Flush. The data
  // is visible to a peer that waits for the next Signal. A Sync separates the call from earlier writes of other threads
  // to the source. Waits while kMostPuts puts of the channel are outstanding, and returns false as Flush does.
  JAXCOMM_DEVICE_CALLED bool Put(int32_t channel, int32_t peer, int64_t to_offset, int64_t from_offset,
                                 int64_t bytes) const {
    if (IsChannelAborted(handle_.comm, channel)) return false;
    if (bytes == 0) return true;
    if (!WaitForPuts(channel, kMostPuts - 1)) return false;
    const auto arena = static_cast<ncclWindow_t>(handle_.arena);
    PutBetween(channel, peer, arena, to_offset, arena, from_offset, bytes);
    ++handle_.puts[channel];
    return true;
  }

  // Adds one to the peer's count of signals from this rank. Release: covers the earlier puts of the channel to the
  // peer. A Sync separates the call from puts of other threads. System scope: the signal also covers accesses by other
  // GPUs of the node.
  JAXCOMM_DEVICE_CALLED void Signal(int32_t channel, int32_t peer) const {
    if (IsChannelAborted(handle_.comm, channel)) return;
    ContextOf(channel).signal(ncclTeamWorld(nccl_comm_), peer,
                              ncclGin_StrongSignalInc{SignalFrom(channel, handle_.comm.world.rank)}, ncclCoopThread{},
                              ncclGin_None{}, ::cuda::thread_scope_thread, ::cuda::thread_scope_system);
  }

  // Waits until the count of signals from `peer` is one more than what this rank has waited for. Acquire: the peer's
  // puts before its signal are visible to this thread, and after a Sync to its group. Returns false as device::Wait
  // does.
  JAXCOMM_DEVICE_CALLED bool Wait(int32_t channel, int32_t peer, int32_t step = 0) const {
    if (IsChannelAborted(handle_.comm, channel)) return false;
    uint64_t& received = handle_.comm.signals.received[Row(handle_.comm, channel) + peer];
    const uint64_t expected = received + 1;
    const ncclGin gin = ContextOf(channel);
    const ncclGinSignal_t signal = SignalFrom(channel, peer);
    if (!WaitUntil(handle_.comm, channel, peer, step, expected, [&] { return gin.readSignal(signal); })) return false;
    received = expected;
    return true;
  }

  // The same, called by all threads of a group. The peer's puts are visible to all of them. Returns false to all.
  JAXCOMM_DEVICE bool Wait(int32_t channel, int32_t peer, const ThreadGroup& threads, int32_t step = 0) const {
    return !AnyOf(threads, threads.rank == 0 && !Wait(channel, peer, step));
  }

  // Waits until the network has read the sources of all puts of the channel, which may then be overwritten. The data
  // need not have arrived. Returns false if that took longer than Comm::timeout_ns, or if the host or another block of
  // this rank has aborted. The channel has then aborted.
  JAXCOMM_DEVICE_CALLED bool Flush(int32_t channel) const {
    return !IsChannelAborted(handle_.comm, channel) && WaitForPuts(channel, 0);
  }

  // The same, called by all threads of a group. Returns false to all.
  JAXCOMM_DEVICE bool Flush(int32_t channel, const ThreadGroup& threads) const {
    return !AnyOf(threads, threads.rank == 0 && !Flush(channel));
  }

 protected:
  // Waits until at most `most` puts of the channel are outstanding. The report names this rank as the peer.
  JAXCOMM_DEVICE bool WaitForPuts(int32_t channel, uint64_t most) const {
    const uint64_t puts = handle_.puts[channel];
    if (puts <= most) return true;
    const ncclGin gin = ContextOf(channel);
    return WaitUntil(handle_.comm, channel, handle_.comm.world.rank, kFlushStep, puts - most,
                     [&] { return gin.readCounter(CounterOf(channel)); });
  }

  // A put that is neither counted nor waited for. Windows are registered with NCCL.
  JAXCOMM_DEVICE void PutBetween(int32_t channel, int32_t peer, ncclWindow_t to, int64_t to_offset, ncclWindow_t from,
                                 int64_t from_offset, int64_t bytes) const {
    // System scope: other GPUs of the node may have written the data.
    ContextOf(channel).put(ncclTeamWorld(nccl_comm_), peer, to, to_offset, from, from_offset, bytes, ncclGin_None{},
                           ncclGin_WeakCounterInc{CounterOf(channel)}, ncclCoopThread{}, ncclGin_None{},
                           ::cuda::thread_scope_thread, ::cuda::thread_scope_system);
  }

  const GinHandle& handle_;

 private:
  // The same on all ranks. Several channels may share a context.
  JAXCOMM_DEVICE ncclGin ContextOf(int32_t channel) const {
    return ncclGin(nccl_comm_, channel % static_cast<int32_t>(nccl_comm_.ginContextCount));
  }
  JAXCOMM_DEVICE ncclGinSignal_t SignalFrom(int32_t channel, int32_t sender) const {
    return static_cast<ncclGinSignal_t>(Row(handle_.comm, channel) + sender);
  }
  JAXCOMM_DEVICE static ncclGinCounter_t CounterOf(int32_t channel) { return static_cast<ncclGinCounter_t>(channel); }

  const ncclDevComm& nccl_comm_;
};

}  // namespace device
}  // namespace jaxcomm
#endif
