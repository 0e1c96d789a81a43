// Arguments of the kernel of dispatch between nodes that GIN connects. Plain data, without CUDA.
//
// Words: a message goes from a rank to its rail peer of another node. It has the positions of the sender's packed
// choices for that node, and after them a piece of each row that the node needs, once per row.
#pragma once

#include <cstdint>

#include "cuda/program/row_args.h"

namespace jaxcomm {
namespace cuda {

// One rank's call. `rows.comm` is `gin.comm`, whose numbers of ranks are those of the world.
struct RailRowArgs {
  RowArgs rows;
  device::Comm node;  // its arena has at least RailArenaBytes()
  device::GinHandle gin;
};

// Fewer than kRowThreads: NCCL's GIN would spill registers, as in the executor.
constexpr int kRailThreads = 384;

JAXCOMM_BOTH int64_t RailAligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Bytes of the positions of `num` choices in a message. The rows follow.
JAXCOMM_BOTH int64_t RailListBytes(int64_t num) { return RailAligned(num * static_cast<int64_t>(sizeof(int32_t))); }

// The most bytes of a message: all choices and all rows.
JAXCOMM_BOTH int64_t RailMessageBytes(const RowArgs& args) {
  return RailListBytes(args.num_choices) + RailAligned(args.num_rows * args.piece_bytes);
}

// The arena: one message per source node and channel, then one per other node and channel for sending. So no message
// waits for the memory of another one.
JAXCOMM_BOTH int64_t RailArenaBytes(const RowArgs& args, int32_t num_nodes) {
  return (int64_t{2} * num_nodes - 1) * args.num_channels * RailMessageBytes(args);
}

// Words of marks, one bit per row.
JAXCOMM_BOTH int64_t RailMarkWords(const RowArgs& args) { return (args.num_rows + 63) / 64; }

// Bytes of shared memory: those of RowSharedBytes(), the marks, and a sum per word of marks.
JAXCOMM_BOTH int64_t RailMarksAt(const RowArgs& args, int32_t num_threads) {
  return (RowSharedBytes(args, num_threads) + 15) / 16 * 16;
}
JAXCOMM_BOTH int64_t RailSharedBytes(const RowArgs& args, int32_t num_threads) {
  constexpr auto kWordBytes = static_cast<int64_t>(sizeof(uint64_t) + sizeof(int32_t));
  return RailMarksAt(args, num_threads) + RailMarkWords(args) * kWordBytes;
}

// As MakeRowArgs and WithBuffers of row_args.h.
StatusOr<RailRowArgs> MakeRailRowArgs(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                                      int32_t max_channels);
StatusOr<RailRowArgs> WithBuffers(const RailRowArgs& args, const void* x, void* y, const RowOperands& operands);

}  // namespace cuda
}  // namespace jaxcomm
