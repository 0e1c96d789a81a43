// Signals, waits and barriers between the ranks of a node.
//
// A channel is one thread group of every rank, such as a block or a warp: group c of a rank communicates only with
// group c of its peers. Kernels that may run concurrently on one communicator must use different channels.
#pragma once

#include "comm.h"
#include "threads.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace device {

// The index of the first counter of a channel and tag.
JAXCOMM_DEVICE int64_t Row(const Comm& comm, Channel channel) {
  return (static_cast<int64_t>(channel.index) * comm.signals.num_tags + channel.tag) * comm.local.size;
}

// Makes later kernels on this GPU end at once, on every communicator of the process: see IsAborted.
JAXCOMM_DEVICE void SetAbortFlag(const Comm& comm) { StoreRelease(comm.abort_flag, 1); }

// Stops this GPU for the process: nothing that the kernel, or work behind it, has computed can be read any more. Does
// not return on a GPU. The emulation runs the kernel to its end, and its GPU starts no later work.
JAXCOMM_DEVICE void Trap([[maybe_unused]] const Comm& comm) {
#if defined(__CUDACC__)
  while (LoadAcquire(&comm.report->state) != Report::kComplete) {
  }  // the thread that writes the report runs, and the trap must not stop it
  __trap();
#else
  emulation::Trap();
#endif
}

// The state of a channel: its lowest bit says that the channel has aborted, and the other bits are the time at which a
// waiting thread of the channel last read the host's words. It is the count of signals from this rank to itself, with
// tag 0, which has no other use.
JAXCOMM_DEVICE uint64_t* StateOf(const Comm& comm, int32_t channel) {
  return comm.signals.received + Row(comm, channel) + comm.local.rank;
}
constexpr uint64_t kChannelAborted = 1;

// Stops this GPU for the process (Trap), after a report: results that are not complete must not look right. Until CUDA
// has stopped all thread blocks, they must not signal for this channel: a peer may still wait for a signal that this
// rank has not sent, and would take the next one for it. Kernels of other streams do not begin either: see
// SetAbortFlag.
JAXCOMM_DEVICE void AbortChannel(const Comm& comm, int32_t channel) {
  StoreRelaxed(StateOf(comm, channel), kChannelAborted);
  SetAbortFlag(comm);
  Trap(comm);
}

JAXCOMM_DEVICE bool IsChannelAborted(const Comm& comm, int32_t channel) {
  return (LoadRelaxed(StateOf(comm, channel)) & kChannelAborted) != 0;
}

// Whether a kernel of this process has aborted on this GPU. Called by all threads of a block before the kernel writes
// to memory that peers read. The reason: a late peer of the aborted kernel may still read the data that the aborted
// kernel left in that memory. True: the kernel must end. Its operands may come from an aborted kernel, and its results
// are then undefined too.
JAXCOMM_DEVICE bool IsAborted(const Comm& comm) {
  return __syncthreads_or(threadIdx.x == 0 && LoadAcquire(comm.abort_flag) != 0) != 0;
}

// Adds `add` to the count of signals from this rank to `peer`. Called by one thread per peer and tag. Release: a peer
// that waits for the signal sees the earlier writes of this thread, and the writes of its group before a Sync() that
// precedes the call.
JAXCOMM_DEVICE void Signal(const Comm& comm, Channel channel, int32_t peer, uint64_t add = 1) {
  if (IsChannelAborted(comm, channel.index)) return;
  const int64_t row = Row(comm, channel);
  const uint64_t count = comm.signals.sent[row + peer] + add;
  StoreRelease(comm.signals.pad.At<uint64_t>(peer) + row + comm.local.rank, count);
  comm.signals.sent[row + peer] = count;  // after the store above: a release waits for earlier stores
}

// The same, called by all threads of a group. Releases the earlier writes of all of them.
JAXCOMM_DEVICE void Signal(const Comm& comm, Channel channel, int32_t peer, const ThreadGroup& threads,
                           uint64_t add = 1) {
  Sync(threads);
  if (threads.rank == 0) Signal(comm, channel, peer, add);
}

// Tells the host that a call of the communicator begins, or has ended. Called by all threads of all blocks.
JAXCOMM_DEVICE void BeginCall(const Comm& comm) {
  if (comm.num_calls == nullptr || blockIdx.x != 0 || threadIdx.x != 0) return;
  StoreToHost(&comm.report->progress.begun, ++*comm.num_calls << 32 | (comm.call_id & 0xffffffff));
}
JAXCOMM_DEVICE void EndCall(const Comm& comm) {
  if (comm.num_calls == nullptr || blockIdx.x != 0 || threadIdx.x != 0) return;
  StoreToHost(&comm.report->progress.ended, *comm.num_calls);
}

// Reports to the host why this kernel aborts. Only the first report is kept.
JAXCOMM_DEVICE void Fail(const Comm& comm, int32_t channel, int32_t peer, int32_t step, uint64_t expected,
                         uint64_t seen, bool by_host = false) {
  Report& report = *comm.report;
  if (!Claim(&report.claim, 0, 1)) return;
  report.call_id = comm.call_id;
  report.channel = channel;
  report.step = step;
  report.rank = comm.world.rank;
  report.peer = comm.local.World(peer);
  report.by_host = by_host;
  report.expected = expected;
  report.seen = seen;
  report.time_ns = NowNs();
  StoreRelease(&report.state, Report::kComplete);
}

