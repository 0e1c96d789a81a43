// Signals, waits and barriers between the ranks of a node.
//
// A channel is one thread block of every rank: block c of a rank talks to block c of its peers and to no other. Two
// kernels that may run at the same time on one communicator must use different channels.
#pragma once

#include "comm.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace device {

// Where the counters of a channel begin.
JAXCOMM_DEVICE int64_t Row(const Comm& comm, int32_t channel) {
  return static_cast<int64_t>(channel) * comm.local.size;
}

// Kernels that begin later on this GPU end at once, on every communicator of the process: see IsAborted.
JAXCOMM_DEVICE void SetAbortFlag(const Comm& comm) { StoreRelease(comm.abort_flag, 1); }

// A channel that has aborted neither signals nor waits ever again: peers, which may still wait for a signal that it
// owes them, would take the first one of the next kernel for that. Kept as the count of what the rank has received from
// itself, which is of no other use. And nothing comes after the kernel.
JAXCOMM_DEVICE void AbortChannel(const Comm& comm, int32_t channel) {
  StoreRelaxed(comm.signals.received + Row(comm, channel) + comm.local.rank, 1);
  SetAbortFlag(comm);
}

JAXCOMM_DEVICE bool IsChannelAborted(const Comm& comm, int32_t channel) {
  return LoadRelaxed(comm.signals.received + Row(comm, channel) + comm.local.rank) != 0;
}

// Whether a kernel of this process has aborted on this GPU. Called by all threads of a block, before the kernel
// writes to memory that peers read: a peer of the kernel that aborted may be late, and still read what that has left
// there. True: the kernel must end. Its operands may be of a kernel that aborted, and its results have no meaning
// either.
JAXCOMM_DEVICE bool IsAborted(const Comm& comm) {
  return __syncthreads_or(threadIdx.x == 0 && LoadAcquire(comm.abort_flag) != 0) != 0;
}

// Adds one to the count of signals from this rank to `peer`. Called by one thread per peer. Release: whoever waits for
// it sees what this thread did before, and what its block did before a __syncthreads() in front of the call.
JAXCOMM_DEVICE void Signal(const Comm& comm, int32_t channel, int32_t peer) {
  if (IsChannelAborted(comm, channel)) return;
  const int64_t row = Row(comm, channel);
  const uint64_t count = comm.signals.sent[row + peer] + 1;
  StoreRelease(comm.signals.pad.At<uint64_t>(peer) + row + comm.local.rank, count);
  comm.signals.sent[row + peer] = count;  // after it: a release waits for the stores before
}

// Reports to the host why this kernel aborts. The first report counts.
JAXCOMM_DEVICE void Fail(const Comm& comm, int32_t channel, int32_t peer, int32_t step, uint64_t expected,
                         uint64_t seen) {
  Report& report = *comm.report;
  if (!Claim(&report.state, Report::kNone, Report::kClaimed)) return;
  report.call_id = comm.call_id;
  report.channel = channel;
  report.step = step;
  report.rank = comm.world.rank;
  report.peer = comm.local.World(peer);
  report.expected = expected;
  report.seen = seen;
  report.time_ns = NowNs();
  StoreRelease(&report.state, Report::kComplete);
}

// Looks at what a thread waits for, between two looks at the clock.
constexpr int kLooksBetweenClocks = 64;

// Asked by a thread that has waited since `begin_ns`. False: go on. True: Comm::timeout_ns are over, which the host has
// been told, or the host or another block of this rank has aborted. Then the channel has aborted.
JAXCOMM_DEVICE bool EndWait(const Comm& comm, int32_t channel, uint64_t begin_ns, int32_t peer, int32_t step,
                            uint64_t expected, uint64_t seen) {
  const bool stop = LoadAcquire(&comm.report->abort) != 0 || LoadAcquire(&comm.report->state) != Report::kNone;
  if (!stop && NowNs() - begin_ns < comm.timeout_ns) return false;
  if (!stop) Fail(comm, channel, peer, step, expected, seen);
  AbortChannel(comm, channel);
  return true;
}

// Waits until `read()` is at least `expected`. False if that took longer than Comm::timeout_ns, or if the host or
// another block of this rank has aborted; then the channel has aborted. `peer` and `step` are for the report.
template <typename Read>
JAXCOMM_DEVICE bool WaitUntil(const Comm& comm, int32_t channel, int32_t peer, int32_t step, uint64_t expected,
                              Read read) {
  uint64_t seen = read();
  if (seen >= expected) return true;
  const uint64_t begin = NowNs();
  for (;;) {
    for (int i = 0; i < kLooksBetweenClocks && seen < expected; ++i) {
      Pause();
      seen = read();
    }
    if (seen >= expected) return true;
    if (EndWait(comm, channel, begin, peer, step, expected, seen)) return false;
  }
}

// Waits until `peer` has signalled once more than this rank has waited for it. Called by one thread per peer. Acquire:
// what the peer did before its signal is visible to this thread, and after a __syncthreads() to its block. False as
// WaitUntil: then nothing may be concluded about the peer. `step` is for the report.
JAXCOMM_DEVICE bool Wait(const Comm& comm, int32_t channel, int32_t peer, int32_t step = 0) {
  if (IsChannelAborted(comm, channel)) return false;
  const int64_t row = Row(comm, channel);
  const uint64_t expected = comm.signals.received[row + peer] + 1;
  const uint64_t* word = comm.signals.pad.At<uint64_t>(comm.local.rank) + row + peer;
  if (!WaitUntil(comm, channel, peer, step, expected, [&] { return LoadAcquire(word); })) return false;
  comm.signals.received[row + peer] = expected;
  return true;
}

// All blocks `channel` of the node's ranks have come here. Called by all threads of the block. Acquire and release.
JAXCOMM_DEVICE bool Barrier(const Comm& comm, int32_t channel, int32_t step = 0) {
  __syncthreads();
  bool reached = true;
  const auto num_threads = static_cast<int32_t>(blockDim.x);
  for (auto i = static_cast<int32_t>(threadIdx.x); i < comm.local.size; i += num_threads) {
    if (i != comm.local.rank) Signal(comm, channel, i);
  }
  for (auto i = static_cast<int32_t>(threadIdx.x); i < comm.local.size && reached; i += num_threads) {
    if (i != comm.local.rank) reached = Wait(comm, channel, i, step);
  }
  return __syncthreads_or(!reached) == 0;
}

}  // namespace device
}  // namespace jaxcomm
#endif
