// A plan as the GPU walks it: for one rank, cut into channels, with what the kernel should not have to find out.
//
// The elements of every block are dealt out to channels, and each channel runs a plan of its own for its part, with
// counters of its own. Thread block c of a rank meets thread block c of its peers and no other, so that nothing orders
// the thread blocks of a rank among each other, and they need no grid-wide barrier. They must all be resident at once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/select.h"

namespace jaxcomm {
namespace cuda {

// One channel's part of a buffer. Element i of the plan is element begin + i % count of block i / count; where that
// lies in memory, see BlockLayout in ffi/cpu/copy.h.
struct ChannelSlice {
  int64_t count = 0;  // of every block
  int64_t begin = 0;  // in every block
  int64_t num_blocks = 1;
  int64_t run = 0;  // elements of a block that lie side by side
};

// Steps that no plan has: all ranks of the node, and those of other nodes that send here, enter and leave; own puts to
// other nodes are read. kLlExchange: all of a call that has no steps. kOffsetExchange: before the plan, the ranks of
// the node tell each other where their buffers are.
enum PseudoStep : int32_t {
  kEntryBarrier = -1,
  kExitBarrier = -2,
  kLlExchange = -3,
  kFlush = -5,
  kOffsetExchange = -6
};

struct ProgramStep {
  Step step;
  int32_t origin = 0;    // position in the plan, or a PseudoStep; for reports
  int32_t together = 1;  // signals, waits: this one and the following ones that different threads may run at once
  bool sync = false;     // data steps: needs what other threads have done since the last barrier of the thread block
  // What has been put to other nodes must have been read from here before: this step overwrites it, or lets somebody
  // know who might.
  bool flush = false;
  // Data steps: in every buffer, all elements lie side by side. Offsets are then those in memory, for a channel that
  // begins at element 0; else they are those of the plan.
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

// Plain data in vectors, so that it can be copied to the GPU as it is.
struct RankProgram {
  std::vector<ProgramStep> steps;
  std::vector<Place> sources;
  std::vector<ChannelProgram> channels;
  int64_t scratch_count = 0;  // elements, of all channels
  // What peers read or write, and so must lie in symmetric memory. Scratch always does.
  bool shares_input = false;
  bool shares_output = false;
};

// How blocks lie in memory: BlockLayout::run of ffi/cpu/copy.h, 0: block after block.
struct Runs {
  int64_t input = 0;
  int64_t output = 0;
};

// What is packed before it is put to another node. Neither number has been measured.
struct PackLimits {
  // Fragments that on average are shorter: a network of 50 GB/s carries as much in the time that a message costs.
  int64_t run_bytes = 32 << 10;
  // What a rank keeps packed at once; but a put is never cut.
  int64_t send_bytes = 16 << 20;
};

// The program of `rank`. Where there are several nodes, not all ranks may be addressable. `choice` is for the elements
// that the largest channel has of a block: see ChannelCount.
RankProgram MakeRankProgram(const Choice& choice, int64_t block_count, Runs runs, int64_t item_bytes,
                            int32_t num_channels, int32_t rank, PackLimits limits = {});

}  // namespace cuda
}  // namespace jaxcomm
