// From the attributes of a call site and the sizes of its buffers to a program.
#pragma once

#include <cstdint>
#include <memory>

#include "common/call_spec.h"
#include "common/status.h"
#include "cost_params.h"
#include "executor.h"

namespace jaxcomm {

// Fails if the type can't be reduced or no algorithm fits.
StatusOr<std::shared_ptr<const Program>> MakeProgram(const CallSpec& spec, const CostParams& cost_params,
                                                     const NodeResources& resources, DType dtype, int64_t input_count,
                                                     int64_t output_count);

}  // namespace jaxcomm
