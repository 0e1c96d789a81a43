// Conversions between f32 and the 8- and 16-bit float formats. Bit layouts: IEEE 754-2019 for f16; bfloat16; OCP 8-bit
// floating point specification 1.0 (E5M2, E4M3) and the FN/FNUZ variants of arXiv 2206.02915 and 2209.05433.
#pragma once

#include <cstdint>
#include <cstring>

#include "portable.h"

namespace jaxcomm {

JAXCOMM_BOTH uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

JAXCOMM_BOTH float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

struct BFloat16 {
  using Storage = uint16_t;
  JAXCOMM_BOTH static float Decode(Storage s) { return FloatOf(static_cast<uint32_t>(s) << 16); }
  // No branches, so that loops over it vectorise.
  JAXCOMM_BOTH static Storage Encode(float value) {
#if defined(__CUDA_ARCH__)
    return static_cast<Storage>(EncodePair(value, 0));
#else
    const uint32_t bits = BitsOf(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40;
    return static_cast<Storage>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
#endif
  }
#if defined(__CUDA_ARCH__)
  // `low` in the lower half. The same bits as two calls of Encode on the host, except those of NaN.
  __device__ static uint32_t EncodePair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
#endif
};

// Selects instead of branches, so that loops over it vectorise. No operand is a subnormal f32.
struct Float16 {
  using Storage = uint16_t;
  JAXCOMM_BOTH static float Decode(Storage s) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(s));
    return value;
#else
    constexpr uint32_t kExponent = 0x7c00u << 13;
    const uint32_t magnitude = (s & 0x7fffu) << 13;
    const uint32_t rebiased = magnitude + ((127 - 15) << 23);
    // The exponent of the smallest normal number gives a subnormal an implicit one, which the subtraction removes.
    const float subnormal = FloatOf(rebiased + (1 << 23)) - FloatOf((127 - 14) << 23);
    uint32_t bits = (magnitude & kExponent) == kExponent ? rebiased + ((128 - 16) << 23) : rebiased;
    bits = (magnitude & kExponent) == 0 ? BitsOf(subnormal) : bits;
    return FloatOf(bits | (s & 0x8000u) << 16);
#endif
  }
  JAXCOMM_BOTH static Storage Encode(float value) {
#if defined(__CUDA_ARCH__)
    return static_cast<Storage>(EncodePair(value, 0));
#else
    constexpr uint32_t kMagic = ((127 - 15) + (23 - 10) + 1)
                                << 23;  // adding it shifts and rounds a subnormal into place
    const uint32_t bits = BitsOf(value);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t subnormal = BitsOf(FloatOf(magnitude) + FloatOf(kMagic)) - kMagic;
    const uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t finite = magnitude < ((127 - 14) << 23) ? subnormal : normal;
    return static_cast<Storage>((magnitude >= ((127 + 16) << 23) ? special : finite) | (bits >> 16 & 0x8000u));
#endif
  }
#if defined(__CUDA_ARCH__)
  // `low` in the lower half. The same bits as two calls of Encode on the host, except those of NaN.
  __device__ static uint32_t EncodePair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
#endif
};

// The meaning of the bit patterns at the top of the range.
enum class Special : uint8_t {
  kIeee,                  // exponent of all ones: infinity and NaN
  kFinite,                // only all ones is NaN; no infinity ("FN")
  kFiniteNoNegativeZero,  // only the pattern of -0 is NaN ("FNUZ")
};

template <int kExponents, int kMantissas, int kBiasOfExponents, Special kSpecials>
struct Float8 {
  using Storage = uint8_t;
  static constexpr int kExponentBits = kExponents;
  static constexpr int kMantissaBits = kMantissas;
  static constexpr int kBias = kBiasOfExponents;
  static constexpr Special kSpecial = kSpecials;
  static constexpr int kBits = 1 + kExponentBits + kMantissaBits;
  static constexpr uint32_t kSign = 1u << (kBits - 1);
  static constexpr uint32_t kExponentOnes = (1u << kExponentBits) - 1;
  static constexpr uint32_t kMantissaOnes = (1u << kMantissaBits) - 1;
  static constexpr uint32_t kMagnitude = kSign - 1;
  static constexpr uint32_t kNan = kSpecial == Special::kIeee
                                       ? (kExponentOnes << kMantissaBits) | (1u << (kMantissaBits - 1))
                                   : kSpecial == Special::kFinite ? kMagnitude
                                                                  : kSign;
  static constexpr uint32_t kLargest = kSpecial == Special::kIeee     ? (kExponentOnes << kMantissaBits) - 1
                                       : kSpecial == Special::kFinite ? kMagnitude - 1
                                                                      : kMagnitude;

