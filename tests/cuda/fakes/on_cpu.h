// What the CPU's executor makes of a plan: what kernels that walk none are compared with.
#pragma once

#include <vector>

#include "../../../ffi/cpu/executor.h"
#include "../../../ffi/cpu/reduce.h"
#include "../../../ffi/plan/algorithms.h"
#include "../../check.h"
#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

inline std::vector<Bytes> OnCpu(const char* algorithm, const Request& request, Runs runs, Operation operation,
                                const std::vector<char*>& inputs) {
  const int64_t item = ItemBytes(operation.dtype);
  const std::vector<Plan> plans = BuildAll(*FindAlgorithm(request.collective, algorithm), request);
  const auto layout = [&](int64_t count, int64_t run) {
    return BlockLayout{count / request.block_count, request.block_count, run > 0 ? run : request.block_count};
  };
  const int64_t output_count = OutputCount(request);
  std::vector<Bytes> outputs(inputs.size(), Bytes(output_count * item));
  std::vector<RankBuffers> buffers;
  for (size_t r = 0; r < inputs.size(); ++r) buffers.push_back({inputs[r], outputs[r].data(), nullptr});
  const ReduceFn reduce = Reduces(request.collective) ? FindReduce(operation.dtype, operation.op) : nullptr;
  Execution execution(
      Program::Make(plans, layout(InputCount(request), runs.input), layout(output_count, runs.output), item, reduce),
      buffers);
  CHECK(execution.Work());
  return outputs;
}

}  // namespace cuda
}  // namespace jaxcomm
