// Runs of a kernel on one arena, with a thread block per rank, in a program for memory_model.h.
#pragma once

#include "litmus_ranks.h"

namespace jaxcomm {
namespace cuda {

// Calls run() `runs` times in a thread block of `rank`. The rank writes its operand of `num_x` values just before the
// kernel begins, and reads and overwrites the result as soon as the kernel has ended, as XLA's kernels do. x(i, run)
// and y(i, run): the operand and the expected result.
template <typename T, typename X, typename Y, typename Run>
void AddRuns(memory_model::Program& program, int32_t rank, unsigned threads, int32_t runs, T* from, int64_t num_x, X x,
             T* to, int64_t num_y, Y y, Run run) {
  program.AddBlock(rank, 0, threads, [=] {
    for (int32_t number = 1; number <= runs; ++number) {
      for (int64_t i = 0; i < num_x && threadIdx.x == 0; ++i) from[i] = x(i, number);
      memory_model::EndKernel();
      run();
      memory_model::EndKernel();
      for (int64_t i = 0; i < num_y && threadIdx.x == 0; ++i) {
        memory_model::Require(to[i] == y(i, number), "a wrong result");
        to[i] = static_cast<T>(-1);
      }
      memory_model::EndKernel();
    }
  });
}

// Memory of the program with these values.
template <size_t kNum>
const int32_t* UploadTo(memory_model::Program& program, const int32_t (&values)[kNum], const char* name) {
  auto* const to = program.Words<int32_t>(kNum, name);
  for (size_t i = 0; i < kNum; ++i) to[i] = values[i];
  return to;
}

}  // namespace cuda
}  // namespace jaxcomm
