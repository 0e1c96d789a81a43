// Element types: their sizes, their names, and which reductions they support.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxcomm {

// X(name, bytes, name in NumPy or ml_dtypes, name in XLA) for each type. The values of DType are internal to jaxcomm.
#define JAXCOMM_DTYPES(X)                                  \
  X(Bool, 1, "bool", PRED)                                 \
  X(S8, 1, "int8", S8)                                     \
  X(S16, 2, "int16", S16)                                  \
  X(S32, 4, "int32", S32)                                  \
  X(S64, 8, "int64", S64)                                  \
  X(U8, 1, "uint8", U8)                                    \
  X(U16, 2, "uint16", U16)                                 \
  X(U32, 4, "uint32", U32)                                 \
  X(U64, 8, "uint64", U64)                                 \
  X(F16, 2, "float16", F16)                                \
  X(BF16, 2, "bfloat16", BF16)                             \
  X(F32, 4, "float32", F32)                                \
  X(F64, 8, "float64", F64)                                \
  X(C64, 8, "complex64", C64)                              \
  X(C128, 16, "complex128", C128)                          \
  X(F8E5M2, 1, "float8_e5m2", F8E5M2)                      \
  X(F8E4M3FN, 1, "float8_e4m3fn", F8E4M3FN)                \
  X(F8E4M3, 1, "float8_e4m3", F8E4M3)                      \
  X(F8E3M4, 1, "float8_e3m4", F8E3M4)                      \
  X(F8E4M3B11FNUZ, 1, "float8_e4m3b11fnuz", F8E4M3B11FNUZ) \
  X(F8E5M2FNUZ, 1, "float8_e5m2fnuz", F8E5M2FNUZ)          \
  X(F8E4M3FNUZ, 1, "float8_e4m3fnuz", F8E4M3FNUZ)          \
  X(F8E8M0FNU, 1, "float8_e8m0fnu", F8E8M0FNU)

enum class DType : uint8_t {
#define JAXCOMM_ENUMERATOR(name, ...) k##name,
  JAXCOMM_DTYPES(JAXCOMM_ENUMERATOR)
#undef JAXCOMM_ENUMERATOR
};

constexpr int64_t ItemBytes(DType dtype) {
#define JAXCOMM_BYTES(name, bytes, ...) bytes,
  constexpr int64_t kBytes[] = {JAXCOMM_DTYPES(JAXCOMM_BYTES)};
#undef JAXCOMM_BYTES
  return kBytes[static_cast<size_t>(dtype)];
}

// For messages.
constexpr const char* Name(DType dtype) {
#define JAXCOMM_TEXT(name, bytes, text, ...) text,
  constexpr const char* kNames[] = {JAXCOMM_DTYPES(JAXCOMM_TEXT)};
#undef JAXCOMM_TEXT
  return kNames[static_cast<size_t>(dtype)];
}

enum class ReduceOp : uint8_t { kSum, kMax, kMin };

// E8M0 has no zero, and complex numbers have no order.
constexpr bool CanReduce(DType dtype, ReduceOp op) {
  const bool complex = dtype == DType::kC64 || dtype == DType::kC128;
  return dtype != DType::kF8E8M0FNU && (!complex || op == ReduceOp::kSum);
}

}  // namespace jaxcomm
