// Expected outputs of every collective, for native tests: int32 elements, sums.
#pragma once

#include <cstdint>
#include <vector>

#include "../../ffi/plan/plan.h"

namespace jaxcomm {

using Values = std::vector<std::vector<int32_t>>;  // by rank

inline Values Expected(const Request& request, const Values& inputs) {
  const int32_t n = request.geometry.num_ranks();
  const int64_t b = request.block_count;
  Values outputs(n, std::vector<int32_t>(OutputCount(request)));
  for (int32_t r = 0; r < n; ++r) {
    for (int64_t i = 0; i < static_cast<int64_t>(outputs[r].size()); ++i) {
      int32_t& out = outputs[r][i];
      switch (request.collective) {
        case Collective::kAllToAll:
        case Collective::kAllToAllV:
        case Collective::kDispatch:
          out = inputs[i / b][r * b + i % b];
          break;
        case Collective::kAllGather:
          out = inputs[i / b][i % b];
          break;
        case Collective::kAllReduce:
          for (const auto& input : inputs) out += input[i];
          break;
        case Collective::kReduceScatter:
        case Collective::kCombine:
          for (const auto& input : inputs) out += input[r * b + i];
          break;
        case Collective::kPermute:
          out = request.source_of[r] < 0 ? 0 : inputs[request.source_of[r]][i];
          break;
        case Collective::kBroadcast:
          out = inputs[request.root][i];
          break;
        case Collective::kBarrier:
        case Collective::kReshard:
          break;
      }
    }
  }
  return outputs;
}

}  // namespace jaxcomm
