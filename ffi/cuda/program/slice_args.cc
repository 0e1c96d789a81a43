#include "cuda/program/slice_args.h"

#include <algorithm>
#include <string>

#include "plan/channels.h"
#include "plan/partition.h"

namespace jaxcomm::cuda {
namespace {

// The kernel numbers the slices of all ranks with 31 bits.
constexpr int64_t kMaxSlices = int64_t{1} << 30;

}  // namespace

StatusOr<SliceArgs> MakeSliceArgs(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                                  int32_t max_channels) {
  SliceArgs args;
  const int64_t row = spec.row_count;
  if (row < 0 || (row > 0 && (input_count % row != 0 || output_count % row != 0))) {
    return InvalidArgumentError("rows of " + std::to_string(row) + " elements do not fit the operands");
  }
  if (row == 0) return args;  // no data
  args.row_bytes = row * ItemBytes(dtype);
  args.input_rows = input_count / row;
  args.output_rows = output_count / row;
  if (spec.max_sms > 0) max_channels = static_cast<int32_t>(std::min<int64_t>(max_channels, spec.max_sms));
  // Sizes are known at run time only. A rank sends at most its operand if no row is sent twice.
  const int64_t bytes_per_pair = CeilDiv(std::min(args.input_rows, args.output_rows) * args.row_bytes, spec.group_size);
  args.num_channels = NumSliceChannels(bytes_per_pair, max_channels);
  return args;
}

StatusOr<SliceArgs> WithBuffers(SliceArgs args, const void* x, void* y, const RowOperands& operands) {
  const int64_t num_ranks = args.comm.local.size;
  const int64_t per_rank = operands.table_count / (4 * num_ranks);
  if (per_rank * 4 * num_ranks != operands.table_count || per_rank % num_ranks != 0 ||
      per_rank * num_ranks > kMaxSlices) {
    return InvalidArgumentError("a table of " + std::to_string(operands.table_count) +
                                " integers does not fit a group of " + std::to_string(num_ranks) + " ranks");
  }
  args.slices_per_rank = static_cast<int32_t>(per_rank);
  args.x = static_cast<const char*>(x);
  args.y = static_cast<char*>(y);
  args.table = operands.table;
  args.int64_table = operands.int64_table;
  return args;
}

}  // namespace jaxcomm::cuda
