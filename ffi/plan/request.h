// Makes the request of a call from its attributes and the sizes of its buffers, and the geometry of its group on each
// back end.
#pragma once

#include <cstdint>

#include "common/call_spec.h"
#include "common/status.h"
#include "plan/plan.h"

namespace jaxcomm {

// How far a group on CPUs extends: one process, several processes of a node, several nodes.
enum class Scope : uint8_t { kProcess, kNode, kNetwork };
constexpr int kNumScopes = 3;

// `num_ranks` must be a multiple of `ranks_per_node`.
Geometry CpuGeometry(Scope scope, int64_t num_ranks, int64_t ranks_per_node);
// `ranks_per_node`: GPUs that address each other's memory. `multimem`: whether a node may have NVLink SHARP.
Geometry GpuGeometry(int64_t num_ranks, int64_t ranks_per_node, bool multimem);

// Counts in elements. Fails if the sizes of the buffers do not match the group.
StatusOr<Request> MakeRequest(const CallSpec& spec, const Geometry& geometry, int64_t input_count,
                              int64_t output_count);

}  // namespace jaxcomm
