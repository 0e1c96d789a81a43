#include "plan/plan.h"

#include <cstddef>

#include "plan/boxes.h"

namespace jaxcomm {

namespace {

int64_t ElementCount(BufferBlocks blocks, const Request& request) {
  if (blocks == BufferBlocks::kNone) return 0;
  return blocks == BufferBlocks::kOne ? request.block_count : request.geometry.num_ranks() * request.block_count;
}

}  // namespace

int64_t InputCount(const Request& request, int32_t rank) {
  if (request.boxes != nullptr) return request.boxes->input_count(rank);
  return ElementCount(TraitsOf(request.collective).input, request);
}
int64_t OutputCount(const Request& request, int32_t rank) {
  if (request.boxes != nullptr) return request.boxes->output_count(rank);
  return ElementCount(TraitsOf(request.collective).output, request);
}

std::vector<size_t> WaitsFirst(const Plan& plan, int64_t short_move) {
  std::vector<size_t> order;
  std::ptrdiff_t first_move = 0;  // in `order`, of the short moves at its end
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    if (step.kind == StepKind::kWait) {
      order.insert(order.begin() + first_move++, i);
      continue;
    }
    order.push_back(i);
    if (!IsMove(step.kind) || step.count > short_move) first_move = static_cast<std::ptrdiff_t>(order.size());
  }
  return order;
}

}  // namespace jaxcomm
