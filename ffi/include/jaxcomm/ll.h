// Messages that carry their own flags: for a few kilobytes, where a barrier would cost more than the data.
//
// A message is a row of units: 8 bytes of payload with a flag in each half. Halves arrive whole, so a receiver that
// sees both flags has the payload, and needs no signal. In an exchange on a channel, every rank of the node sends at
// least one unit to every other, and waits for at least one of each. The flag is the number of the exchange, the epoch.
//
// Slots are used again without a signal that says so. There are two sets, for even and odd epochs. Proof that this is
// enough: a rank writes to a receiver's slots of epoch e once it has finished epoch e - 1. So it had a unit of epoch e
// - 1 from that receiver, which therefore had begun epoch e - 1, and so finished e - 2, the last to use these slots.
//
// Field's name: LL, low latency. Source: NVIDIA/nccl:src/device/prims_ll.h.
#pragma once

#include "sync.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace device {

// A unit on its way: half of the payload and the flag, twice.
struct alignas(16) LlLine {
  uint64_t halves[2];
};

JAXCOMM_DEVICE void StoreLl(LlLine* slot, uint64_t payload, uint32_t flag) {
  const uint64_t high = uint64_t{flag} << 32;
  StorePair(slot->halves, (payload & 0xffffffff) | high, (payload >> 32) | high);
}

// An exchange that has begun. The same in all threads of the block.
struct LlExchange {
  int32_t channel = 0;
  uint64_t epoch = 0;

  JAXCOMM_DEVICE uint32_t flag() const { return static_cast<uint32_t>(epoch); }
};

// A unit of a message, and who sends it.
struct LlUnit {
  int32_t peer;
  int32_t unit;  // below LlSlots::num_units
};

// Where a unit arrives at `receiver`.
JAXCOMM_DEVICE LlLine* SlotOf(const Comm& comm, const LlExchange& exchange, int32_t receiver, LlUnit unit) {
  const int64_t half = 2 * int64_t{exchange.channel} + static_cast<int64_t>(exchange.epoch % 2);
  const int64_t row = half * comm.local.size + unit.peer;
  return comm.ll_slots.pad.At<LlLine>(receiver) + row * comm.ll_slots.num_units + unit.unit;
}

// Flags are the lower half of epochs, and come again after 2^32 exchanges. So that none is left from then, all slots
// are overwritten in two of every 2^30 exchanges, by flags that nobody waits for any more.
constexpr uint64_t kExchangesBetweenSweeps = uint64_t{1} << 30;

JAXCOMM_DEVICE bool IsSwept(uint64_t epoch) {
  return (epoch % kExchangesBetweenSweeps) / 2 == kExchangesBetweenSweeps / 4;
}

// Begins the channel's next exchange. Called by all threads of the block. False: the kernel must end, see IsAborted.
JAXCOMM_DEVICE bool BeginLlExchange(const Comm& comm, int32_t channel, LlExchange* exchange) {
  if (IsAborted(comm)) return false;
  exchange->channel = channel;
  exchange->epoch = LoadRelaxed(comm.ll_slots.epochs + channel) + 1;
  if (!IsSwept(exchange->epoch)) return true;
  for (int32_t peer = 0; peer < comm.local.size; ++peer) {
    for (auto unit = static_cast<int32_t>(threadIdx.x); unit < comm.ll_slots.num_units;
         unit += static_cast<int32_t>(blockDim.x)) {
      if (peer == comm.local.rank) break;
      StoreLl(SlotOf(comm, *exchange, peer, {comm.local.rank, unit}), 0, exchange->flag() - 2);
    }
  }
  __syncthreads();  // before what is sent
  return true;
}

// Sends a unit to `peer`. Called by one thread per unit and peer.
JAXCOMM_DEVICE void SendUnit(const Comm& comm, const LlExchange& exchange, int32_t peer, int32_t unit,
                             uint64_t payload) {
  StoreLl(SlotOf(comm, exchange, peer, {comm.local.rank, unit}), payload, exchange.flag());
}

// Waits for units(0) .. units(count - 1), with all of these loads under way at once; 1 <= count <= kMost. Called by one
// thread, or by several for units of their own. False if that took longer than Comm::timeout_ns, or if the host or
// another block of this rank has aborted: then the channel has aborted. `step` is for the report.
template <int kMost, typename Units>
JAXCOMM_DEVICE bool ReceiveUnits(const Comm& comm, const LlExchange& exchange, int count, Units units,
                                 uint64_t* payloads, int32_t step = 0) {
  const LlLine* slots[kMost];
  JAXCOMM_UNROLL
  for (int k = 0; k < kMost; ++k) slots[k] = SlotOf(comm, exchange, comm.local.rank, units(k < count ? k : 0));
  uint64_t begin_ns = 0;
  for (int looks = 1;; ++looks) {
    uint64_t first[kMost], second[kMost];
    JAXCOMM_UNROLL
    for (int k = 0; k < kMost; ++k) LoadPair(slots[k]->halves, &first[k], &second[k]);
    int missing = kMost;
    JAXCOMM_UNROLL
    for (int k = 0; k < kMost; ++k) {
      const bool here = (first[k] >> 32) == exchange.flag() && (second[k] >> 32) == exchange.flag();
      payloads[k] = (first[k] & 0xffffffff) | (second[k] << 32);
      if (!here) missing = k;
    }
    if (missing == kMost) return true;
    if (looks == 1) begin_ns = NowNs();
    Pause();
    if (looks % kLooksBetweenClocks != 0) continue;
    // All ranks have taken part in the exchanges before this one, or it would not have begun.
    const int32_t peer = units(missing < count ? missing : 0).peer;
    if (EndWait(comm, exchange.channel, begin_ns, peer, step, exchange.epoch, exchange.epoch - 1)) return false;
  }
}

// Ends an exchange. Called by all threads of the block; `received`: what a thread waited for has come. Returns whether
// that is so for all of them. If not, the results are undefined, and the kernel must end.
JAXCOMM_DEVICE bool EndLlExchange(const Comm& comm, const LlExchange& exchange, bool received) {
  if (__syncthreads_or(!received) != 0) return false;
  if (threadIdx.x == 0) StoreRelaxed(comm.ll_slots.epochs + exchange.channel, exchange.epoch);
  return true;
}

}  // namespace device
}  // namespace jaxcomm
#endif
