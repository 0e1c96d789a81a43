#include "plan/request.h"

#include <algorithm>
#include <string>

#include "plan/boxes.h"

namespace jaxcomm {
namespace {

// Elements of one block, from the buffer that holds exactly one block if there is one.
int64_t BlockCount(const CollectiveTraits& traits, int64_t num_ranks, int64_t input_count, int64_t output_count) {
  if (traits.OfLists()) return 1;
  if (traits.input == BufferBlocks::kNone) return 0;
  if (traits.input == BufferBlocks::kOne) return input_count;
  return traits.output == BufferBlocks::kOne ? output_count : input_count / num_ranks;
}

Geometry MakeGeometry(int64_t num_ranks, int64_t ranks_per_node) {
  Geometry geometry;
  geometry.ranks_per_node = static_cast<int32_t>(ranks_per_node);
  geometry.num_nodes = static_cast<int32_t>(num_ranks / ranks_per_node);
  return geometry;
}

}  // namespace

Geometry CpuGeometry(Scope scope, int64_t num_ranks, int64_t ranks_per_node) {
  Geometry geometry = MakeGeometry(num_ranks, ranks_per_node);
  geometry.all_addressable = scope != Scope::kNetwork;
  geometry.pull = scope != Scope::kProcess;
  return geometry;
}

Geometry GpuGeometry(int64_t num_ranks, int64_t ranks_per_node, bool multimem) {
  Geometry geometry = MakeGeometry(num_ranks, ranks_per_node);
  geometry.all_addressable = geometry.num_nodes == 1;
  geometry.pull = true;
  geometry.multimem = multimem;
  geometry.nvlink = true;
  return geometry;
}

StatusOr<Request> MakeRequest(const CallSpec& spec, const Geometry& geometry, int64_t input_count,
                              int64_t output_count) {
  const CollectiveTraits& traits = TraitsOf(spec.collective);
  Request request;
  request.collective = spec.collective;
  request.geometry = geometry;
  request.block_count = BlockCount(traits, spec.group_size, input_count, output_count);
  if (traits.OfBoxes()) {
    const auto decode = [&](const std::vector<int64_t>& numbers) { return DecodeBoxes(numbers, spec.group_size); };
    StatusOr<std::shared_ptr<const Boxes>> boxes =
        MakeBoxes(decode(spec.sources), decode(spec.destinations), geometry, spec.input_shape, spec.output_shape);
    JAXCOMM_RETURN_IF_ERROR(boxes.status());
    request.boxes = *std::move(boxes);
    request.block_count = 0;
    for (int32_t rank = 0; rank < geometry.num_ranks(); ++rank) {
      request.block_count = std::max(request.block_count, OutputCount(request, rank));
      if (request.boxes->input_span(rank) <= input_count && request.boxes->output_span(rank) <= output_count) continue;
      return InvalidArgumentError("buffers of " + std::to_string(input_count) + " and " + std::to_string(output_count) +
                                  " elements are too small for the boxes of rank " + std::to_string(rank));
    }
    return request;
  }
  request.root = spec.root;
  request.source_of = spec.source_of;
  const bool sized = traits.input != BufferBlocks::kNone && !traits.OfLists();
  if (sized && (InputCount(request) != input_count || OutputCount(request) != output_count)) {
    return InvalidArgumentError("buffers of " + std::to_string(input_count) + " and " + std::to_string(output_count) +
                                " elements do not match a group of " + std::to_string(spec.group_size) + " ranks");
  }
  for (const int64_t count : {spec.input_contiguous_count, spec.output_contiguous_count}) {
    if (count <= 0) continue;
    request.fragmented = request.fragmented || count != request.block_count;
    if (request.block_count % count == 0) continue;
    return InvalidArgumentError("blocks of " + std::to_string(request.block_count) +
                                " elements cannot be split into contiguous fragments of " + std::to_string(count));
  }
  return request;
}

}  // namespace jaxcomm
