// What a plan puts to other nodes by one-sided messages, such as GIN's: what lies in many short runs would be as many
// messages. It is packed into scratch, put in one piece, and moved to where it belongs by the receiver. Where a
// destination takes it as it is, it is put there.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/program/program.h"

namespace jaxcomm {
namespace cuda {

// Puts of a channel to one rank that may be under way at once. NCCL's queues for a peer have 128 places by default,
// of which a put that raises a counter takes up to two, and eight channels share one (32 channels, 4 contexts). Whoever
// finds a queue full waits in NCCL's code, without a deadline.
constexpr int64_t kMostPutsUnderWay = 8;

// How a channel's elements lie in memory, wherever in a block the channel begins.
class Fragments {
 public:
  // `block_count`, `whole_count`: elements of a block of the channel and of all channels.
  Fragments(int64_t block_count, int64_t whole_count, Runs runs)
      : block_count_(block_count), whole_count_(whole_count), runs_(runs) {}

  // Fragments of memory that `count` elements from `place` on lie in: as a rule, and at most.
  int64_t Usual(const Place& place, int64_t count) const;
  int64_t Most(const Place& place, int64_t count) const;
  // What a step puts to another node at most: pieces that lie side by side on both sides.
  int64_t MostPuts(const Step& step) const;

 private:
  int64_t RunOf(const Place& place) const;
  bool InOne(const Place& place) const;
  int64_t BlocksOf(const Place& place, int64_t count) const;

  int64_t block_count_;
  int64_t whole_count_;
  Runs runs_;
};

// The plans of one channel, packed. Steps for other nodes put at most kMostPutsUnderWay pieces each.
struct PackedPlans {
  std::vector<Plan> plans;  // by rank
  std::vector<std::vector<int32_t>>
      origins;  // by rank: of each step, its position in the plan as it was; or kExitBarrier
};

PackedPlans PackInterNodePuts(const std::vector<Plan>& plans, const Geometry& geometry, const Fragments& fragments,
                              int64_t item_bytes, int32_t num_channels, PackLimits limits);

}  // namespace cuda
}  // namespace jaxcomm
