// The element types and operations that kernels reduce with: those of FindReduce of ffi/cpu/reduce.h.
#pragma once

#include "../include/jaxcomm/arithmetic.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace cuda {

// As arithmetic::Widened, by calls: the conversions of 8-bit floats are long, and would be in every kernel 75 times.
template <typename Format>
struct Called : arithmetic::Widened<Format> {
  using Storage = typename Format::Storage;
  JAXCOMM_DEVICE_CALLED static float Decode(Storage s) { return Format::Decode(s); }
  JAXCOMM_DEVICE_CALLED static Storage Encode(float value) { return Format::Encode(value); }
};

}  // namespace cuda
}  // namespace jaxcomm
#endif

// JAXCOMM_REDUCTION(dtype, codec, ordered). `ordered`: has a maximum and a minimum.
#define JAXCOMM_REDUCTIONS(JAXCOMM_REDUCTION)                        \
  JAXCOMM_REDUCTION(kBool, Plain<bool>, true)                        \
  JAXCOMM_REDUCTION(kS8, Plain<int8_t>, true)                        \
  JAXCOMM_REDUCTION(kS16, Plain<int16_t>, true)                      \
  JAXCOMM_REDUCTION(kS32, Plain<int32_t>, true)                      \
  JAXCOMM_REDUCTION(kS64, Plain<int64_t>, true)                      \
  JAXCOMM_REDUCTION(kU8, Plain<uint8_t>, true)                       \
  JAXCOMM_REDUCTION(kU16, Plain<uint16_t>, true)                     \
  JAXCOMM_REDUCTION(kU32, Plain<uint32_t>, true)                     \
  JAXCOMM_REDUCTION(kU64, Plain<uint64_t>, true)                     \
  JAXCOMM_REDUCTION(kF16, Widened<Float16>, true)                    \
  JAXCOMM_REDUCTION(kBF16, Widened<BFloat16>, true)                  \
  JAXCOMM_REDUCTION(kF32, Plain<float>, true)                        \
  JAXCOMM_REDUCTION(kF64, Plain<double>, true)                       \
  JAXCOMM_REDUCTION(kC64, Plain<Complex<float>>, false)              \
  JAXCOMM_REDUCTION(kC128, Plain<Complex<double>>, false)            \
  JAXCOMM_REDUCTION(kF8E5M2, Called<Float8E5M2>, true)               \
  JAXCOMM_REDUCTION(kF8E4M3FN, Called<Float8E4M3FN>, true)           \
  JAXCOMM_REDUCTION(kF8E4M3, Called<Float8E4M3>, true)               \
  JAXCOMM_REDUCTION(kF8E3M4, Called<Float8E3M4>, true)               \
  JAXCOMM_REDUCTION(kF8E4M3B11FNUZ, Called<Float8E4M3B11FNUZ>, true) \
  JAXCOMM_REDUCTION(kF8E5M2FNUZ, Called<Float8E5M2FNUZ>, true)       \
  JAXCOMM_REDUCTION(kF8E4M3FNUZ, Called<Float8E4M3FNUZ>, true)
