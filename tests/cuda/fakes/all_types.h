// Every element type that can be reduced.
#pragma once

#include "../../../ffi/common/dtype.h"

namespace jaxcomm {

constexpr DType kTypes[] = {DType::kBool,       DType::kS8,        DType::kS16,    DType::kS32,
                            DType::kS64,        DType::kU8,        DType::kU16,    DType::kU32,
                            DType::kU64,        DType::kF16,       DType::kBF16,   DType::kF32,
                            DType::kF64,        DType::kC64,       DType::kC128,   DType::kF8E5M2,
                            DType::kF8E4M3FN,   DType::kF8E4M3,    DType::kF8E3M4, DType::kF8E4M3B11FNUZ,
                            DType::kF8E5M2FNUZ, DType::kF8E4M3FNUZ};

}  // namespace jaxcomm
