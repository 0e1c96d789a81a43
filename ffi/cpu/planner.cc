#include "cpu/planner.h"

#include <algorithm>

#include "plan/resolve.h"

namespace jaxcomm {
namespace {

BlockLayout Blocks(int64_t count, int64_t block_count, int64_t contiguous_count) {
  BlockLayout layout;
  layout.block_count = std::max<int64_t>(block_count, 1);
  layout.num_blocks = std::max<int64_t>(count / layout.block_count, 1);
  layout.contiguous_count = contiguous_count > 0 ? contiguous_count : layout.block_count;
  return layout;
}

}  // namespace

StatusOr<std::shared_ptr<const Program>> MakeProgram(const CallSpec& spec, const CostParams& cost_params,
                                                     const NodeResources& resources, DType dtype, int64_t input_count,
                                                     int64_t output_count) {
  Capabilities capabilities;
  capabilities.machine = MachineOf(cost_params, resources, spec.group_size, spec.ranks_per_node);
  const StatusOr<Resolution> resolution =
      Resolve(spec, {dtype, input_count, output_count}, {resources.scope, spec.ranks_per_node}, capabilities);
  JAXCOMM_RETURN_IF_ERROR(resolution.status());
  const Request& request = resolution->request;
  const ReduceFn reduce = Reduces(spec.collective) ? FindReduce(dtype, spec.reduce_op) : nullptr;
  const int64_t item_bytes = ItemBytes(dtype);
  if (OfLists(spec.collective)) {
    const auto program = Program::MakeOfLists(BuildAll(*resolution->plan, request), input_count, output_count,
                                              spec.row_count, item_bytes, static_cast<int32_t>(dtype));
    if (TraitsOf(spec.collective).elements != ElementKind::kSlices) {
      if (spec.choices < 1 || spec.num_experts < 1 || spec.num_experts % spec.group_size != 0) {
        return InvalidArgumentError("attributes of the routing are not valid");
      }
      const bool combines = TraitsOf(spec.collective).SumsTokens();
      TokenLayout& tokens = program->tokens;
      const auto rows_of = [&](int64_t count) { return spec.row_count > 0 ? count / spec.row_count : 0; };
      tokens.choices = spec.choices;
      tokens.experts_per_rank = spec.num_experts / spec.group_size;
      tokens.num_rows = rows_of(combines ? output_count : input_count);
      tokens.num_slots = rows_of(combines ? input_count : output_count);
      tokens.row_bytes = spec.row_count * item_bytes;
      tokens.per_choice = spec.per_choice != 0;
      tokens.combines = combines;
      tokens.hierarchical = resolution->plan->supports.hierarchical;
      tokens.num_nodes = request.geometry.num_nodes;
      tokens.ranks_per_node = request.geometry.ranks_per_node;
      if (combines) {
        tokens.rounds_nodes = spec.home == 0 && spec.per_choice == 0;
        tokens.weight_bytes = spec.weighted == 0 ? 0 : dtype == DType::kF64 ? 8 : 4;
        tokens.combine = FindCombine(dtype);
        program->reduce = FindReduce(dtype, ReduceOp::kSum);
      } else {
        program->stream = tokens.num_slots * tokens.row_bytes * spec.group_size >= kStreamBytes;
      }
      // At most: a row for each choice.
      program->moved_bytes = std::min(tokens.num_choices(), tokens.num_slots) * tokens.row_bytes * spec.group_size;
    }
    program->algorithm = resolution->algorithm;
    return std::shared_ptr<const Program>(program);
  }
  const auto layout_of = [&](int64_t count, int64_t contiguous_count) {
    return request.boxes != nullptr ? BlockLayout() : Blocks(count, request.block_count, contiguous_count);
  };
  const auto program = Program::Make(
      BuildAll(*resolution->plan, request), layout_of(input_count, spec.input_contiguous_count),
      layout_of(output_count, spec.output_contiguous_count), item_bytes, reduce, static_cast<int32_t>(dtype));
  program->boxes = request.boxes;
  program->algorithm = resolution->algorithm;
  return std::shared_ptr<const Program>(program);
}

}  // namespace jaxcomm
