#include "plan/plan.h"

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

}  // namespace jaxcomm
