// Parameters of the cost model on CPUs, and the resources of a group that the model depends on.
#pragma once

#include <array>
#include <cstdint>

#include "plan/cost.h"
#include "plan/request.h"

namespace jaxcomm {

// One machine model per scope: built-in constants, or the measurements of jaxcomm.calibrate().
struct CostParams {
  std::array<Machine, kNumScopes> machines;

  static CostParams Current();
  static void Set(const CostParams& cost_params);
};

// Processors that this process may use.
int64_t NumProcessors();

// Resources that the ranks of a group share.
struct NodeResources {
  Scope scope = Scope::kProcess;
  int64_t num_processors = NumProcessors();  // of each node
};

// The machine model of a group.
Machine MachineOf(const CostParams& cost_params, const NodeResources& resources, int64_t num_ranks,
                  int64_t ranks_per_node);

}  // namespace jaxcomm
