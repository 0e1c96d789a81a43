// Parameters of the cost model on CPUs, and the resources of a group that it depends on.
#pragma once

#include <array>
#include <cstdint>

#include "plan/cost.h"
#include "plan/request.h"

namespace jaxcomm {

// What the cost model knows of this machine for each reach: constants, or what jaxcomm.calibrate() has found.
struct Figures {
  std::array<Machine, kNumReaches> machines;

  static Figures Current();
  static void Set(const Figures& figures);
};

// Processors that this process may use.
int64_t NumProcessors();

// What a group's ranks share.
struct Host {
  Reach reach = Reach::kProcess;
  int64_t num_processors = NumProcessors();  // of each node
};

// A group as the cost model sees it.
Machine MachineOf(const Figures& figures, const Host& host, int64_t num_ranks, int64_t ranks_per_node);

}  // namespace jaxcomm
