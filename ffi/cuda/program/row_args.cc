#include "cuda/program/row_args.h"

#include <algorithm>
#include <limits>
#include <string>

#include "plan/channels.h"
#include "plan/partition.h"

namespace jaxcomm::cuda {
namespace {

// The kernel counts the units of a row with 31 bits.
constexpr int64_t kMaxPieceBytes = int64_t{1} << 30;

}  // namespace

bool HasSums(DType dtype) {
  return dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32 || dtype == DType::kF64;
}

StatusOr<RowArgs> MakeRowArgs(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                              int32_t max_channels) {
  RowArgs args;
  args.combines = TraitsOf(spec.collective).SumsTokens();
  args.dtype = dtype;
  const int64_t row = spec.row_count, choices = spec.per_choice != 0 ? 1 : spec.choices;
  if (row < 0 || choices < 1 || spec.num_experts < 1 || spec.num_experts % spec.group_size != 0 ||
      (row > 0 && (input_count % row != 0 || output_count % row != 0))) {
    return InvalidArgumentError("rows of " + std::to_string(row) + " elements, " + std::to_string(choices) +
                                " choices and " + std::to_string(spec.num_experts) +
                                " experts do not fit the operands");
  }
  if (row == 0) return args;  // no data
  args.row_bytes = row * ItemBytes(dtype);
  args.num_rows = (args.combines ? output_count : input_count) / row;
  args.num_slots = (args.combines ? input_count : output_count) / row;
  args.num_choices = args.num_rows * choices;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (std::max({args.num_choices, args.num_slots, spec.num_experts, choices}) > kMost) {
    return InvalidArgumentError("more than 2^31 rows, choices or experts");
  }
  args.num_ranks = static_cast<int32_t>(spec.group_size);
  args.num_experts = static_cast<int32_t>(spec.num_experts);
  args.choices_per_row = static_cast<int32_t>(choices);
  if (args.combines && (choices > 1 || spec.weighted != 0) && !HasSums(dtype)) {
    return InvalidArgumentError(std::string("GPUs do not add rows of ") + Name(dtype));
  }
  if (spec.max_sms > 0) max_channels = static_cast<int32_t>(std::min<int64_t>(max_channels, spec.max_sms));
  const int64_t bytes_per_pair = CeilDiv(args.num_choices * args.row_bytes, spec.group_size);
  const RowPieces pieces = PiecesOf(args.row_bytes, bytes_per_pair, max_channels);
  args.piece_bytes = pieces.piece_bytes;
  args.num_channels = pieces.num_channels;
  if (args.piece_bytes > kMaxPieceBytes) {
    return InvalidArgumentError("rows of " + std::to_string(args.row_bytes) + " bytes are too long for " +
                                std::to_string(args.num_channels) + " thread blocks");
  }
  return args;
}

StatusOr<RowArgs> WithBuffers(RowArgs args, const void* x, void* y, const RowOperands& operands) {
  const int64_t num_ranks = args.comm.local.size;
  if (operands.table_count != num_ranks * 4 * args.num_experts || operands.index_count != args.num_choices) {
    return InvalidArgumentError("a table of " + std::to_string(operands.table_count) + " integers and a routing of " +
                                std::to_string(operands.index_count) + " choices do not fit " +
                                std::to_string(num_ranks) + " ranks, " + std::to_string(args.num_experts) +
                                " experts and " + std::to_string(args.num_choices) + " choices");
  }
  args.x = static_cast<const char*>(x);
  args.y = static_cast<char*>(y);
  args.table = static_cast<const int32_t*>(operands.table);
  args.index = static_cast<const int32_t*>(operands.index);
  args.expert = static_cast<const int32_t*>(operands.expert);
  args.weights = operands.weights;
  return args;
}

}  // namespace jaxcomm::cuda
