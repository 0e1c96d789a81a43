// From the attributes of a call site and the sizes of its buffers to a program.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/call_spec.h"
#include "cost_params.h"
#include "executor.h"

namespace jaxcomm {

// Null, and `error` filled in, if the type can't be reduced or no algorithm fits.
std::shared_ptr<const Program> MakeProgram(const CallSpec& spec, const Figures& figures, const Host& host, DType dtype,
                                           int64_t input_count, int64_t output_count, std::string* error);

}  // namespace jaxcomm
