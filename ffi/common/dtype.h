// Element types: their sizes, their names, and which reductions they support.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxcomm {

// The values are internal to jaxcomm. FromFfi (attributes.h) converts XLA's types.
enum class DType : uint8_t {
  kBool,
  kS8,
  kS16,
  kS32,
  kS64,
  kU8,
  kU16,
  kU32,
  kU64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kC64,
  kC128,
  kF8E5M2,
  kF8E4M3FN,
  kF8E4M3,
  kF8E3M4,
  kF8E4M3B11FNUZ,
  kF8E5M2FNUZ,
  kF8E4M3FNUZ,
  kF8E8M0FNU,
};

constexpr int64_t ItemBytes(DType dtype) {
  switch (dtype) {
    case DType::kS16:
    case DType::kU16:
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kS32:
    case DType::kU32:
    case DType::kF32:
      return 4;
    case DType::kS64:
    case DType::kU64:
    case DType::kF64:
    case DType::kC64:
      return 8;
    case DType::kC128:
      return 16;
    default:
      return 1;
  }
}

// The name in NumPy or ml_dtypes, for messages.
constexpr const char* Name(DType dtype) {
  constexpr const char* kNames[] = {
      "bool",
      "int8",
      "int16",
      "int32",
      "int64",
      "uint8",
      "uint16",
      "uint32",
      "uint64",
      "float16",
      "bfloat16",
      "float32",
      "float64",
      "complex64",
      "complex128",
      "float8_e5m2",
      "float8_e4m3fn",
      "float8_e4m3",
      "float8_e3m4",
      "float8_e4m3b11fnuz",
      "float8_e5m2fnuz",
      "float8_e4m3fnuz",
      "float8_e8m0fnu",
  };
  static_assert(sizeof(kNames) / sizeof(kNames[0]) == static_cast<size_t>(DType::kF8E8M0FNU) + 1, "one name per type");
  return kNames[static_cast<size_t>(dtype)];
}

enum class ReduceOp : uint8_t { kSum, kMax, kMin };

// E8M0 has no zero, and complex numbers have no order.
constexpr bool CanReduce(DType dtype, ReduceOp op) {
  const bool complex = dtype == DType::kC64 || dtype == DType::kC128;
  return dtype != DType::kF8E8M0FNU && (!complex || op == ReduceOp::kSum);
}

}  // namespace jaxcomm
