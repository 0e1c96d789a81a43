// Ranks tell each other where XLA has put their operands and results, in a kernel before that of the plan.
//
// XLA may place a buffer anew in every run, on every rank elsewhere, and only the rank itself knows. All memory of
// NCCL's windows lies in one range of addresses, at the same distance from rank to rank (ncclGetLsaPointer): so what
// counts is the distance from some memory of the rank that all know, here its signals.
#pragma once

#include "cuda/program/program.h"
#include "include/jaxcomm/device.h"

namespace jaxcomm {
namespace cuda {

// Bytes from the begin of a rank's signals.
struct BufferOffsets {
  int64_t input = 0;
  int64_t output = 0;
};

// Plain data; pointers are to memory of the device.
struct ExchangeOffsetsArgs {
  device::Comm comm;
  device::Window offset_table;         // BufferOffsets [2][sender], at every rank
  const BufferOffsets* own = nullptr;  // of this rank
  int64_t* input_at = nullptr;         // [rank], out
  int64_t* output_at = nullptr;        // [rank], out
};

// Bytes of a rank's offset table.
JAXCOMM_BOTH int64_t OffsetTableBytes(int32_t num_ranks) {
  return 2 * num_ranks * static_cast<int64_t>(sizeof(BufferOffsets));
}

// The channel of the kernel, which no plan uses.
JAXCOMM_BOTH int32_t OffsetChannel(const device::Comm& comm) { return comm.signals.num_channels - 1; }

}  // namespace cuda
}  // namespace jaxcomm

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace cuda {

// The row of a sender's offsets in call number `count`. The rows of a call and of the next one lie side
// by side. A sender reuses a row in the call after those: it has then received the offsets of the next call from every
// rank, so this row has been read.
JAXCOMM_DEVICE int64_t Slot(uint64_t count, int32_t sender, int32_t num_ranks) {
  return static_cast<int64_t>(count % 2) * num_ranks + sender;
}

// Called by all threads of one block. If a rank has not come in time, this one has aborted, and the plan does not run:
// it would with the addresses of another run.
JAXCOMM_DEVICE void ExchangeOffsets(const ExchangeOffsetsArgs& args) {
  const device::Comm& comm = args.comm;
  const int32_t channel = OffsetChannel(comm);
  const int64_t row = device::Row(comm, channel);
  const int32_t num_ranks = comm.local.size;
  const int32_t rank = comm.local.rank;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto num_threads = static_cast<int32_t>(blockDim.x);
  if (device::IsAborted(comm)) return;
  const BufferOffsets own = *args.own;
  for (int32_t peer = thread; peer < num_ranks; peer += num_threads) {
    if (peer == rank) {
      args.input_at[rank] = own.input;
      args.output_at[rank] = own.output;
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
    args.input_at[peer] = theirs.input;
    args.output_at[peer] = theirs.output;
  }
}

}  // namespace cuda
}  // namespace jaxcomm
#endif
