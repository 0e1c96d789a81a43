#include "cuda/program/inter_node_row_args.h"

#include <string>

namespace jaxcomm {
namespace cuda {

StatusOr<InterNodeRowArgs> MakeInterNodeRowArgs(const CallSpec& spec, DType dtype, int64_t input_count,
                                                int64_t output_count, int32_t max_channels) {
  const StatusOr<RowArgs> made = MakeRowArgs(spec, dtype, input_count, output_count, max_channels);
  JAXCOMM_RETURN_IF_ERROR(made.status());
  InterNodeRowArgs args;
  args.rows = *made;
  args.sums_at_source = spec.home != 0 || spec.per_choice != 0 || !HasSums(dtype);
  if (spec.weighted != 0) args.weight_bytes = dtype == DType::kF64 ? sizeof(double) : sizeof(float);
  return args;
}

StatusOr<InterNodeRowArgs> WithBuffers(const InterNodeRowArgs& args, const void* x, void* y,
                                       const RowOperands& operands) {
  const StatusOr<RowArgs> rows = WithBuffers(args.rows, x, y, operands);
  JAXCOMM_RETURN_IF_ERROR(rows.status());
  if (args.rows.num_choices > 0 && (operands.weights != nullptr) != (args.weight_bytes > 0)) {
    return InvalidArgumentError("the operand of weights does not fit the attribute `weighted`");
  }
  InterNodeRowArgs whole = args;
  whole.rows = *rows;
  return whole;
}

}  // namespace cuda
}  // namespace jaxcomm
