#include "cuda/program/inter_node_row_args.h"

#include "cuda/program/assign_or_return.h"

namespace jaxcomm::cuda {

StatusOr<InterNodeRowArgs> MakeInterNodeRowArgs(const CallSpec& spec, DType dtype, int64_t input_count,
                                                int64_t output_count, int32_t max_channels) {
  InterNodeRowArgs args;
  JAXCOMM_ASSIGN_OR_RETURN(args.rows, MakeRowArgs(spec, dtype, input_count, output_count, max_channels));
  args.sums_at_source = spec.home != 0 || spec.per_choice != 0 || !HasSums(dtype);
  if (spec.weighted != 0) args.weight_bytes = dtype == DType::kF64 ? sizeof(double) : sizeof(float);
  return args;
}

StatusOr<InterNodeRowArgs> WithBuffers(const InterNodeRowArgs& args, const void* x, void* y,
                                       const RowOperands& operands) {
  InterNodeRowArgs whole = args;
  JAXCOMM_ASSIGN_OR_RETURN(whole.rows, WithBuffers(args.rows, x, y, operands));
  if (args.rows.num_choices > 0 && (operands.weights != nullptr) != (args.weight_bytes > 0)) {
    return InvalidArgumentError("the operand of weights does not fit the attribute `weighted`");
  }
  return whole;
}

}  // namespace jaxcomm::cuda
