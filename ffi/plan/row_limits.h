// Limits of kernels: shared memory of the thread blocks of dispatch and combine, memory of arenas, windows of a call.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define JAXCOMM_LIMIT __host__ __device__ constexpr
#else
#define JAXCOMM_LIMIT constexpr
#endif

namespace jaxcomm {

// Buffers of a call whose offsets the ranks exchange: the windows of a user's call.
constexpr int32_t kMostBuffers = 8;

// A thread block gets this much shared memory without an opt-in.
constexpr int64_t kMaxSharedBytes = 48 << 10;

constexpr int kRowThreads = 512;   // per thread block, inside a node
constexpr int kRailThreads = 384;  // between nodes: with more, NCCL's GIN would spill registers

// Rows that a thread block copies at once: so many per thread, with two pointers each.
constexpr int32_t kRowsPerThread = 2;
constexpr int64_t kRowMoveBytes = 2 * static_cast<int64_t>(sizeof(void*));

// Bytes of shared memory of a thread block: its moves, or the choices of a row, then a sum per expert.
JAXCOMM_LIMIT int64_t RowMovesBytes(int64_t choices_per_row, int32_t num_threads) {
  const int64_t moves = num_threads * kRowsPerThread * kRowMoveBytes;
  const int64_t choices = choices_per_row * static_cast<int64_t>(sizeof(int32_t));
  return (moves > choices ? moves : choices + 15) / 16 * 16;
}
JAXCOMM_LIMIT int64_t RowSharedBytes(int64_t num_experts, int64_t choices_per_row, int32_t num_threads) {
  return RowMovesBytes(choices_per_row, num_threads) + num_experts * static_cast<int64_t>(sizeof(int32_t));
}

// Between nodes: those of RowSharedBytes(), then one bit per row of a dispatch in words, and a sum per word.
JAXCOMM_LIMIT int64_t RailMarkWords(int64_t num_rows) { return (num_rows + 63) / 64; }
JAXCOMM_LIMIT int64_t RailMarksAt(int64_t num_experts, int64_t choices_per_row, int32_t num_threads) {
  return (RowSharedBytes(num_experts, choices_per_row, num_threads) + 15) / 16 * 16;
}
JAXCOMM_LIMIT int64_t RailSharedBytes(int64_t num_rows, int64_t num_experts, int64_t choices_per_row,
                                      int32_t num_threads) {
  return RailMarksAt(num_experts, choices_per_row, num_threads) +
         RailMarkWords(num_rows) * static_cast<int64_t>(sizeof(uint64_t) + sizeof(int32_t));
}

// Whether the kernels take calls with `marked` rows of a dispatch: the kernel inside a node, and those between nodes
// too if `between_nodes`.
constexpr bool FitsRowKernels(int64_t marked, int64_t choices_per_token, int64_t num_experts, bool between_nodes) {
  return RowSharedBytes(num_experts, choices_per_token, kRowThreads) <= kMaxSharedBytes &&
         (!between_nodes || RailSharedBytes(marked, num_experts, choices_per_token, kRailThreads) <= kMaxSharedBytes);
}

// route_and_dispatch in one exchange of LL messages: sizes of a call on each rank.
struct OneExchange {
  int64_t num_ranks = 1;
  int64_t tokens = 0;
  int64_t choices = 0;  // of a token
  int64_t num_experts = 1;
  int64_t row_bytes = 0;
};

constexpr int64_t kMaxOneExchangeArenaBytes = 64 << 20;  // all arenas of a communicator take less than four times this
constexpr int64_t kMaxOneExchangeExperts = INT16_MAX;
constexpr int64_t kIdsPerUnit = 4;  // of an LL message

// Bytes of shared memory of a thread block. By rank: ids and their places among those of an expert; choices by expert,
// the last for unknown experts. By expert: rows of all ranks, and the first row. By rank and own expert: the first row.
JAXCOMM_LIMIT int64_t OneExchangeSharedBytes(const OneExchange& sizes) {
  const int64_t ids = (sizes.tokens * sizes.choices + kIdsPerUnit - 1) / kIdsPerUnit * kIdsPerUnit * sizes.num_ranks;
  const int64_t counts = (sizes.num_experts + 1) * sizes.num_ranks;
  return ids * static_cast<int64_t>(sizeof(int16_t) + sizeof(uint16_t)) +
         (counts + 3 * sizes.num_experts) * static_cast<int64_t>(sizeof(int32_t));
}

}  // namespace jaxcomm
