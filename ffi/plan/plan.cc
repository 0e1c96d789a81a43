#include "plan/plan.h"

#include <cstddef>

namespace jaxcomm {

int64_t InputCount(const Request& request) {
  switch (request.collective) {
    case Collective::kAllToAll:
    case Collective::kAllToAllV:
    case Collective::kDispatch:
    case Collective::kReduceScatter:
    case Collective::kCombine:
      return request.geometry.num_ranks() * request.block_count;
    case Collective::kAllGather:
    case Collective::kAllReduce:
    case Collective::kPermute:
    case Collective::kBroadcast:
      return request.block_count;
    case Collective::kBarrier:
      return 0;
  }
  return 0;
}

int64_t OutputCount(const Request& request) {
  switch (request.collective) {
    case Collective::kAllToAll:
    case Collective::kAllToAllV:
    case Collective::kDispatch:
    case Collective::kAllGather:
      return request.geometry.num_ranks() * request.block_count;
    case Collective::kAllReduce:
    case Collective::kReduceScatter:
    case Collective::kCombine:
    case Collective::kPermute:
    case Collective::kBroadcast:
      return request.block_count;
    case Collective::kBarrier:
      return 0;
  }
  return 0;
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
