// A plan: the steps of one rank in one execution of a collective, as plain data.
//
// Buffers are addressed in elements, in logical order: block 0, block 1, ... one after the other. The executor maps
// logical offsets to memory (strides of a split or concatenation axis).
//
// Contract with every executor:
//  - No step runs before every rank of the group has entered: all inputs are final, all outputs and scratch writable.
//  - Steps of one rank run in order. The k-th wait of rank r on peer p ends once p has run its k-th signal to r.
//    All effects of p before that signal are then visible to r. Nothing else orders two ranks.
//  - A rank's buffers stay valid until every rank has finished.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/collective.h"

namespace jaxcomm {

enum class Space : uint8_t { kInput, kOutput, kScratch };
constexpr const char* kSpaceNames[] = {"input", "output", "scratch"};

// The first element of a range: element `offset` of buffer `space` of rank `rank`.
struct Place {
  int32_t rank = 0;
  Space space = Space::kInput;
  int64_t offset = 0;
};

enum class StepKind : uint8_t {
  kCopy,    // dst = src, both local
  kPut,     // dst = src, dst at `peer`, src local
  kGet,     // dst = src, src at `peer`, dst local; the peer's memory must be addressable
  kReduce,  // dst = sources[0] op sources[1] op ..., left to right, dst local; f32 accumulator for 8/16-bit floats;
            // sources may lie at addressable peers and may be dst itself
  kZero,    // dst = 0, dst local
  kSignal,  // release: adds one to the counter (this rank -> peer)
  kWait,    // acquire: waits for the next count of the counter (peer -> this rank)
};
constexpr const char* kStepNames[] = {"copy", "put", "get", "reduce", "zero", "signal", "wait"};

struct Step {
  StepKind kind = StepKind::kCopy;
  int32_t peer = -1;  // put, get, signal, wait: the other rank
  int64_t count = 0;  // elements of dst; data steps have count > 0
  Place dst;
  Place src;                 // copy, put, get
  int32_t first_source = 0;  // reduce: range in Plan::sources
  int32_t num_sources = 0;
};

struct Plan {
  int32_t rank = 0;
  int32_t num_ranks = 1;
  int64_t scratch_count = 0;  // elements of scratch at this rank
  std::vector<Step> steps;
  std::vector<Place> sources;  // operands of the reduce steps
};

// The order in which an executor runs the steps of a plan if moves of at most `short_move` elements run at once: waits
// come before the short moves that they follow in the plan. No wait passes a signal, so no cycle of waits can arise.
std::vector<size_t> WaitsFirst(const Plan& plan, int64_t short_move);

// Whether the step is a copy, put or get.
inline bool IsMove(StepKind kind) {
  return kind == StepKind::kCopy || kind == StepKind::kPut || kind == StepKind::kGet;
}

// Ranks are numbered node by node: rank = node * ranks_per_node + local.
struct Geometry {
  int32_t num_nodes = 1;
  int32_t ranks_per_node = 1;
  bool all_addressable =
      true;               // every rank may read the memory of every other, also across nodes (one process or host)
  bool pull = false;      // ranks of a node read from each other instead of writing to each other (processes)
  bool multimem = false;  // the switch of a node can reduce reads from all ranks and multicast writes to all
  bool nvlink = false;    // a rank of a node reaches each other one at the full bandwidth (GPUs)

  int32_t num_ranks() const { return num_nodes * ranks_per_node; }
  int32_t node(int32_t rank) const { return rank / ranks_per_node; }
  int32_t local(int32_t rank) const { return rank % ranks_per_node; }
};

// The task of a plan. Elements per rank, with n ranks and block_count b:
//                   input   output
//   all_to_all      n * b   n * b    output block j of rank r is input block r of rank j
//   all_to_all_v    n       n        as all_to_all; an element is a list of slices (slices.h), so b is 1
//   dispatch        n       n        as all_to_all; an element is the list of rows of one pair of ranks, so b is 1
//   all_gather      b       n * b
//   all_reduce      b       b
//   reduce_scatter  n * b   b        rank r gets the sum of block r of all ranks
//   combine         n       1        as reduce_scatter; an element is the list of rows for one rank, so b is 1
//   permute         b       b        from source_of[rank]; zeros where that is -1
//   broadcast       b       b        from root
//   barrier         0       0
//   reshard         the boxes of the rank; each element of an output comes from an input that has it
struct Boxes;  // boxes.h
struct Request {
  Collective collective = Collective::kBarrier;
  Geometry geometry;
  int64_t block_count = 0;
  int64_t chunk_count = 0;             // elements in flight at once when a block is pipelined; 0: whole blocks
  int64_t staged_count = 0;            // elements of a block in a slot of the staging ring (staging.h); 0: no ring
  bool fragmented = false;             // a block of the operand or the result is not contiguous in memory
  int32_t root = 0;                    // broadcast
  std::vector<int32_t> source_of;      // permute: one entry per rank
  std::shared_ptr<const Boxes> boxes;  // reshard; block_count is that of the largest output
};

// Elements of the buffers of `rank`: the same on all ranks, except for reshard.
int64_t InputCount(const Request& request, int32_t rank = 0);
int64_t OutputCount(const Request& request, int32_t rank = 0);

}  // namespace jaxcomm
