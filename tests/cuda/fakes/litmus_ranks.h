// Ranks in a program for memory_model.h.
#pragma once

#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "../../../ffi/include/jaxcomm/device.h"
#include "../../check.h"
#include "memory_model.h"
#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

class ProgramMemory : public Memory {
 public:
  explicit ProgramMemory(memory_model::Program& program) : program_(program) {}
  char* Take(int64_t bytes) override { return program_.Take(bytes, "memory " + std::to_string(number_++)); }
  void Write(void* to, const void* from, int64_t bytes) override { std::memcpy(to, from, static_cast<size_t>(bytes)); }

 private:
  memory_model::Program& program_;
  int number_ = 0;
};

class LitmusRanks {
 public:
  LitmusRanks(memory_model::Program& program, int32_t num_ranks, int32_t num_channels, int32_t num_units = 0,
              int32_t num_nodes = 1)
      : memory_(program),
        ranks_(memory_, {num_nodes, num_ranks / num_nodes, false}, num_channels, 1'000'000),
        slots_(memory_, num_ranks, num_channels, num_units) {
    for (int32_t r = 0; r < num_ranks; ++r) {
      device::Comm comm = ranks_.CommOfNode(r);
      comm.ll_slots = slots_.Of(r);
      comm.num_calls = nullptr;
      comms_.push_back(comm);
      const std::string of = " of rank " + std::to_string(r);
      program.Name(comm.signals.pad.At(comm.local.rank), "pad" + of);
      program.Name(comm.signals.sent, "sent" + of);
      program.Name(comm.signals.received, "received" + of);
      if (num_units > 0) program.Name(comm.ll_slots.pad.At(r), "slots" + of);
      program.Name(comm.report, "report" + of);
      program.Name(comm.abort_flag, "abort flag" + of);
    }
  }

  // `bytes` per rank.
  device::Window Window(memory_model::Program& program, int64_t bytes, const std::string& name) const {
    const int64_t stride = (bytes + 15) / 16 * 16;
    const device::Window window = {program.Take(ranks_.n() * stride, name), stride};
    for (int32_t r = 0; r < ranks_.n(); ++r) program.Name(window.At(r), name + " of rank " + std::to_string(r));
    return window;
  }

  void AddBlocks(memory_model::Program& program, unsigned num_channels, unsigned num_threads,
                 const std::function<void(const device::Comm&)>& body) const {
    for (int32_t r = 0; r < ranks_.n(); ++r) {
      for (unsigned channel = 0; channel < num_channels; ++channel) {
        program.AddBlock(r, channel, num_threads, [body, comm = comms_[r]] { body(comm); });
      }
    }
  }

  device::Comm& comm(int32_t rank) { return comms_[rank]; }

 protected:
  ProgramMemory memory_;
  const VirtualRanks ranks_;

 private:
  const VirtualSlots slots_;
  std::vector<device::Comm> comms_;
};

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

// All executions of the program are free of races, deadlocks and failed requirements.
inline void ExpectSound(const memory_model::Program& program) {
  const memory_model::Result result = Explore(program);
  if (!result.fault.empty()) std::fprintf(stderr, "%s\n", result.fault.c_str());
  CHECK(result.fault.empty() && result.exhaustive && result.num_executions > 0);
}

}  // namespace cuda
}  // namespace jaxcomm
