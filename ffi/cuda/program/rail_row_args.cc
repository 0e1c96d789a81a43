#include "cuda/program/rail_row_args.h"

#include <string>

namespace jaxcomm {
namespace cuda {

StatusOr<RailRowArgs> MakeRailRowArgs(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                                      int32_t max_channels) {
  const StatusOr<RowArgs> made = MakeRowArgs(spec, dtype, input_count, output_count, max_channels);
  JAXCOMM_RETURN_IF_ERROR(made.status());
  RailRowArgs args;
  args.rows = *made;
  args.at_home = spec.home != 0 || spec.per_choice != 0 || !HasSums(dtype);
  if (spec.weighted != 0) args.weight_bytes = dtype == DType::kF64 ? sizeof(double) : sizeof(float);
  return args;
}

StatusOr<RailRowArgs> WithBuffers(const RailRowArgs& args, const void* x, void* y, const RowOperands& operands) {
  const StatusOr<RowArgs> rows = WithBuffers(args.rows, x, y, operands);
  JAXCOMM_RETURN_IF_ERROR(rows.status());
  if (args.rows.num_choices > 0 && (operands.weights != nullptr) != (args.weight_bytes > 0)) {
    return InvalidArgumentError("the operand of weights does not fit the attribute `weighted`");
  }
  RailRowArgs whole = args;
  whole.rows = *rows;
  return whole;
}

}  // namespace cuda
}  // namespace jaxcomm
