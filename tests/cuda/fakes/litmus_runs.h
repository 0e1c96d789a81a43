// Runs of a kernel on one arena, with a thread block per rank, in a program for memory_model.h.
#pragma once

#include <vector>

#include "litmus_ranks.h"

namespace jaxcomm {
namespace cuda {

// A rank in a run.
inline float LitmusValue(int32_t rank, int32_t run) { return static_cast<float>(10 * run + rank + 1); }

// Calls run() `runs` times in a thread block of `rank`. The rank writes its operand of `num_x` floats just before the
// kernel begins, and reads and overwrites the result as soon as the kernel has ended, as XLA's kernels do. x(i, run)
// and y(i, run): the operand and the expected result.
template <typename X, typename Y, typename Run>
void AddRuns(memory_model::Program& program, int32_t rank, unsigned threads, int32_t runs, const char* operand,
             int32_t num_x, X x, char* result, int32_t num_y, Y y, Run run) {
  auto* const from = reinterpret_cast<float*>(const_cast<char*>(operand));
  auto* const to = reinterpret_cast<float*>(result);
  program.AddBlock(rank, 0, threads, [=] {
    for (int32_t number = 1; number <= runs; ++number) {
      for (int32_t i = 0; i < num_x && threadIdx.x == 0; ++i) from[i] = x(i, number);
      memory_model::EndKernel();
      run();
      memory_model::EndKernel();
      for (int32_t i = 0; i < num_y && threadIdx.x == 0; ++i) {
        memory_model::Require(to[i] == y(i, number), "a wrong result");
        to[i] = -1;
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

// Args: arguments of the kernel of one rank of a node, with operand `x` and result `y` of float.
template <typename Args>
struct LitmusRuns {
  LitmusRuns(int32_t num_ranks, int64_t arena_bytes)
      : ranks(program, num_ranks, 1), arena(ranks.Window(program, arena_bytes, "arena")), args(num_ranks) {
    for (int32_t r = 0; r < num_ranks; ++r) {
      args[r].comm = ranks.comm(r);
      args[r].comm.arena = arena;
      args[r].comm.arena_bytes = arena_bytes;
    }
  }

  template <size_t kNum>
  const int32_t* Upload(const int32_t (&values)[kNum], const char* name) {
    return UploadTo(program, values, name);
  }

  // Calls run(args, shared memory) twice, in all executions. x(rank, i, run) and y(rank, i, run): as in AddRuns.
  template <typename X, typename Y, typename Run>
  void Check(unsigned threads, int64_t shared_bytes, int32_t num_x, X x, int32_t num_y, Y y, Run run) {
    for (int32_t r = 0; r < static_cast<int32_t>(args.size()); ++r) {
      Args& own = args[r];
      own.x = reinterpret_cast<char*>(program.Words<float>(num_x, "x"));
      own.y = reinterpret_cast<char*>(program.Words<float>(num_y, "y"));
      char* const shared = program.Take(shared_bytes, "shared memory");
      AddRuns(
          program, r, threads, 2, own.x, num_x, [=](int32_t i, int32_t number) { return x(r, i, number); }, own.y,
          num_y, [=](int32_t i, int32_t number) { return y(r, i, number); }, [=, &own] { run(own, shared); });
    }
    ExpectSound(program);
  }

  memory_model::Program program;
  LitmusRanks ranks;
  const device::Window arena;
  std::vector<Args> args;  // by rank
};

}  // namespace cuda
}  // namespace jaxcomm
