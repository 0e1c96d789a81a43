// Arguments of the kernel of route_and_dispatch: route and dispatch of few tokens in one exchange of LL messages inside
// a node. Plain data, which the host fills in without CUDA.
#pragma once

#include <cstdint>

#include "common/call_spec.h"
#include "common/status.h"
#include "include/jaxcomm/comm.h"
#include "plan/channels.h"
#include "plan/row_limits.h"

namespace jaxcomm::cuda {

// The sizes of a call, the same on all ranks. The numbers of routing.py.
struct RouteAndDispatchShape {
  int64_t tokens = 0;   // of a rank
  int64_t choices = 0;  // of a token
  int64_t num_experts = 0;
  int64_t capacity = 0;  // rows of a rank
  int64_t align = 1;     // groups start at multiples of it; 1 with slots
  int64_t slots = 0;     // rows of an expert; 0: groups follow each other
  int64_t row_bytes = 0;
};

// The operands and results of an execution. Pointers point to device memory.
struct RouteAndDispatchBuffers {
  const int32_t* ids = nullptr;  // (tokens, choices); num_experts: unknown, negative: no choice
  const char* x = nullptr;       // (tokens, row_bytes)
  // Results: those of routing.py, and (capacity, row_bytes).
  int32_t* slot = nullptr;
  int32_t* expert = nullptr;
  int32_t* group_sizes = nullptr;
  int32_t* group_counts = nullptr;
  int32_t* demand = nullptr;
  int32_t* dropped = nullptr;
  int32_t* table = nullptr;
  char* y = nullptr;
};

// One rank's call.
struct RouteAndDispatchArgs : RouteAndDispatchBuffers {
  device::Comm comm;  // its LL slots are those of the arena, and their only channel is 0
  int64_t row_bytes = 0;
  int64_t piece_bytes = 0;  // of every row, for each channel but the last
  int32_t tokens = 0;
  int32_t choices = 0;
  int32_t num_experts = 0;  // of all ranks
  int32_t capacity = 0;
  int32_t align = 1;
  int32_t slots = 0;
  int32_t num_channels = 1;
  int32_t num_epochs = 1;  // of the arena: the most channels of a call
};

constexpr int kRouteAndDispatchThreads = 512;  // per thread block

// A unit of an LL message holds kIdsPerUnit expert ids of 16 bits, or so many bytes of a row.
constexpr int32_t kUnitBytes = kLlUnitBytes;

// Units that a rank sends to a peer on a channel: the ids of all its choices, then a piece of each of its rows. Rows
// that the peer does not need are not sent.
JAXCOMM_BOTH int32_t IdUnits(const RouteAndDispatchArgs& args) {
  return static_cast<int32_t>((int64_t{args.tokens} * args.choices + kIdsPerUnit - 1) / kIdsPerUnit);
}
JAXCOMM_BOTH int32_t PieceUnits(const RouteAndDispatchArgs& args) {
  return static_cast<int32_t>(args.piece_bytes / kUnitBytes);
}
JAXCOMM_BOTH int32_t ChannelUnits(const RouteAndDispatchArgs& args) {
  return IdUnits(args) + args.tokens * PieceUnits(args);
}

// The arena begins with the epochs of this rank, one for each possible channel. The slots follow.
JAXCOMM_BOTH int64_t EpochBytes(int32_t num_epochs) {
  return (num_epochs * static_cast<int64_t>(sizeof(uint64_t)) + 15) / 16 * 16;
}

JAXCOMM_BOTH device::LlSlots SlotsOfArena(const device::Comm& comm, int32_t num_epochs) {
  constexpr int64_t kLineBytes = 2 * kUnitBytes;  // a unit and its flags
  const int64_t epoch_bytes = EpochBytes(num_epochs), set_bytes = 2 * kLineBytes * comm.local.size;
  return {{comm.arena.base + epoch_bytes, comm.arena.stride},
          comm.arena.At<uint64_t>(comm.local.rank),
          1,
          static_cast<int32_t>((comm.arena_bytes - epoch_bytes) / set_bytes)};
}

// row_limits.h for the arguments of a call.
JAXCOMM_BOTH int64_t RouteAndDispatchSharedBytes(const RouteAndDispatchArgs& args) {
  return OneExchangeSharedBytes({args.comm.local.size, args.tokens, args.choices, args.num_experts, args.row_bytes});
}

// Bytes of the arena with the slots of this call and their two sets.
int64_t ArenaBytes(const RouteAndDispatchArgs& args);

// Makes the arguments that are equal in all executions of a call, except for the Comm, of which only the number of
// ranks is set. Fails if the sizes do not fit each other, the kernel or the arena. `max_channels`: of the communicator.
StatusOr<RouteAndDispatchArgs> MakeRouteAndDispatchArgs(const CallSpec& spec, const RouteAndDispatchShape& shape,
                                                        int32_t max_channels);

// Sets the Comm. Its arena has at least ArenaBytes() and belongs to such calls only: calls of other shapes may share
// it.
RouteAndDispatchArgs WithComm(RouteAndDispatchArgs args, const device::Comm& comm);

}  // namespace jaxcomm::cuda
