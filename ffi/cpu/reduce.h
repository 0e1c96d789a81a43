// dst = sources[0] op sources[1] op ..., element by element, left to right.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace jaxcomm {

// Reduces `count` contiguous elements. dst may be one of the sources. 8- and 16-bit floats are accumulated in f32 and
// rounded once, to nearest even. max and min return NaN if an operand is NaN, as XLA's do.
using ReduceFn = void (*)(void* dst, const void* const* sources, int num_sources, int64_t count);

// Null if the dtype does not support the operation, such as a complex max.
ReduceFn FindReduce(DType dtype, ReduceOp op);

}  // namespace jaxcomm
