// Ranks of one node in a program for memory_model.h.
#pragma once

#include <cstdio>
#include <functional>
#include <string>
#include <utility>

#include "../../../ffi/include/jaxcomm/device.h"
#include "../../check.h"
#include "memory_model.h"

namespace jaxcomm {
namespace cuda {

class LitmusRanks {
 public:
  LitmusRanks(memory_model::Program& program, int32_t num_ranks, int32_t num_channels, int32_t num_units = 0)
      : n_(num_ranks) {
    const int64_t words = int64_t{num_channels} * n_;
    const device::Window pad = Window(program, words * int64_t{sizeof(uint64_t)}, "pad");
    const int64_t slots = 2 * words * num_units * 2;
    const device::Window ll = Window(program, slots * int64_t{sizeof(uint64_t)}, "slots");
    for (int32_t r = 0; r < n_; ++r) {
      const std::string of = " of rank " + std::to_string(r);
      device::Comm comm;
      comm.world = comm.local = {r, n_, 0, 1};
      comm.signals = {pad, program.Words<uint64_t>(words, "sent" + of), program.Words<uint64_t>(words, "received" + of),
                      num_channels};
      if (num_units > 0) {
        comm.ll_slots = {ll, program.Words<uint64_t>(num_channels, "epochs" + of), num_channels, num_units};
      }
      comm.timeout_ns = 1'000'000;
      comm.report = program.Words<device::Report>(1, "report" + of);
      comm.abort_flag = program.Words<uint64_t>(1, "abort flag" + of);
      comms_.push_back(comm);
    }
  }

  // `bytes` per rank.
  device::Window Window(memory_model::Program& program, int64_t bytes, const std::string& name) const {
    const int64_t stride = (bytes + 15) / 16 * 16;
    char* base = nullptr;
    for (int32_t r = 0; r < n_; ++r) {
      char* const taken = program.Take(stride, name + " of rank " + std::to_string(r));
      if (r == 0) base = taken;
    }
    return {base, stride};
  }

  void AddBlocks(memory_model::Program& program, unsigned num_channels, unsigned num_threads,
                 const std::function<void(const device::Comm&)>& body) const {
    for (int32_t r = 0; r < n_; ++r) {
      for (unsigned channel = 0; channel < num_channels; ++channel) {
        program.AddBlock(r, channel, num_threads, [body, comm = comms_[r]] { body(comm); });
      }
    }
  }

  device::Comm& comm(int32_t rank) { return comms_[rank]; }

 private:
  const int32_t n_;
  std::vector<device::Comm> comms_;
};

// All executions of the program are free of races, deadlocks and failed requirements.
inline void ExpectSound(const memory_model::Program& program) {
  const memory_model::Result result = Explore(program);
  if (!result.fault.empty()) std::fprintf(stderr, "%s\n", result.fault.c_str());
  CHECK(result.fault.empty() && result.exhaustive && result.num_executions > 0);
}

}  // namespace cuda
}  // namespace jaxcomm
