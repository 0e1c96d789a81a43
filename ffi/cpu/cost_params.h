// Parameters of the cost model on CPUs, and the resources of a group that it depends on.
#pragma once

#include <array>
#include <cstdint>

#include "plan/cost.h"
#include "plan/request.h"

namespace jaxcomm {

// What the cost model knows of this machine for each scope: constants, or what jaxcomm.calibrate() has found.
struct CostParams {
  std::array<Machine, kNumScopes> machines;

  static CostParams Current();
  static void Set(const CostParams& cost_params);
};

// Processors that this process may use.
int64_t NumProcessors();

// Resources that a group's ranks share.
struct NodeResources {
  Scope scope = Scope::kProcess;
  int64_t num_processors = NumProcessors();  // of each node
};

// A group as the cost model sees it.
Machine MachineOf(const CostParams& cost_params, const NodeResources& resources, int64_t num_ranks,
                  int64_t ranks_per_node);

}  // namespace jaxcomm
