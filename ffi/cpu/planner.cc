#include "planner.h"

#include <algorithm>

#include "plan/request.h"
#include "plan/select.h"

namespace jaxcomm {
namespace {

Layout Blocks(int64_t count, int64_t block_count, int64_t run) {
  Layout layout;
  layout.block_count = std::max<int64_t>(block_count, 1);
  layout.num_blocks = std::max<int64_t>(count / layout.block_count, 1);
  layout.run = run > 0 ? run : layout.block_count;
  return layout;
}

}  // namespace

std::shared_ptr<const Program> MakeProgram(const CallSpec& spec, const Figures& figures, const Host& host, DType dtype,
                                           int64_t input_count, int64_t output_count, std::string* error) {
  if (Reduces(spec.collective) && !CanReduce(dtype, spec.reduce_op)) {
    *error = "elements of this type can't be reduced";
    return nullptr;
  }
  const ReduceFn reduce = Reduces(spec.collective) ? FindReduce(dtype, spec.reduce_op) : nullptr;
  const Geometry geometry = CpuGeometry(host.reach, spec.group_size, spec.ranks_per_node);
  Request request;
  if (!MakeRequest(spec, geometry, input_count, output_count, &request, error)) return nullptr;
  const int64_t item_bytes = ItemBytes(dtype);
  const Choice choice =
      Select(request, spec.algorithm, item_bytes, MachineOf(figures, host, spec.group_size, spec.ranks_per_node));
  if (choice.algorithm == nullptr) {
    *error = choice.reason;
    return nullptr;
  }
  return Program::Make(
      BuildAll(*choice.algorithm, choice.request), Blocks(input_count, request.block_count, spec.input_run),
      Blocks(output_count, request.block_count, spec.output_run), item_bytes, reduce, static_cast<int32_t>(dtype));
}

}  // namespace jaxcomm
