// A program for a group of several nodes whose kernels don't reach the network: what goes between nodes is cut out of
// the plans and travels in rounds, which the host puts on a second stream (NCCL send and receive). What is left walks
// on the first stream, in segments.
//
// A put to another node packs its elements into scratch; the round sends them to the scratch of the receiver and
// unpacks them from there. So the plan goes on as soon as it is packed, blocks may lie as they like, and whatever one
// rank has for another in one round is one message. A signal without data is a message too. Both ranks of a message
// know its round, since every rank makes the plans of all.
//
// The level of a step is one more than the last round that anything before it waits for, on any rank; 0 if there is
// none. A message travels in a round that is no less than the level of what it carries (PlanSplitter). Segments keep to
// the order of levels, and what a round r waits for has levels up to r (Scheduler). From that follows that no rank
// waits without end:
// - Rounds are the same on all ranks, and each rank has its own in ascending order.
// - Say that all rounds before r are over. Then every step of a level up to r ends, on every rank: its thread block
// waits
//   for steps before it and for signals of the own node, all of levels up to r, and the plans, which the validator has
//   run, have no circle; its segment waits for segments of levels up to r and for rounds before r.
// - So whatever round r has to carry gets packed everywhere; every rank has its part of round r under way, and it ends.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/program/program.h"

namespace jaxcomm {
namespace cuda {

// Bounds of what is under way at once.
struct SplitLimits {
  // A rank begins another round once it has that much in one: chunks of a pipelined plan travel one by one, while the
  // node works on the next, and what is small travels together. At 50 GB/s as long as a round costs in launches, about
  // 20 us; neither has been measured.
  int64_t round_bytes = 1 << 20;
  // Rounds of which a rank has the data packed.
  int32_t num_slots = 2;
};

// Elements of scratch of the rank itself.
struct Transfer {
  int32_t peer = 0;
  int64_t begin = 0;
  int64_t count = 0;
};

// What one rank does in one round.
struct Round {
  std::vector<Transfer> sends;     // in the order of peers
  std::vector<Transfer> receives;  // likewise
  int32_t unpack = -1;             // number of the walk that moves what was received to where it belongs; -1: none
};

// What the host does, in this order.
struct Action {
  enum Kind : uint8_t {
    kWalk,   // puts walk `number` on the first stream
    kPost,   // the second stream waits for the first, then does own round `number`
    kAwait,  // the first stream waits for own round `number`, and so for all before it
  };
  Kind kind = kWalk;
  int32_t number = 0;
};

// Walk w of channel c is RankProgram::channels[w * num_channels + c]. Where peers read the operand, the first walk of
// the actions copies it to where they do (RankArgs::copy_in); where they write the result, the last action is a walk,
// which copies that (copy_out).
struct SendRecvSchedule {
  std::vector<Round> rounds;  // of this rank
  std::vector<Action> actions;
};

// As MakeRankProgram, for a group of several nodes.
RankProgram MakeSendRecvProgram(const Choice& choice, int64_t block_count, Runs runs, int64_t item_bytes,
                                int32_t num_channels, int32_t rank, SplitLimits limits, SendRecvSchedule* schedule);

}  // namespace cuda
}  // namespace jaxcomm
