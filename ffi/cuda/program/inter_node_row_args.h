// Arguments of the kernels of dispatch and combine between nodes that GIN connects. Plain data, without CUDA.
//
// Words: the source rank of a token is the rank that dispatches it and gets its sum. A message of a dispatch goes from
// a rank to its rail peer of another node. It holds the positions of the sender's packed choices for that node, and
// then a piece of each row that the node needs, once per row.
#pragma once

#include <cstdint>

#include "cuda/program/row_args.h"

namespace jaxcomm::cuda {

// One rank's call. `rows.comm` is `gin.comm`, whose numbers of ranks are those of the world.
struct InterNodeRowArgs {
  RowArgs rows;
  device::Comm node;  // its arena has at least RailArenaBytes()
  device::GinHandle gin;
  bool sums_at_source = false;  // combine: the source rank gets the rows of all choices; else their sums by node
  int32_t weight_bytes = 0;     // combine: of a choice; 0: no weights
};

JAXCOMM_BOTH int64_t RailAligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Bytes of the positions of `num` choices in a message. The rows follow.
JAXCOMM_BOTH int64_t RailListBytes(int64_t num) { return RailAligned(num * static_cast<int64_t>(sizeof(int32_t))); }

// The most bytes of a message: all choices and all rows.
JAXCOMM_BOTH int64_t RailMessageBytes(const RowArgs& args) {
  return RailListBytes(args.num_choices) + RailAligned(args.num_rows * args.piece_bytes);
}

// combine: the list of the tokens that have choices in a node, from their source rank: kRailHeaderBytes with the number
// of tokens, the packed choices from the first one of the node on, their weights, and the end of each token. `num`:
// choices of the source rank for the node.
constexpr int64_t kRailHeaderBytes = 16;
JAXCOMM_BOTH int64_t RailWeightsAt(int64_t num) {
  return kRailHeaderBytes + (num * static_cast<int64_t>(sizeof(int32_t)) + 15) / 16 * 16;
}
JAXCOMM_BOTH int64_t RailEndsAt(int64_t num, int64_t weight_bytes) {
  return RailWeightsAt(num) + (num * weight_bytes + 15) / 16 * 16;
}

// combine: what each channel has in the arena, one after the other. Offsets in bytes.
struct RailCombineArena {
  int64_t list_bytes = 0;  // the lists come first: one from each node, then one for each other node
  int64_t sums = 0;        // the place of the sum of each token and node
  int64_t received = 0;    // sums of all nodes, or the rows of the choices
  int64_t sent = 0;        // sums for other nodes
  int64_t gathered = 0;    // rows of the ranks of the node for one source rank, twice
  int64_t channel_bytes = 0;
};
JAXCOMM_BOTH RailCombineArena RailCombineArenaOf(const InterNodeRowArgs& args, int32_t num_nodes) {
  const RowArgs& rows = args.rows;
  constexpr auto kItem = static_cast<int64_t>(sizeof(int32_t));
  RailCombineArena arena;
  int64_t num_received = rows.num_choices, num_sent = 0;
  if (!args.sums_at_source) {
    num_received = num_nodes * rows.num_rows;
    num_sent = (num_nodes - 1) * rows.num_rows;
    arena.list_bytes = RailAligned(RailEndsAt(rows.num_choices, args.weight_bytes) + rows.num_rows * kItem);
    arena.sums = (2 * num_nodes - 1) * arena.list_bytes;
    arena.received = arena.sums + RailAligned(rows.num_rows * (num_nodes + 1) * kItem);
  }
  arena.sent = arena.received + RailAligned(num_received * rows.piece_bytes);
  arena.gathered = arena.sent + RailAligned(num_sent * rows.piece_bytes);
  arena.channel_bytes = arena.gathered + RailAligned(2 * rows.num_choices * rows.piece_bytes);
  return arena;
}

// The arena. dispatch: one message per source node and channel, then one per other node and channel for sending. So no
// message waits for the memory of another one.
JAXCOMM_BOTH int64_t RailArenaBytes(const InterNodeRowArgs& args, int32_t num_nodes) {
  const RowArgs& rows = args.rows;
  return rows.num_channels * (rows.combines ? RailCombineArenaOf(args, num_nodes).channel_bytes
                                            : (int64_t{2} * num_nodes - 1) * RailMessageBytes(rows));
}

// row_limits.h for the arguments of a call.
JAXCOMM_BOTH int64_t RailMarkWords(const RowArgs& args) {
  return args.combines ? 0 : ::jaxcomm::RailMarkWords(args.num_rows);
}
JAXCOMM_BOTH int64_t RailMarksAt(const RowArgs& args, int32_t num_threads) {
  return ::jaxcomm::RailMarksAt(args.num_experts, args.choices_per_row, num_threads);
}
JAXCOMM_BOTH int64_t RailSharedBytes(const RowArgs& args, int32_t num_threads) {
  return ::jaxcomm::RailSharedBytes(args.combines ? 0 : args.num_rows, args.num_experts, args.choices_per_row,
                                    num_threads);
}

// As MakeRowArgs and WithBuffers of row_args.h.
StatusOr<InterNodeRowArgs> MakeInterNodeRowArgs(const CallSpec& spec, DType dtype, int64_t input_count,
                                                int64_t output_count, int32_t max_channels);
StatusOr<InterNodeRowArgs> WithBuffers(const InterNodeRowArgs& args, const void* x, void* y,
                                       const RowOperands& operands);

}  // namespace jaxcomm::cuda
