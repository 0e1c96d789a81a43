// Two runs of a kernel on one arena, with a thread block per rank, in a program for memory_model.h.
#pragma once

#include <vector>

#include "litmus_ranks.h"

namespace jaxcomm {
namespace cuda {

// Args: arguments of the kernel of one rank, with operand `x` and result `y` of float.
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
    auto* const to = program.Words<int32_t>(kNum, name);
    for (size_t i = 0; i < kNum; ++i) to[i] = values[i];
    return to;
  }

  // Calls run(args, shared memory) in all executions. A rank writes its operand just before the kernel begins, and
  // reads and overwrites the result as soon as the kernel has ended, as XLA's kernels do. x(rank, i, run) and
  // y(rank, i, run): the operand and the expected result.
  template <typename X, typename Y, typename Run>
  void Check(unsigned threads, int64_t shared_bytes, int32_t num_x, X x, int32_t num_y, Y y, Run run) {
    std::vector<char*> shared;
    for (Args& own : args) {
      own.x = reinterpret_cast<char*>(program.Words<float>(num_x, "x"));
      own.y = reinterpret_cast<char*>(program.Words<float>(num_y, "y"));
      shared.push_back(program.Take(shared_bytes, "shared memory"));
    }
    for (int32_t r = 0; r < static_cast<int32_t>(args.size()); ++r) {
      program.AddBlock(r, 0, threads, [=, &shared] {
        auto* const operand = reinterpret_cast<float*>(const_cast<char*>(args[r].x));
        auto* const result = reinterpret_cast<float*>(args[r].y);
        for (int32_t number = 1; number <= 2; ++number) {
          for (int32_t i = 0; i < num_x && threadIdx.x == 0; ++i) operand[i] = x(r, i, number);
          memory_model::EndKernel();
          run(args[r], shared[r]);
          memory_model::EndKernel();
          for (int32_t i = 0; i < num_y && threadIdx.x == 0; ++i) {
            memory_model::Require(result[i] == y(r, i, number), "a wrong result");
            result[i] = -1;
          }
          memory_model::EndKernel();
        }
      });
    }
    ExpectSound(program);
  }

  memory_model::Program program;
  LitmusRanks ranks;
  const device::Window arena;
  std::vector<Args> args;  // by rank
};

// A rank in a run.
inline float LitmusValue(int32_t rank, int32_t run) { return static_cast<float>(10 * run + rank + 1); }

}  // namespace cuda
}  // namespace jaxcomm