// Polls of a thread between two reads of the clock.
constexpr int kPollsBetweenClockReads = 64;

// Time between two reads of the host's words by the waiting threads of a channel. Such a read passes PCIe, which takes
// about a microsecond, and an LL call has up to 4,096 waiting threads. With 128 channels there are 3 reads per
// microsecond.
constexpr uint64_t kHostReadIntervalNs = 50'000;

// Called by a thread that has waited since `begin_ns`. Returns false if the wait goes on. Returns true if
// Comm::timeout_ns have passed or if the host has set Report::abort, both of which it reports, or if another block of
// this rank has aborted. The channel has then aborted; on a GPU, the kernel does not run on. One thread of the channel
// at a time reads the host's words; the others learn of an abort from the channel's state, in the memory of the GPU.
JAXCOMM_DEVICE bool EndWait(const Comm& comm, int32_t channel, uint64_t begin_ns, int32_t peer, int32_t step,
                            uint64_t expected, uint64_t seen) {
  uint64_t* const state = StateOf(comm, channel);
  const uint64_t last = LoadRelaxed(state);
  if ((last & kChannelAborted) != 0) return true;
  const uint64_t now = NowNs();
  const bool late = now - begin_ns >= comm.timeout_ns;
  const bool reads = now - last >= kHostReadIntervalNs && Claim(state, last, now & ~kChannelAborted);
  if (!late && !reads) return false;
  if (comm.num_calls != nullptr) {
    Progress& progress = comm.report->progress;
    StoreToHost(&progress.waits_for, static_cast<uint64_t>(comm.local.World(peer)) << 32 | static_cast<uint32_t>(step));
    StoreToHost(&progress.waits_ns, now);
  }
  const bool reported = LoadAcquire(&comm.report->state) != Report::kNone;
  const bool by_host = LoadAcquire(&comm.report->abort) != 0;
  if (!late && !reported && !by_host) return false;
  if (!reported) Fail(comm, channel, peer, step, expected, seen, by_host);
  AbortChannel(comm, channel);
  return true;
}

// Waits until `read()` is at least `expected`. Returns false if the wait took longer than Comm::timeout_ns, or if the
// host or another block of this rank has aborted. The channel has then aborted. `peer` and `step` are for the report.
template <typename Read>
JAXCOMM_DEVICE bool WaitUntil(const Comm& comm, int32_t channel, int32_t peer, int32_t step, uint64_t expected,
                              Read read) {
  uint64_t seen = read();
  if (seen >= expected) return true;
  const uint64_t begin = NowNs();
  for (;;) {
    for (int i = 0; i < kPollsBetweenClockReads && seen < expected; ++i) {
      Pause();
      seen = read();
    }
    if (seen >= expected) return true;
    if (EndWait(comm, channel, begin, peer, step, expected, seen)) return false;
  }
}

// Waits until the count of signals from `peer` is `count` more than what this rank has waited for. Called by one thread
// per peer and tag. Acquire: the peer's writes before its signals are visible to this thread, and after a Sync() to its
// group. Returns false as WaitUntil does; the caller can then assume nothing about the peer. `step` is for the report.
JAXCOMM_DEVICE bool Wait(const Comm& comm, Channel channel, int32_t peer, int32_t step = 0, uint64_t count = 1) {
  if (IsChannelAborted(comm, channel.index)) return false;
  const int64_t row = Row(comm, channel);
  const uint64_t expected = comm.signals.received[row + peer] + count;
  const uint64_t* word = comm.signals.pad.At<uint64_t>(comm.local.rank) + row + peer;
  if (!WaitUntil(comm, channel.index, peer, step, expected, [&] { return LoadAcquire(word); })) return false;
  comm.signals.received[row + peer] = expected;
  return true;
}

// The same, called by all threads of a group. The peer's writes are visible to all of them. Returns false to all.
JAXCOMM_DEVICE bool Wait(const Comm& comm, Channel channel, int32_t peer, const ThreadGroup& threads, int32_t step = 0,
                         uint64_t count = 1) {
  return !AnyOf(threads, threads.rank == 0 && !Wait(comm, channel, peer, step, count));
}

// Waits until group `channel` of every rank of the node has reached the barrier. Called by all threads of the group.
// Acquire and release, also between accesses to a Multicast and accesses to the same memory at other addresses. Returns
// false as Wait does.
JAXCOMM_DEVICE bool Barrier(const Comm& comm, Channel channel, int32_t step = 0,
                            const ThreadGroup& threads = OfBlock()) {
  FenceAliases();
  Sync(threads);
  bool reached = true;
  for (int32_t i = threads.rank; i < comm.local.size; i += threads.size) {
    if (i != comm.local.rank) Signal(comm, channel, i);
  }
  for (int32_t i = threads.rank; i < comm.local.size && reached; i += threads.size) {
    if (i != comm.local.rank) reached = Wait(comm, channel, i, step);
  }
  const bool all_reached = !AnyOf(threads, !reached);
  FenceAliases();
  return all_reached;
}

}  // namespace device
}  // namespace jaxcomm
#endif
