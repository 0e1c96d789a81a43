// The ranks of a node exchange the addresses of their operands and results, in a kernel before that of the call.
//
// XLA may place a buffer at a new address in every run, different on each rank, and only the rank itself has this
// address. All memory of NCCL's windows lies in one address range per communicator, with the same stride from rank to
// rank (ncclGetLsaPointer). So a rank publishes the offset of its buffer in its window. Every rank adds the place where
// it finds that window itself: XLA's windows are of XLA's communicator, whose address range begins elsewhere on each
// rank.
#pragma once

#include "cuda/program/program.h"
#include "include/jaxcomm/device.h"
#include "plan/row_limits.h"

namespace jaxcomm::cuda {

// A buffer of a rank in one run, in bytes.
struct BufferPlace {
  int64_t in_window = 0;  // the other ranks get this
  int64_t window_at = 0;  // of the window, from the signals, as this rank addresses it
};

// Plain data. Pointers point to device memory.
struct ExchangeOffsetsArgs {
  device::Comm comm;
  device::Window offset_table;       // int64_t [2][sender][kMostBuffers], on every rank
  const BufferPlace* own = nullptr;  // [num_buffers]
  int64_t* at = nullptr;             // [buffer][rank], out: bytes from the rank's signals
  int32_t num_buffers = 0;           // the same on all ranks
};

// Bytes of a rank's offset table.
JAXCOMM_BOTH int64_t OffsetTableBytes(int32_t num_ranks) {
  return 2 * num_ranks * kMostBuffers * static_cast<int64_t>(sizeof(int64_t));
}

// The channel of this kernel. No plan uses it.
JAXCOMM_BOTH int32_t OffsetChannel(const device::Comm& comm) { return comm.signals.num_channels - 1; }

}  // namespace jaxcomm::cuda

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

// The row of a sender's offsets in call number `count`. Two consecutive calls use different rows. A sender reuses a row
// in the second next call. By then it has received the offsets of the next call from every rank, so every rank has read
// the row.
JAXCOMM_DEVICE int64_t Slot(uint64_t count, int32_t sender, int32_t num_ranks) {
  return static_cast<int64_t>(count % 2) * num_ranks + sender;
}

// Called by all threads of one block. If a rank does not arrive in time, this rank aborts and the call's kernel does
// not run, because it would use the addresses of another run.
//
// The exchange is a barrier too: a kernel after it may access the buffers of all ranks. Whatever a rank's stream ran
// before the call has then ended, and its writes are visible.
JAXCOMM_DEVICE void ExchangeOffsets(const ExchangeOffsetsArgs& args) {
  const device::Comm& comm = args.comm;
  const int32_t channel = OffsetChannel(comm);
  const int64_t row = device::Row(comm, channel);
  const int32_t num_ranks = comm.local.size;
  const int32_t rank = comm.local.rank;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto num_threads = static_cast<int32_t>(blockDim.x);
  if (device::IsAborted(comm)) return;
  for (int32_t peer = thread; peer < num_ranks; peer += num_threads) {
    if (peer == rank) {
      for (int32_t i = 0; i < args.num_buffers; ++i) {
        args.at[i * num_ranks + rank] = args.own[i].window_at + args.own[i].in_window;
      }
      continue;
    }
    const int64_t slot = Slot(comm.signals.sent[row + peer], rank, num_ranks);
    int64_t* const to = args.offset_table.At<int64_t>(peer) + slot * kMostBuffers;
    for (int32_t i = 0; i < args.num_buffers; ++i) to[i] = args.own[i].in_window;
    device::Signal(comm, channel, peer);
  }
  bool reached = true;
  for (int32_t peer = thread; peer < num_ranks && reached; peer += num_threads) {
    if (peer == rank) continue;
    const int64_t slot = Slot(comm.signals.received[row + peer], peer, num_ranks);
    reached = device::Wait(comm, channel, peer, kOffsetExchange);
    const int64_t* const theirs = args.offset_table.At<int64_t>(rank) + slot * kMostBuffers;
    for (int32_t i = 0; i < args.num_buffers; ++i) args.at[i * num_ranks + peer] = args.own[i].window_at + theirs[i];
  }
}

}  // namespace jaxcomm::cuda
#endif
