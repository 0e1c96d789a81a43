// Further ways to signal and to wait: without waiting, for any of several counters, and with values.
#pragma once

#include "comm.h"
#include "sync.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace device {

// As Wait, but returns false at once if the signals are not there, or if the channel has aborted. A loop of such calls
// must end if MustStop returns true.
JAXCOMM_DEVICE bool TryWait(const Comm& comm, Channel channel, int32_t peer, uint64_t count = 1) {
  if (IsChannelAborted(comm, channel.index)) return false;
  const int64_t row = Row(comm, channel);
  const uint64_t expected = comm.signals.received[row + peer] + count;
  if (LoadAcquire(comm.signals.pad.At<uint64_t>(comm.local.rank) + row + peer) < expected) return false;
  comm.signals.received[row + peer] = expected;
  return true;
}

// The history of a loop of polls.
struct Polls {
  int32_t num = 0;
  uint64_t begin_ns = 0;  // of the first one
};

// Called after a poll that found nothing, by the thread that polls. Returns true if the loop must end, for the reasons
// for which Wait returns false. `peer` and `step` are for the report.
JAXCOMM_DEVICE bool MustStop(const Comm& comm, Channel channel, int32_t peer, int32_t step, Polls* polls) {
  if (IsChannelAborted(comm, channel.index)) return true;
  if (polls->num == 0) polls->begin_ns = NowNs();
  Pause();
  if (++polls->num % kPollsBetweenClockReads != 0) return false;
  const int64_t row = Row(comm, channel);
  const uint64_t seen = LoadAcquire(comm.signals.pad.At<uint64_t>(comm.local.rank) + row + peer);
  return EndWait(comm, channel.index, polls->begin_ns, peer, step, comm.signals.received[row + peer] + 1, seen);
}

// A counter of a channel: signals with `tag` from `peer`.
struct Source {
  int32_t peer = 0;
  int32_t tag = 0;
};

// Waits until one of source(0) .. source(num - 1) has signalled, as Wait does, and returns its number. Returns -1 where
// Wait returns false. The search begins with number `first`, so that a caller can take the sources in turn. Called by
// one thread for these sources.
template <typename Sources>
JAXCOMM_DEVICE int32_t WaitAny(const Comm& comm, int32_t channel, int32_t num, Sources source, int32_t step = 0,
                               int32_t first = 0) {
  Polls polls;
  for (;;) {
    for (int32_t k = 0; k < num; ++k) {
      const int32_t i = first + k < num ? first + k : first + k - num;
      const Source from = source(i);
      if (TryWait(comm, {channel, from.tag}, from.peer)) return i;
    }
    const Source missing = source(first);
    if (MustStop(comm, {channel, missing.tag}, missing.peer, step, &polls)) return -1;
  }
}

// Sets a counter of `peer` to `value`, which is not less than the value before. Release, as Signal. A tag has either
// values or counts: Wait, TryWait and WaitAny would mistake a value for a count. Values outlive the kernel, as counts
// do.
JAXCOMM_DEVICE void SignalSet(const Comm& comm, Channel channel, int32_t peer, uint64_t value) {
  if (IsChannelAborted(comm, channel.index)) return;
  StoreRelease(comm.signals.pad.At<uint64_t>(peer) + Row(comm, channel) + comm.local.rank, value);
}

// Waits until the value that `peer` has set is at least `least`, and returns it in `value`: the newest one that this
// thread sees. Acquire, and false as Wait.
JAXCOMM_DEVICE bool WaitValue(const Comm& comm, Channel channel, int32_t peer, uint64_t least, uint64_t* value,
                              int32_t step = 0) {
  if (IsChannelAborted(comm, channel.index)) return false;
  const uint64_t* word = comm.signals.pad.At<uint64_t>(comm.local.rank) + Row(comm, channel) + peer;
  return WaitUntil(comm, channel.index, peer, step, least, [&] { return *value = LoadAcquire(word); });
}

}  // namespace device
}  // namespace jaxcomm
#endif
