// Every element type that can be reduced, and random values.
#pragma once

#include <random>

#include "../../../ffi/common/dtype.h"

namespace jaxcomm {

constexpr DType kTypes[] = {DType::kBool,       DType::kS8,        DType::kS16,    DType::kS32,
                            DType::kS64,        DType::kU8,        DType::kU16,    DType::kU32,
                            DType::kU64,        DType::kF16,       DType::kBF16,   DType::kF32,
                            DType::kF64,        DType::kC64,       DType::kC128,   DType::kF8E5M2,
                            DType::kF8E4M3FN,   DType::kF8E4M3,    DType::kF8E3M4, DType::kF8E4M3B11FNUZ,
                            DType::kF8E5M2FNUZ, DType::kF8E4M3FNUZ};

// Random bits, except infinities and NaN: the compiler determines which of two NaNs a sum returns.
inline void Randomize(char* values, DType dtype, int64_t bytes, std::mt19937_64& random) {
  for (int64_t i = 0; i < bytes; ++i) values[i] = static_cast<char>(dtype == DType::kBool ? random() % 2 : random());
  int64_t width = ItemBytes(dtype);
  if (dtype == DType::kC64 || dtype == DType::kC128) width /= 2;
  for (int64_t i = width - 1; dtype >= DType::kF16 && i < bytes; i += width) values[i] &= static_cast<char>(0xbf);
}

}  // namespace jaxcomm
