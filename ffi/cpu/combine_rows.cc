#include "cpu/combine_rows.h"

#include <algorithm>

#include "cpu/simd_clones.h"
#include "include/jaxcomm/arithmetic.h"

namespace jaxcomm {
namespace {

// Elements per tile: its accumulators stay in the L1 cache.
constexpr int64_t kTile = 512;

template <typename Codec, int kNum>
inline __attribute__((always_inline)) void Add(typename Codec::Acc* __restrict acc,
                                               const typename Codec::Storage* const* rows,
                                               const typename Codec::Acc* weights, int64_t begin, int64_t size) {
  using Acc = typename Codec::Acc;
  const typename Codec::Storage* row[kNum];
  Acc weight[kNum];
  for (int k = 0; k < kNum; ++k) row[k] = rows[k] + begin, weight[k] = weights != nullptr ? weights[k] : Acc(1);
  for (int64_t i = 0; i < size; ++i) {
    Acc value = acc[i];
#pragma GCC unroll 8
    for (int k = 0; k < kNum; ++k) value += weight[k] * Codec::Decode(row[k][i]);
    acc[i] = value;
  }
}

template <typename Codec>
inline __attribute__((always_inline)) void Combine(void* y, const TokenRows& token, int64_t count) {
  using Storage = typename Codec::Storage;
  using Acc = typename Codec::Acc;
  const auto* rows = reinterpret_cast<const Storage* const*>(token.rows);
  const auto* weights = static_cast<const Acc*>(token.weights);
  alignas(64) Acc total[kTile];
  alignas(64) Acc part[kTile];
  for (int64_t begin = 0; begin < count; begin += kTile) {
    const int64_t size = std::min(kTile, count - begin);
    std::fill_n(total, size, Acc(0));
    int k = 0;
    for (int node = 0; node < token.num_nodes; ++node) {
      Acc* const acc = token.num_nodes == 1 ? total : part;
      if (acc == part) std::fill_n(part, size, Acc(0));
      const auto own = [&](int from) { return weights != nullptr ? weights + from : nullptr; };
      for (; k + 4 <= token.ends[node]; k += 4) Add<Codec, 4>(acc, rows + k, own(k), begin, size);
      for (; k + 2 <= token.ends[node]; k += 2) Add<Codec, 2>(acc, rows + k, own(k), begin, size);
      for (; k < token.ends[node]; ++k) Add<Codec, 1>(acc, rows + k, own(k), begin, size);
      if (acc == total) continue;
      for (int64_t i = 0; i < size; ++i) total[i] += Codec::Decode(Codec::Encode(part[i]));
    }
    Storage* const out = static_cast<Storage*>(y) + begin;
    for (int64_t i = 0; i < size; ++i) out[i] = Codec::Encode(total[i]);
  }
}

// Clones cannot be templates.
#define JAXCOMM_COMBINE(name, ...)                                                \
  JAXCOMM_SIMD_CLONES void name(void* y, const TokenRows& token, int64_t count) { \
    Combine<__VA_ARGS__>(y, token, count);                                        \
  }
JAXCOMM_COMBINE(F16, arithmetic::Widened<Float16>)
JAXCOMM_COMBINE(BF16, arithmetic::Widened<BFloat16>)
JAXCOMM_COMBINE(F32, arithmetic::Plain<float>)
JAXCOMM_COMBINE(F64, arithmetic::Plain<double>)

}  // namespace

CombineFn FindCombine(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return F16;
    case DType::kBF16:
      return BF16;
    case DType::kF32:
      return F32;
    case DType::kF64:
      return F64;
    default:
      return nullptr;
  }
}

}  // namespace jaxcomm