  JAXCOMM_BOTH static float Decode(Storage s) {
    constexpr uint32_t kQuietNan = 0x7fc00000;
    const uint32_t magnitude = s & kMagnitude;
    const uint32_t exponent = magnitude >> kMantissaBits;
    const uint32_t sign = s & kSign ? 0x80000000u : 0;
    if constexpr (kSpecial == Special::kIeee) {
      if (exponent == kExponentOnes) return FloatOf(magnitude & kMantissaOnes ? kQuietNan : sign | 0x7f800000u);
    } else if constexpr (kSpecial == Special::kFinite) {
      if (magnitude == kMagnitude) return FloatOf(kQuietNan);
    } else {
      if (s == kSign) return FloatOf(kQuietNan);
    }
    constexpr uint32_t kOne = 1u << kMantissaBits;  // the implicit one
    const uint32_t mantissa = exponent == 0 ? magnitude : (magnitude & kMantissaOnes) | kOne;
    // mantissa * 2^(max(exponent, 1) - bias - mantissa bits). Both factors and the product are exact.
    const uint32_t scale = (exponent == 0 ? 1 : exponent) + 127 - kBias - kMantissaBits;
    return FloatOf(sign | BitsOf(static_cast<float>(mantissa) * FloatOf(scale << 23)));
  }

  JAXCOMM_BOTH static Storage Encode(float value) {
    const uint32_t bits = BitsOf(value);
    const uint32_t sign = bits >> 31 ? kSign : 0;
    if ((bits & 0x7fffffff) > 0x7f800000) {
      return static_cast<Storage>(kSpecial == Special::kFiniteNoNegativeZero ? kNan : kNan | sign);
    }
    uint32_t magnitude = kLargest + 1;  // for infinity and values that round beyond the largest finite value
    if ((bits & 0x7fffffff) < 0x7f800000) magnitude = RoundMagnitude(bits & 0x7fffffff);
    if (magnitude > kLargest) {
      if constexpr (kSpecial == Special::kIeee) return static_cast<Storage>(sign | (kExponentOnes << kMantissaBits));
      return static_cast<Storage>(kSpecial == Special::kFinite ? kNan | sign : kNan);
    }
    if (kSpecial == Special::kFiniteNoNegativeZero && magnitude == 0) return 0;
    return static_cast<Storage>(sign | magnitude);
  }

 private:
  // Rounds to nearest, ties to even. A carry out of the mantissa increments the exponent.
  JAXCOMM_BOTH static uint32_t RoundMagnitude(uint32_t bits) {
    constexpr int kDropped = 23 - kMantissaBits;
    const int exponent = static_cast<int>(bits >> 23) - 127 + kBias;
    if (exponent >= 1) {
      const uint32_t rounded = bits + ((1u << (kDropped - 1)) - 1) + ((bits >> kDropped) & 1);
      const int64_t shifted =
          static_cast<int64_t>(rounded >> kDropped) - (static_cast<int64_t>(127 - kBias) << kMantissaBits);
      return static_cast<uint32_t>(shifted);
    }
    const int shift = kDropped + 1 - exponent;  // subnormal: the implicit one becomes explicit
    if (shift > 24 + 1) return 0;
    const uint32_t mantissa = bits >> 23 ? (bits & 0x7fffff) | 0x800000 : bits & 0x7fffff;
    const uint64_t half = 1ull << (shift - 1);
    const uint64_t wide = mantissa;
    return static_cast<uint32_t>((wide + (half - 1) + ((wide >> shift) & 1)) >> shift);
  }
};

using Float8E5M2 = Float8<5, 2, 15, Special::kIeee>;
using Float8E4M3 = Float8<4, 3, 7, Special::kIeee>;
using Float8E3M4 = Float8<3, 4, 3, Special::kIeee>;
using Float8E4M3FN = Float8<4, 3, 7, Special::kFinite>;
using Float8E4M3B11FNUZ = Float8<4, 3, 11, Special::kFiniteNoNegativeZero>;
using Float8E5M2FNUZ = Float8<5, 2, 16, Special::kFiniteNoNegativeZero>;
using Float8E4M3FNUZ = Float8<4, 3, 8, Special::kFiniteNoNegativeZero>;

}  // namespace jaxcomm
