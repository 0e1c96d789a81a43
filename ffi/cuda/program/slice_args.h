// Arguments of the kernel of all_to_all_v inside a node. Plain data, which the host fills in without CUDA.
#pragma once

#include <cstdint>

#include "common/call_spec.h"
#include "common/dtype.h"
#include "common/status.h"
#include "cuda/program/bulk_ring.h"
#include "cuda/program/row_args.h"
#include "include/jaxcomm/comm.h"

namespace jaxcomm::cuda {

// One rank's call. Pointers point to device memory. The arena of `comm` has at least ArenaBytes().
struct SliceArgs {
  device::Comm comm;
  const char* x = nullptr;      // rows to send
  char* y = nullptr;            // start value, and result
  const void* table = nullptr;  // of plan/slices.h: (ranks, 4, slices_per_rank), the same on all ranks
  int64_t input_rows = 0;       // of x, on every rank
  int64_t output_rows = 0;      // of y, on every rank
  int64_t row_bytes = 0;
  int32_t slices_per_rank = 0;
  int32_t num_channels = 1;
  bool int64_table = false;  // integers of 64 bits
  BulkStages bulk;           // of the rank's own kernel; ranks may differ
};

// The arena has the rows of x, which peers read, or those of y, which peers put: the fewer of both. A result with
// places for the worst case has many times the rows of x.
JAXCOMM_BOTH bool Reads(const SliceArgs& args) { return args.input_rows <= args.output_rows; }
JAXCOMM_BOTH int64_t ArenaBytes(const SliceArgs& args) {
  const int64_t rows = Reads(args) ? args.input_rows : args.output_rows;
  return (rows * args.row_bytes + 255) / 256 * 256;
}

// Stripe s of the arena, of this many bytes, belongs to channel s % num_channels on all ranks: the bytes that a warp
// keeps in flight. So one long slice occupies all channels, and short slices are distributed over them.
constexpr int64_t kStripeBytes = 4096;

constexpr int kSliceThreads = 512;  // per thread block

// A copy between an arena and another buffer. The channel makes its stripes of it.
struct SliceMove {
  char* to = nullptr;
  const char* from = nullptr;
  int64_t begin = 0;  // in the arena
  int64_t bytes = 0;
};

// Bytes of shared memory of a thread block: those of bulk copies, then a move and a number for each thread.
JAXCOMM_BOTH int64_t SliceSharedBytes(int32_t num_threads, const BulkStages& bulk = {}) {
  return BulkSharedBytes(bulk) + num_threads * static_cast<int64_t>(sizeof(SliceMove) + sizeof(int32_t));
}

// Packs two numbers into one word of a report: a rank or the number of a slice, of 24 bits, and a number of rows. A
// number of rows that does not fit becomes the largest one that does.
JAXCOMM_BOTH uint64_t PackRows(int32_t small, int64_t rows) {
  constexpr int64_t kMost = (int64_t{1} << 39) - 1;
  const int64_t kept = rows > kMost ? kMost : rows < -kMost ? -kMost : rows;
  return static_cast<uint64_t>(small & 0xffffff) << 40 | (static_cast<uint64_t>(kept) & ((uint64_t{1} << 40) - 1));
}
JAXCOMM_BOTH int32_t SmallOf(uint64_t packed) { return static_cast<int32_t>(packed >> 40); }
JAXCOMM_BOTH int64_t RowsOf(uint64_t packed) { return static_cast<int64_t>(packed << 24) >> 24; }

// Makes the arguments that are equal in all executions of a call, except for the Comm. Fails if the sizes of the
// buffers do not fit each other. `max_channels`: of the communicator.
StatusOr<SliceArgs> MakeSliceArgs(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                                  int32_t max_channels);
// Adds XLA's buffers of this execution. Fails if the table does not fit.
StatusOr<SliceArgs> WithBuffers(SliceArgs args, const void* x, void* y, const RowOperands& operands);

}  // namespace jaxcomm::cuda
