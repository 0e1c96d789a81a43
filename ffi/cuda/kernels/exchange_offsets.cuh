// The ranks of a node exchange the addresses of their operands and results, in a kernel before that of the plan.
//
// XLA may place a buffer at a new address in every run, different on each rank, and only the rank itself has this
// address. All memory of NCCL's windows lies in one address range per communicator, with the same stride from rank to
// rank (ncclGetLsaPointer). So a rank publishes the offset of its buffer in its window. Every rank adds the place where
// it finds that window itself: XLA's windows are of XLA's communicator, whose address range begins elsewhere on each
// rank.
#pragma once

#include "cuda/program/program.h"
#include "include/jaxcomm/device.h"

namespace jaxcomm {
namespace cuda {

// Bytes.
struct BufferOffsets {
  int64_t input = 0;
  int64_t output = 0;
};

// The buffers of a rank in one run.
struct OwnBuffers {
  BufferOffsets in_window;  // of this rank's buffers; the other ranks get them
  BufferOffsets window_at;  // of the windows, from the signals, as this rank addresses them
};

// Plain data. Pointers point to device memory.
struct ExchangeOffsetsArgs {
  device::Comm comm;
  device::Window offset_table;  // BufferOffsets [2][sender], on every rank
  const OwnBuffers* own = nullptr;
  int64_t* input_at = nullptr;   // [rank], out: bytes from the rank's signals
  int64_t* output_at = nullptr;  // [rank], out
};

// Bytes of a rank's offset table.
JAXCOMM_BOTH int64_t OffsetTableBytes(int32_t num_ranks) {
  return 2 * num_ranks * static_cast<int64_t>(sizeof(BufferOffsets));
}

// The channel of this kernel. No plan uses it.
JAXCOMM_BOTH int32_t OffsetChannel(const device::Comm& comm) { return comm.signals.num_channels - 1; }

}  // namespace cuda
}  // namespace jaxcomm

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace cuda {

// The row of a sender's offsets in call number `count`. Two consecutive calls use different rows. A sender reuses a row
// in the second next call. By then it has received the offsets of the next call from every rank, so every rank has read
// the row.
JAXCOMM_DEVICE int64_t Slot(uint64_t count, int32_t sender, int32_t num_ranks) {
  return static_cast<int64_t>(count % 2) * num_ranks + sender;
}

// Called by all threads of one block. If a rank does not arrive in time, this rank aborts and the plan does not run,
// because it would use the addresses of another run.
JAXCOMM_DEVICE void ExchangeOffsets(const ExchangeOffsetsArgs& args) {
  const device::Comm& comm = args.comm;
  const int32_t channel = OffsetChannel(comm);
  const int64_t row = device::Row(comm, channel);
  const int32_t num_ranks = comm.local.size;
  const int32_t rank = comm.local.rank;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto num_threads = static_cast<int32_t>(blockDim.x);
  if (device::IsAborted(comm)) return;
  const BufferOffsets own = args.own->in_window;
  const BufferOffsets window_at = args.own->window_at;
  for (int32_t peer = thread; peer < num_ranks; peer += num_threads) {
    if (peer == rank) {
      args.input_at[rank] = window_at.input + own.input;
      args.output_at[rank] = window_at.output + own.output;
      continue;
    }
    args.offset_table.At<BufferOffsets>(peer)[Slot(comm.signals.sent[row + peer], rank, num_ranks)] = own;
    device::Signal(comm, channel, peer);
  }
  bool reached = true;
  for (int32_t peer = thread; peer < num_ranks && reached; peer += num_threads) {
    if (peer == rank) continue;
    const int64_t slot = Slot(comm.signals.received[row + peer], peer, num_ranks);
    reached = device::Wait(comm, channel, peer, kOffsetExchange);
    const BufferOffsets theirs = args.offset_table.At<BufferOffsets>(rank)[slot];
    args.input_at[peer] = window_at.input + theirs.input;
    args.output_at[peer] = window_at.output + theirs.output;
  }
}

}  // namespace cuda
}  // namespace jaxcomm
#endif
