// A plan in the form that the GPU executes: for one rank, split into channels, with data that the kernel should not
// have to compute.
//
// The elements of every block are distributed over channels. Each channel runs its own plan for its elements, with its
// own counters. Thread block c of a rank communicates only with thread block c of its peers. So nothing orders the
// thread blocks of a rank among each other, and they need no grid-wide barrier. They must all be resident at once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "include/jaxcomm/comm.h"
#include "plan/algorithms.h"
#include "plan/partition.h"
#include "plan/plan.h"

namespace jaxcomm::cuda {

// One channel's part of a buffer. Element i of the plan is element begin + i % count of block i / count. For its
// position in memory, see BlockLayout in ffi/cpu/copy.h.
struct ChannelSlice {
  int64_t count = 0;  // of every block
  int64_t begin = 0;  // in every block
  int64_t num_blocks = 1;
  int64_t contiguous_count = 0;  // BlockLayout in ffi/cpu/copy.h
};

// Steps that are not in the plan, for reports. kEntryBarrier and kExitBarrier are barriers of the node's ranks and of
// the ranks of other nodes that put to this rank or receive its puts. kLlExchange is a whole LL call, which has no
// steps. kFlush waits until the network has read this rank's puts to other nodes. kOffsetExchange exchanges buffer
// offsets in the node before the plan.
enum PseudoStep : int32_t {
  kEntryBarrier = -1,
  kExitBarrier = -2,
  kLlExchange = -3,
  kFlush = device::kFlushStep,
  kOffsetExchange = -6,
  // Errors instead of waits: the routing of a dispatch or combine is wrong (kernels/rows.cuh).
  kTooManyRows = -7,
  kUnknownExperts = -8,
  kUnknownRow = -9,
  kTooManyRowsOfExpert = -10,
  // A slice of an all_to_all_v is wrong (kernels/slices.cuh). The report packs two numbers into each word by
  // PackRows(): the number of the slice with its size, then the receiver with the received size or the offset.
  // kSlicesOverlap reports two pairs of a rank and an offset in the output: the second sender's and the receiver's.
  kWrongSliceSizes = -11,
  kOutsideOfOperand = -12,
  kOutsideOfOutput = -13,
  kSlicesOverlap = -14,
  kBulkCopy = -15  // the load of a bulk copy (kernels/bulk_copy.cuh)
};

struct ProgramStep {
  Step step;
  int32_t origin = 0;  // position in the plan, or a PseudoStep; for reports
  // The number of steps, from this one on, that run concurrently: signals and waits in different threads, moves inside
  // the node in different warps.
  int32_t num_concurrent = 1;
  int64_t longest_count = 0;  // of concurrent moves: elements of the longest
  bool sync = false;          // data steps: depends on other threads' accesses since the thread block's last barrier
  // The network must have read the sources of earlier puts to other nodes before this step. The step overwrites a
  // source, or signals a rank that may overwrite it or cause another rank to do so.
  bool flush = false;
  // Data steps: all elements are contiguous in every buffer. Offsets are then positions in memory for a channel that
  // begins at element 0. Otherwise they are offsets of the plan.
  bool flat = false;
};

struct ChannelProgram {
  int32_t first_step = 0;  // in RankProgram::steps
  int32_t num_steps = 0;
  int32_t first_source = 0;  // in RankProgram::sources
  ChannelSlice input;
  ChannelSlice output;
  int64_t scratch_begin = 0;  // elements
};

// Plain data in vectors, which can be copied to the GPU without conversion.
struct RankProgram {
  std::vector<ProgramStep> steps;
  std::vector<Place> sources;
  std::vector<ChannelProgram> channels;
  int64_t scratch_count = 0;  // elements, of all channels
  // Whether peers access the buffer, so that it must lie in symmetric memory. Scratch always does.
  bool shares_input = false;
  bool shares_output = false;
};

// BlockLayout::contiguous_count of ffi/cpu/copy.h. 0: each block is contiguous.
struct ContiguousCounts {
  int64_t input = 0;
  int64_t output = 0;
};

// Limits for packing puts to other nodes. Neither number has been measured.
struct PackLimits {
  // Puts with shorter fragments on average are packed. A network of 50 GB/s carries this much in the time that a
  // message costs.
  int64_t fragment_bytes = 32 << 10;
  // Maximum of packed bytes that a rank keeps at once. A single larger put is packed whole.
  int64_t send_bytes = 16 << 20;
};

// The slice that has `range` of every block in a buffer of `buffer_count` elements.
ChannelSlice SliceOf(int64_t buffer_count, int64_t block_count, Range range, int64_t contiguous_count);

// Makes the program of `rank`. In groups of several nodes, not all ranks may be addressable. `choice` must be made for
// the number of elements per block that the largest channel has: see ChannelCount.
RankProgram MakeRankProgram(const Choice& choice, int64_t block_count, ContiguousCounts contiguous, int64_t item_bytes,
                            int32_t num_channels, int32_t rank, PackLimits limits = {});

}  // namespace jaxcomm::cuda
