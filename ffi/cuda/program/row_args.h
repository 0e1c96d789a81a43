// Arguments of the kernel of dispatch and combine inside a node. Plain data, which the host fills in without CUDA.
//
// Words: a slot is a row of a rank's experts. A choice is packed if it is counted expert by expert, as the table of
// slices counts the rows of a sender (plan/slices.h).
#pragma once

#include <cstdint>

#include "common/call_spec.h"
#include "common/dtype.h"
#include "common/status.h"
#include "include/jaxcomm/comm.h"
#include "plan/row_limits.h"

namespace jaxcomm::cuda {

// One rank's call. Pointers point to device memory. The arena of `comm` has at least ArenaBytes().
struct RowArgs {
  device::Comm comm;
  const char* x = nullptr;          // dispatch: rows to send; combine: slots
  char* y = nullptr;                // dispatch: slots; combine: one row per token, or per choice
  const int32_t* table = nullptr;   // of plan/slices.h: (ranks, 4, num_experts), the same on all ranks
  const int32_t* index = nullptr;   // dispatch: the row of x for each packed choice; combine: the slot of each choice
  const int32_t* expert = nullptr;  // combine: of each choice that has a slot
  const void* weights = nullptr;    // combine: f64 for rows of f64, otherwise f32; null: ones
  uint64_t* state = nullptr;        // of this call on this rank; 0 between executions
  int64_t num_rows = 0;             // of dispatch's operand: tokens, or choices if each has a row of its own
  int64_t num_slots = 0;            // of a rank
  int64_t num_choices = 0;          // of a rank
  int64_t row_bytes = 0;
  int64_t piece_bytes = 0;  // of every row, for each channel but the last
  int32_t num_ranks = 1;
  int32_t num_experts = 1;      // of all ranks
  int32_t choices_per_row = 1;  // of a row of dispatch's operand
  int32_t num_channels = 1;
  DType dtype = DType::kU8;  // type of sums
  bool combines = false;
};

// Whether a token may have several choices at one rank, which reads its row once. (A rank with one expert has several
// only if a token names the expert twice: then it reads the row twice.)
JAXCOMM_BOTH bool GroupsPlaces(const RowArgs& args) {
  return !args.combines && args.choices_per_row > 1 && args.num_experts > args.num_ranks;
}

// dispatch: the slot of a row at the rank of the experts. Row -1: zeros.
struct alignas(8) RowPlace {
  int32_t row, slot;
};

// The arena. combine: the packed choices. dispatch: the rows to send; then, for each channel, a place per packed
// choice, and a counter for each rank and row to send.
JAXCOMM_BOTH int64_t ArenaRowsBytes(const RowArgs& args) {
  const int64_t rows = args.combines ? args.num_choices : args.num_rows;
  return (rows * args.row_bytes + 255) / 256 * 256;
}
JAXCOMM_BOTH int64_t NumPlaceCounters(const RowArgs& args) {
  return GroupsPlaces(args) ? args.num_ranks * args.num_rows : 0;
}
JAXCOMM_BOTH int64_t ArenaPlacesBytes(const RowArgs& args) {
  const int64_t places = args.num_choices * static_cast<int64_t>(sizeof(RowPlace));
  return (places + NumPlaceCounters(args) * static_cast<int64_t>(sizeof(uint64_t)) + 255) / 256 * 256;
}
JAXCOMM_BOTH int64_t ArenaBytes(const RowArgs& args) {
  return ArenaRowsBytes(args) + (args.combines ? 0 : args.num_channels * ArenaPlacesBytes(args));
}

// A row that a thread block copies. From null: zeros.
struct RowMove {
  char* to;
  const char* from;
};

// row_limits.h for the arguments of a call.
JAXCOMM_BOTH int64_t RowMovesBytes(const RowArgs& args, int32_t num_threads) {
  return ::jaxcomm::RowMovesBytes(args.choices_per_row, num_threads);
}
JAXCOMM_BOTH int64_t RowSharedBytes(const RowArgs& args, int32_t num_threads) {
  return ::jaxcomm::RowSharedBytes(args.num_experts, args.choices_per_row, num_threads);
}
static_assert(sizeof(RowMove) == kRowMoveBytes, "the limits in ffi/plan count the moves");

// The buffers of a call besides its first operand and its result.
struct RowOperands {
  const void* table = nullptr;
  int64_t table_count = 0;
  bool int64_table = false;  // integers of 64 bits; all_to_all_v only
  const void* index = nullptr;
  int64_t index_count = 0;
  const void* expert = nullptr;
  const void* weights = nullptr;
};

// Whether the kernels add rows of this type.
bool HasSums(DType dtype);

// Makes the arguments that are equal in all executions of a call, except for the Comm. Fails if the sizes of the
// buffers do not fit each other. `max_channels`: of the communicator.
StatusOr<RowArgs> MakeRowArgs(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                              int32_t max_channels);
// Adds XLA's buffers of this execution. Fails if their sizes do not fit.
StatusOr<RowArgs> WithBuffers(RowArgs args, const void* x, void* y, const RowOperands& operands);

}  // namespace jaxcomm::cuda
