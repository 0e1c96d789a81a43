#include "cpu/planner.h"

#include <algorithm>

#include "plan/request.h"
#include "plan/select.h"

namespace jaxcomm {
namespace {

BlockLayout Blocks(int64_t count, int64_t block_count, int64_t run) {
  BlockLayout layout;
  layout.block_count = std::max<int64_t>(block_count, 1);
  layout.num_blocks = std::max<int64_t>(count / layout.block_count, 1);
  layout.run = run > 0 ? run : layout.block_count;
  return layout;
}

}  // namespace

StatusOr<std::shared_ptr<const Program>> MakeProgram(const CallSpec& spec, const CostParams& cost_params,
                                                     const NodeResources& resources, DType dtype, int64_t input_count,
                                                     int64_t output_count) {
  if (Reduces(spec.collective) && !CanReduce(dtype, spec.reduce_op)) {
    return InvalidArgumentError(std::string("elements of ") + Name(dtype) + " cannot be reduced by this operation");
  }
  const ReduceFn reduce = Reduces(spec.collective) ? FindReduce(dtype, spec.reduce_op) : nullptr;
  const Geometry geometry = CpuGeometry(resources.scope, spec.group_size, spec.ranks_per_node);
  const StatusOr<Request> request = MakeRequest(spec, geometry, input_count, output_count);
  if (!request.ok()) return request.status();
  const int64_t item_bytes = ItemBytes(dtype);
  const Choice choice = Select(*request, spec.algorithm, item_bytes,
                               MachineOf(cost_params, resources, spec.group_size, spec.ranks_per_node));
  if (choice.algorithm == nullptr) return InvalidArgumentError(choice.reason);
  return Program::Make(BuildAll(*choice.algorithm, choice.request),
                       Blocks(input_count, request->block_count, spec.input_contiguous_count),
                       Blocks(output_count, request->block_count, spec.output_contiguous_count), item_bytes, reduce,
                       static_cast<int32_t>(dtype));
}

}  // namespace jaxcomm
