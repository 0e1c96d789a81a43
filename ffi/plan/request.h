// From the attributes of a call and the sizes of its buffers to a request, and the geometry of a group on each back
// end.
#pragma once

#include <cstdint>

#include "common/call_spec.h"
#include "common/status.h"
#include "plan.h"

namespace jaxcomm {

// How the ranks of a group on CPUs reach each other.
enum class Scope : uint8_t { kProcess, kNode, kNetwork };  // one process; several of a node; several nodes
constexpr int kNumScopes = 3;

// `num_ranks` is a multiple of `ranks_per_node`.
Geometry CpuGeometry(Scope scope, int64_t num_ranks, int64_t ranks_per_node);
// `ranks_per_node`: GPUs that address each other's memory. `multimem`: whether a node may have NVLink SHARP.
Geometry GpuGeometry(int64_t num_ranks, int64_t ranks_per_node, bool multimem);

// What a call with buffers of so many elements asks of its group. Fails if they don't fit.
StatusOr<Request> MakeRequest(const CallSpec& spec, const Geometry& geometry, int64_t input_count,
                              int64_t output_count);

}  // namespace jaxcomm
