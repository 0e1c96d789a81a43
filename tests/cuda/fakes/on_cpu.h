// Results of a plan in the CPU's executor, for comparison with kernels that run no plan.
#pragma once

#include <vector>

#include "../../../ffi/cpu/executor.h"
#include "../../../ffi/cpu/reduce.h"
#include "../../../ffi/plan/algorithms.h"
#include "../../check.h"
#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

inline std::vector<Bytes> OnCpu(const char* algorithm, const Request& request, ContiguousCounts contiguous,
                                Operation operation, const std::vector<char*>& inputs) {
  const int64_t item = ItemBytes(operation.dtype);
  const std::vector<Plan> plans = BuildAll(*FindAlgorithm(request.collective, algorithm), request);
  const auto layout = [&](int64_t count, int64_t run) {
    return BlockLayout{count / request.block_count, request.block_count, run > 0 ? run : request.block_count};
  };
  const int64_t output_count = OutputCount(request);
  std::vector<Bytes> outputs(inputs.size(), Bytes(output_count * item));
  std::vector<Bytes> scratch;
  std::vector<RankBuffers> buffers;
  for (size_t r = 0; r < inputs.size(); ++r) {
    scratch.emplace_back(plans[r].scratch_count * item);
    buffers.push_back({inputs[r], outputs[r].data(), scratch[r].data()});
  }
  const ReduceFn reduce = Reduces(request.collective) ? FindReduce(operation.dtype, operation.op) : nullptr;
  Execution execution(Program::Make(plans, layout(InputCount(request), contiguous.input),
                                    layout(output_count, contiguous.output), item, reduce),
                      buffers);
  CHECK(execution.Work());
  return outputs;
}

}  // namespace cuda
}  // namespace jaxcomm
