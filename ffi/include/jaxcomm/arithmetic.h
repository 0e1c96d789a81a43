// Sums, maxima and minima of all element types. CPU and GPU run the same operations and so get the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "portable.h"
#include "small_float.h"

namespace jaxcomm {
namespace arithmetic {

template <typename T>
struct Complex {
  T real, imaginary;
  JAXCOMM_BOTH friend Complex operator+(Complex a, Complex b) { return {a.real + b.real, a.imaginary + b.imaginary}; }
};

struct Sum {
  template <typename T>
  JAXCOMM_BOTH static T Apply(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) {
      return a || b;
    } else if constexpr (std::is_integral_v<T>) {  // wraps around; signed overflow would be undefined behaviour
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
};

template <bool kAnd, typename T>
JAXCOMM_BOTH T CombineBits(T a, T b) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  Bits x, y;
  std::memcpy(&x, &a, sizeof(T));
  std::memcpy(&y, &b, sizeof(T));
  x = kAnd ? x & y : x | y;
  std::memcpy(&a, &x, sizeof(T));
  return a;
}

template <typename T>
JAXCOMM_BOTH bool Unordered(T a, T b) {
#if defined(__CUDACC__)
  return a != a || b != b;
#else
  return __builtin_isunordered(a, b);  // a single comparison in vectorised loops
#endif
}

// For floats, each selection has the form of the processor's maximum instruction, which returns the second operand if
// the operands are equal or unordered. The two operand orders differ only for zeros of opposite sign and for NaN. For
// zeros, the `and` of the bits is +0 if one operand is +0 (Min: the `or` is -0 if one operand is -0). For NaN, the
// result is the sum of the operands, which is NaN.
struct Max {
  template <typename T>
  JAXCOMM_BOTH static T Apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      const T larger = CombineBits<true>(a > b ? a : b, b > a ? b : a);
      return Unordered(a, b) ? a + b : larger;
    } else {
      return a > b ? a : b;
    }
  }
};

struct Min {
  template <typename T>
  JAXCOMM_BOTH static T Apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) {
      const T smaller = CombineBits<false>(a < b ? a : b, b < a ? b : a);
      return Unordered(a, b) ? a + b : smaller;
    } else {
      return a < b ? a : b;
    }
  }
};

// Converts stored elements to accumulators and back without change.
template <typename T>
struct Plain {
  using Storage = T;
  using Acc = T;
  JAXCOMM_BOTH static Acc Decode(Storage s) { return s; }
  JAXCOMM_BOTH static Storage Encode(Acc a) { return a; }
};

// 8- and 16-bit floats: accumulated in f32 and rounded once.
template <typename Format>
struct Widened {
  using Bits = Format;
  using Storage = typename Format::Storage;
  using Acc = float;
  JAXCOMM_BOTH static Acc Decode(Storage s) { return Format::Decode(s); }
  JAXCOMM_BOTH static Storage Encode(Acc a) { return Format::Encode(a); }
};

// Whether two accumulators are converted at once, by one instruction of the GPU.
template <typename Codec>
constexpr bool kConvertsPairs =
#if defined(__CUDA_ARCH__)
    std::is_same_v<Codec, Widened<BFloat16>> || std::is_same_v<Codec, Widened<Float16>>;
#else
    false;
#endif

}  // namespace arithmetic
}  // namespace jaxcomm
