// Packing of puts to other nodes. GIN would send a put of many short fragments as many messages. Instead, the sender
// packs the elements into scratch and puts them as one message, and the receiver unpacks them. If the fragments of the
// destination are long enough, the put goes there directly.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/program/program.h"

namespace jaxcomm::cuda {

using device::kMostPutsUnderWay;

// How a channel's elements lie in memory, independent of where in a block the channel begins.
class Fragments {
 public:
  // `block_count`, `whole_count`: elements of a block of the channel and of all channels.
  Fragments(int64_t block_count, int64_t whole_count, ContiguousCounts contiguous)
      : block_count_(block_count), whole_count_(whole_count), contiguous_(contiguous) {}

  // The number of fragments of memory that hold `count` elements from `place` on: usually, and at most.
  int64_t Usual(const Place& place, int64_t count) const;
  int64_t Most(const Place& place, int64_t count) const;
  // The maximum number of puts of a step to another node: one for each range that is contiguous on both sides.
  int64_t MostPuts(const Step& step) const;
  // Whether `count` elements from `place` on are contiguous wherever in its block the channel begins. The position of
  // the first one in memory, for a channel that begins at element 0.
  bool IsFlat(const Place& place, int64_t count) const;
  int64_t Position(const Place& place) const;

 private:
  int64_t ContiguousCount(const Place& place) const;
  bool InOne(const Place& place) const;
  int64_t BlocksOf(const Place& place, int64_t count) const;

  int64_t block_count_;
  int64_t whole_count_;
  ContiguousCounts contiguous_;
};

// The packed plans of one channel. Each step for another node puts at most kMostPutsUnderWay fragments.
struct PackedPlans {
  std::vector<Plan> plans;  // by rank
  std::vector<std::vector<int32_t>>
      origins;  // by rank: each step's position in the plan before packing, or kExitBarrier
};

bool IsInterNodePut(const Geometry& geometry, const Plan& plan, const Step& step);
PackedPlans PackInterNodePuts(const std::vector<Plan>& plans, const Geometry& geometry, const Fragments& fragments,
                              int64_t item_bytes, int32_t num_channels, PackLimits limits);

}  // namespace jaxcomm::cuda
