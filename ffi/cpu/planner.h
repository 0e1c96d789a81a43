// Makes the program of a call site from its attributes and the sizes of its buffers.
#pragma once

#include <cstdint>
#include <memory>

#include "common/call_spec.h"
#include "common/status.h"
#include "cpu/cost_params.h"
#include "cpu/executor.h"

namespace jaxcomm {

// Fails if the dtype cannot be reduced or no algorithm supports the request.
StatusOr<std::shared_ptr<const Program>> MakeProgram(const CallSpec& spec, const CostParams& cost_params,
                                                     const NodeResources& resources, DType dtype, int64_t input_count,
                                                     int64_t output_count);

}  // namespace jaxcomm
