// A program for a group of several nodes whose kernels cannot reach the network. The steps between nodes are taken out
// of the plans. Their data travels in rounds, which the host enqueues on a second stream (NCCL send and receive). The
// remaining steps run on the first stream, in kernel launches: each runs consecutive steps of every channel.
//
// A put to another node becomes a copy that packs its elements into scratch. The round sends them to the scratch of the
// receiver and unpacks them there. So the plan continues as soon as the elements are packed, blocks may have any
// layout, and all data from one rank to another in one round is one message. A signal without data is a message too.
// Sender and receiver agree on the round of a message, since every rank makes the plans of all ranks.
//
// The level of a step is one more than the last round that anything before the step waits for, on any rank; 0 if there
// is none. The round of a message is no less than the level of the data that it carries (PlanSplitter). Launches keep
// the order of levels, and everything that a round r waits for has a level of at most r (Scheduler). It follows that no
// rank waits forever:
// - Rounds have the same numbers on all ranks, and each rank runs its own in ascending order.
// - Assume that all rounds before r have ended. Then every step of a level up to r ends, on every rank. Its thread
//   block waits for earlier steps and for signals of its node, all of levels up to r; the plans, which the validator
//   has run, contain no cycle. Its launch waits for launches of levels up to r and for rounds before r.
// - So all data of round r gets packed on every rank, every rank starts its part of round r, and the round ends.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/program/program.h"

namespace jaxcomm {
namespace cuda {

// Limits of concurrent work.
struct SplitLimits {
  // A rank begins another round once the current one has this much data. Chunks of a pipelined plan then travel one by
  // one while the node works on the next, and small messages travel together. At 50 GB/s this much data takes as long
  // as the launches of a round, about 20 us. Neither number has been measured.
  int64_t round_bytes = 1 << 20;
  // Rounds whose data a rank keeps packed at once.
  int32_t num_slots = 2;
};

// Elements of this rank's scratch to send to, or receive from, a peer.
struct Transfer {
  int32_t peer = 0;
  int64_t begin = 0;
  int64_t count = 0;
};

// The work of one rank in one round.
struct Round {
  std::vector<Transfer> sends;     // in the order of peers
  std::vector<Transfer> receives;  // likewise
  int32_t unpack = -1;             // number of the launch that unpacks the received data; -1: none
};

// The actions of the host, in this order.
struct Action {
  enum Kind : uint8_t {
    kLaunch,  // enqueues launch `number` on the first stream
    kPost,    // the second stream waits for the first, then runs this rank's round `number`
    kAwait,   // the first stream waits for this rank's round `number`, and so for all earlier ones
  };
  Kind kind = kLaunch;
  int32_t number = 0;
};

// Launch i of channel c is RankProgram::channels[i * num_channels + c]. If peers read the operand, the first launch of
// the actions copies it to where they read it (RankArgs::copy_in). If peers write the result, the last action is a
// launch that copies it from there (copy_out).
struct SendRecvSchedule {
  std::vector<Round> rounds;  // of this rank
  std::vector<Action> actions;
};

// Like MakeRankProgram, for a group of several nodes.
RankProgram MakeSendRecvProgram(const Choice& choice, int64_t block_count, ContiguousCounts contiguous,
                                int64_t item_bytes, int32_t num_channels, int32_t rank, SplitLimits limits,
                                SendRecvSchedule* schedule);

}  // namespace cuda
}  // namespace jaxcomm
