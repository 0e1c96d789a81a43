#include "cpu/reduce.h"

#include <algorithm>

#include "cpu/simd_clones.h"
#include "include/jaxcomm/arithmetic.h"

namespace jaxcomm {
namespace {

// Elements per tile. A tile is reduced over all sources before the next one, so its accumulators stay in the L1 cache.
constexpr int64_t kTile = 1024;

// Converts stored elements to accumulators and back. kBatches: handle several sources in one pass, which pays off if
// decoding is cheaper than the memory traffic of the accumulators.
template <typename T>
struct Plain : arithmetic::Plain<T> {
  static constexpr bool kBatches = true;
};

template <typename Format>
struct Widened : arithmetic::Widened<Format> {
  static constexpr bool kBatches = true;
};

// A type of one byte has 256 values: a table is faster than arithmetic.
template <typename Format>
struct Widened8 {
  static constexpr bool kBatches = false;
  using Storage = uint8_t;
  using Acc = float;
  struct Table {
    float values[256];
    Table() {
      for (int i = 0; i < 256; ++i) values[i] = Format::Decode(static_cast<uint8_t>(i));
    }
  };
  static Acc Decode(Storage s) {
    static const Table table;
    return table.values[s];
  }
  static Storage Encode(Acc a) { return Format::Encode(a); }
};

// One pass over kNum sources: every element is loaded once and the accumulator stays in a register.
template <typename Codec, typename Op, int kNum, bool kContinue>
inline __attribute__((always_inline)) void ReduceBatch(typename Codec::Acc* __restrict acc,
                                                       const typename Codec::Storage* const* sources, int64_t begin,
                                                       int64_t size) {
  using Acc = typename Codec::Acc;
  const typename Codec::Storage* s[kNum];
  for (int k = 0; k < kNum; ++k) s[k] = sources[k] + begin;
  for (int64_t i = 0; i < size; ++i) {
    Acc value = Codec::Decode(s[0][i]);
    if constexpr (kContinue) value = Op::Apply(acc[i], value);
#pragma GCC unroll 8
    for (int k = 1; k < kNum; ++k) value = Op::Apply(value, Codec::Decode(s[k][i]));
    acc[i] = value;
  }
}

template <typename Codec, typename Op>
inline __attribute__((always_inline)) void ReduceTiles(void* dst, const void* const* sources, int num_sources,
                                                       int64_t count) {
  using Storage = typename Codec::Storage;
  using Acc = typename Codec::Acc;
  const auto* typed = reinterpret_cast<const Storage* const*>(sources);
  alignas(64) Acc acc[kTile];
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t size = std::min(kTile, count - begin);
    int s = 0;
    if (Codec::kBatches && num_sources >= 8) {
      ReduceBatch<Codec, Op, 8, false>(acc, typed, begin, size);
      s = 8;
    } else if (Codec::kBatches && num_sources >= 4) {
      ReduceBatch<Codec, Op, 4, false>(acc, typed, begin, size);
      s = 4;
    } else {
      ReduceBatch<Codec, Op, 1, false>(acc, typed, begin, size);
      s = 1;
    }
    if (Codec::kBatches) {
      for (; s + 4 <= num_sources; s += 4) ReduceBatch<Codec, Op, 4, true>(acc, typed + s, begin, size);
    }
    for (; s < num_sources; ++s) ReduceBatch<Codec, Op, 1, true>(acc, typed + s, begin, size);
    Storage* out = static_cast<Storage*>(dst) + begin;
    for (int64_t i = 0; i < size; ++i) out[i] = Codec::Encode(acc[i]);
  }
}

// Clones cannot be templates. Hence one function per type and operation.
#define JAXCOMM_REDUCE(name, ...)                                                                             \
  JAXCOMM_SIMD_CLONES void name##Sum(void* dst, const void* const* sources, int num_sources, int64_t count) { \
    ReduceTiles<__VA_ARGS__, arithmetic::Sum>(dst, sources, num_sources, count);                              \
  }
#define JAXCOMM_REDUCE_ORDERED(name, ...)                                                                     \
  JAXCOMM_REDUCE(name, __VA_ARGS__)                                                                           \
  JAXCOMM_SIMD_CLONES void name##Max(void* dst, const void* const* sources, int num_sources, int64_t count) { \
    ReduceTiles<__VA_ARGS__, arithmetic::Max>(dst, sources, num_sources, count);                              \
  }                                                                                                           \
  JAXCOMM_SIMD_CLONES void name##Min(void* dst, const void* const* sources, int num_sources, int64_t count) { \
    ReduceTiles<__VA_ARGS__, arithmetic::Min>(dst, sources, num_sources, count);                              \
  }

// X(name, codec) for each type that has an order.
#define JAXCOMM_ORDERED_TYPES(X)                \
  X(Bool, Plain<bool>)                          \
  X(S8, Plain<int8_t>)                          \
  X(S16, Plain<int16_t>)                        \
  X(S32, Plain<int32_t>)                        \
  X(S64, Plain<int64_t>)                        \
  X(U8, Plain<uint8_t>)                         \
  X(U16, Plain<uint16_t>)                       \
  X(U32, Plain<uint32_t>)                       \
  X(U64, Plain<uint64_t>)                       \
  X(F16, Widened<Float16>)                      \
  X(BF16, Widened<BFloat16>)                    \
  X(F32, Plain<float>)                          \
  X(F64, Plain<double>)                         \
  X(F8E5M2, Widened8<Float8E5M2>)               \
  X(F8E4M3FN, Widened8<Float8E4M3FN>)           \
  X(F8E4M3, Widened8<Float8E4M3>)               \
  X(F8E3M4, Widened8<Float8E3M4>)               \
  X(F8E4M3B11FNUZ, Widened8<Float8E4M3B11FNUZ>) \
  X(F8E5M2FNUZ, Widened8<Float8E5M2FNUZ>)       \
  X(F8E4M3FNUZ, Widened8<Float8E4M3FNUZ>)

JAXCOMM_ORDERED_TYPES(JAXCOMM_REDUCE_ORDERED)
JAXCOMM_REDUCE(C64, Plain<arithmetic::Complex<float>>)
JAXCOMM_REDUCE(C128, Plain<arithmetic::Complex<double>>)

}  // namespace

ReduceFn FindReduce(DType dtype, ReduceOp op) {
#define JAXCOMM_CASE(name, ...) \
  case DType::k##name:          \
    return op == ReduceOp::kSum ? name##Sum : op == ReduceOp::kMax ? name##Max : name##Min;
  switch (dtype) {
    JAXCOMM_ORDERED_TYPES(JAXCOMM_CASE)
    case DType::kC64:
      return op == ReduceOp::kSum ? C64Sum : nullptr;
    case DType::kC128:
      return op == ReduceOp::kSum ? C128Sum : nullptr;
    default:
      return nullptr;
  }
#undef JAXCOMM_CASE
}

}  // namespace jaxcomm
