// The elements that kernels move, by size, and the types and operations that they reduce: those of FindReduce in
// ffi/cpu/reduce.h.
#pragma once

#include <type_traits>

#include "cuda/program/kernel_args.h"
#include "include/jaxcomm/arithmetic.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm::cuda {

// Calls f with an unsigned integer of 1, 2, 4 or 8 bytes.
template <typename F>
JAXCOMM_DEVICE auto WithItem(int32_t bytes, F f) {
  switch (bytes) {
    case 1:
      return f(uint8_t{});
    case 2:
      return f(uint16_t{});
    case 4:
      return f(uint32_t{});
    default:
      return f(uint64_t{});
  }
}

// One codec for all 8-bit floats. Separate code for each format would take as long to compile as the code of all other
// types together. A reduction decodes every operand but encodes only results. So decoding is inline, with the format in
// variables, and encoding is a function call.
struct AnyFloat8 {
 private:
  template <typename Visit>
  JAXCOMM_DEVICE static auto With(DType format, Visit visit) {
    switch (format) {
      case DType::kF8E4M3FN:
        return visit(Float8E4M3FN());
      case DType::kF8E4M3:
        return visit(Float8E4M3());
      case DType::kF8E3M4:
        return visit(Float8E3M4());
      case DType::kF8E4M3B11FNUZ:
        return visit(Float8E4M3B11FNUZ());
      case DType::kF8E5M2FNUZ:
        return visit(Float8E5M2FNUZ());
      case DType::kF8E4M3FNUZ:
        return visit(Float8E4M3FNUZ());
      default:
        return visit(Float8E5M2());
    }
  }

 public:
  using Storage = uint8_t;
  using Acc = float;
  DType format = DType::kF8E5M2;
  uint32_t shift = 0;     // from the mantissa of the format to that of f32
  float scale = 1;        // 2^(bias of f32 - bias of the format)
  uint32_t infinity = 0;  // magnitude; above 0x7f: none
  uint32_t largest = 0;   // the largest magnitude that is not NaN
  uint32_t nan = 0;       // a pattern that is NaN whatever its magnitude; above 0xff: none

  AnyFloat8() = default;
  JAXCOMM_DEVICE explicit AnyFloat8(DType dtype) : format(dtype) {
    With(dtype, [&](auto as) {
      using Format = decltype(as);
      constexpr uint32_t kInfinity = Format::kLargest + 1;
      shift = 23 - Format::kMantissaBits;
      scale = FloatOf(static_cast<uint32_t>(127 + 127 - Format::kBias) << 23);
      infinity = Format::kSpecial == Special::kIeee ? kInfinity : 0x100;
      largest = Format::kSpecial == Special::kIeee ? kInfinity : Format::kLargest;
      nan = Format::kSpecial == Special::kFiniteNoNegativeZero ? Format::kSign : 0x100;
      return 0;
    });
  }

  // The exponent and mantissa, read as those of an f32, are the value divided by `scale`. The product is exact, also
  // for subnormal values.
  JAXCOMM_DEVICE float Decode(Storage s) const {
    const uint32_t magnitude = s & 0x7fu;
    uint32_t bits = BitsOf(FloatOf(magnitude << shift) * scale);
    bits = magnitude == infinity ? 0x7f800000u : bits;
    bits |= (s & 0x80u) << 24;
    return FloatOf(magnitude > largest || s == nan ? 0x7fc00000u : bits);
  }
  JAXCOMM_DEVICE Storage Encode(float value) const { return EncodeAs(format, value); }

 private:
  JAXCOMM_DEVICE_CALLED static Storage EncodeAs(DType format, float value) {
    return With(format, [&](auto as) { return as.Encode(value); });
  }
};

template <typename T, typename Visit>
JAXCOMM_DEVICE void VisitOp(ReduceOp op, arithmetic::Plain<T> codec, Visit visit) {
  if (op == ReduceOp::kMax) return visit(codec, arithmetic::Max());
  if (op == ReduceOp::kMin) return visit(codec, arithmetic::Min());
  if constexpr (std::is_integral_v<T>) {  // signed and unsigned sums have the same bits
    visit(arithmetic::Plain<std::make_unsigned_t<T>>(), arithmetic::Sum());
  } else {
    visit(codec, arithmetic::Sum());
  }
}

template <typename Visit>
JAXCOMM_DEVICE void VisitOp(ReduceOp op, arithmetic::Plain<bool>, Visit visit) {
  if (op == ReduceOp::kMin) return visit(arithmetic::Plain<uint8_t>(), arithmetic::Min());
  return visit(arithmetic::Plain<uint8_t>(), arithmetic::Max());
}

template <typename T, typename Visit>
JAXCOMM_DEVICE void VisitOp(ReduceOp, arithmetic::Plain<arithmetic::Complex<T>> codec, Visit visit) {
  visit(codec, arithmetic::Sum());
}

template <typename Codec, typename Visit>
JAXCOMM_DEVICE void VisitOp(ReduceOp op, Codec codec, Visit visit) {
  if (op == ReduceOp::kMax) return visit(codec, arithmetic::Max());
  if (op == ReduceOp::kMin) return visit(codec, arithmetic::Min());
  return visit(codec, arithmetic::Sum());
}

// Calls visit(codec, op) with a codec for the type and arithmetic::Sum, Max or Min.
template <typename Visit>
JAXCOMM_DEVICE void VisitReduction(const Operation& operation, Visit visit) {
  using namespace arithmetic;
  switch (operation.dtype) {
#define JAXCOMM_CASE(type, ...) \
  case DType::type:             \
    return VisitOp(operation.op, __VA_ARGS__, visit);
    JAXCOMM_CASE(kBool, Plain<bool>())
    JAXCOMM_CASE(kS8, Plain<int8_t>())
    JAXCOMM_CASE(kS16, Plain<int16_t>())
    JAXCOMM_CASE(kS32, Plain<int32_t>())
    JAXCOMM_CASE(kS64, Plain<int64_t>())
    JAXCOMM_CASE(kU8, Plain<uint8_t>())
    JAXCOMM_CASE(kU16, Plain<uint16_t>())
    JAXCOMM_CASE(kU32, Plain<uint32_t>())
    JAXCOMM_CASE(kU64, Plain<uint64_t>())
    JAXCOMM_CASE(kF16, Widened<Float16>())
    JAXCOMM_CASE(kBF16, Widened<BFloat16>())
    JAXCOMM_CASE(kF32, Plain<float>())
    JAXCOMM_CASE(kF64, Plain<double>())
    JAXCOMM_CASE(kC64, Plain<Complex<float>>())
    JAXCOMM_CASE(kC128, Plain<Complex<double>>())
    default:
      return VisitOp(operation.op, AnyFloat8(operation.dtype), visit);
#undef JAXCOMM_CASE
  }
}

}  // namespace jaxcomm::cuda
#endif
