// The ring of stages of bulk copies in the shared memory of a thread block (kernels/bulk_copy.cuh). Plain data, which
// the host sizes without CUDA.
#pragma once

#include <cstdint>

#include "include/jaxcomm/comm.h"

namespace jaxcomm::cuda {

// `num` stages of `bytes` bytes each. No stages: no bulk copies.
struct BulkStages {
  int32_t num = 0;    // a power of two from 2 to kMostBulkStages
  int32_t bytes = 0;  // a multiple of 16
};

constexpr int32_t kMostBulkStages = 32;

// All stages but one are in flight. 7 x 16 KiB per SM are 458 GB/s from 6 SMs at a latency of 1.5 us, and 917 GB/s from
// 12 (docs/internals/cuda-bandwidth.md). Estimates: neither the number of stages nor their size has been measured.
constexpr BulkStages kPlanStages = {8, 16 << 10};
// Stripes of ragged exchanges (kStripeBytes) are shorter.
constexpr BulkStages kSliceStages = {32, 4 << 10};

// Behind the stages. Used by the one thread that issues the copies, which counts pieces from the start of the kernel.
// Piece i is in stage i % stages.num.
struct alignas(16) BulkRing {
  struct Piece {
    uint64_t loaded;  // mbarrier: a phase per piece of the stage
    char* to;         // where the piece goes
    int32_t bytes;
  };
  Piece pieces[kMostBulkStages];
  BulkStages stages;
  uint32_t num_loaded;       // pieces whose load has been issued
  uint32_t num_stored;       // pieces whose store has been issued
  const device::Comm* comm;  // for a report
  int32_t channel;           // the same
  bool failed;               // a load has not ended; no piece follows
};

// Bytes of shared memory of a thread block: the stages and the ring.
JAXCOMM_BOTH int64_t BulkSharedBytes(const BulkStages& stages) {
  return stages.num > 0 ? int64_t{stages.num} * stages.bytes + static_cast<int64_t>(sizeof(BulkRing)) : 0;
}

}  // namespace jaxcomm::cuda
