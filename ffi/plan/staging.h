// The staging ring: plans of large calls on GPUs, whose peers can access an arena but not the operand and the result.
//
// Without the ring, a rank copies its whole operand into the arena, and only then the transfer begins. With it, a block
// is split into chunks, and each chunk passes through one of a few slots of scratch. A staged plan is an ordinary plan,
// which uses signals, waits and scratch like any other: the validator proves it, the cost model predicts it, and the
// executor runs it. docs/internals/cuda-staging.md describes it.
#pragma once

#include <cstdint>

#include "plan/algorithms.h"

namespace jaxcomm {

// A staged plan runs in iterations. Peers read a chunk this many iterations after the owner has written it, so no rank
// waits for the latency of a signal.
constexpr int64_t kStagingLead = 2;
// The slots of the ring. At the start of iteration t, all peers have finished iteration t - kStagingLead. The slot of a
// chunk that was written in iteration t - 2 * kStagingLead is free then. With fewer slots, a copy overwrites a chunk
// that a peer may still read.
constexpr int64_t kStagingSlots = 2 * kStagingLead;
// The operand's bytes in one slot of one channel. Not measured.
constexpr int64_t kStagingSlotBytes = 256 << 10;

// Whether the algorithm's plans can be staged: plans of one node that do not put to peers, have no scratch and have at
// most one exchange of signals, that is, no signal after a wait. Of a result, peers read whole ranges,
// as steps write them before the exchange.
bool CanStage(const Algorithm& algorithm, const Request& request);

// The elements of a block in one slot, for the request of one channel: Request::staged_count. 0: the call does not use
// the ring, because its operand is not larger than the ring, or because
// - CanStage() is false,
// - it has more than 72 ranks,
// - no rank reads memory of peers,
// - or a layout is fragmented and the moves would be small.
int64_t StagedCount(const Algorithm& algorithm, const Request& request, int64_t item_bytes);

// The staged plan of one rank. Precondition: CanStage(). request.staged_count may have any value above 0.
Plan BuildStaged(const Algorithm& algorithm, const Request& request, int32_t rank);

}  // namespace jaxcomm
