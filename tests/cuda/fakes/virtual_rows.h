// dispatch and combine among virtual ranks: random routings as moe.route makes them, and the kernel arguments.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "../../../ffi/cuda/kernels/rows.cuh"
#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

// The routing of all ranks. T tokens and K choices per rank.
struct Routed {
  int32_t n = 1, tokens = 0, choices = 1, experts = 1, capacity = 0;
  std::vector<int32_t> table;                // (n, 4, experts)
  std::vector<std::vector<int32_t>> slot;    // by rank: (T K,), -1: no row
  std::vector<std::vector<int32_t>> expert;  // by rank: (T K,), -1: no row
  std::vector<std::vector<int32_t>> order;   // by rank: the choice of each packed choice; -1 behind them

  int32_t RankOf(int32_t e) const { return e / (experts / n); }
};

// slots: rows of an expert; 0: groups follow each other, at multiples of `align`. spare: slots beyond those needed.
inline Routed Route(int32_t n, int32_t tokens, int32_t choices, int32_t experts, int32_t align, int32_t slots,
                    int32_t spare, const std::vector<std::vector<int32_t>>& ids) {
  Routed routed;
  routed.n = n, routed.tokens = tokens, routed.choices = choices, routed.experts = experts;
  const int32_t local = experts / n;
  std::vector<std::vector<int32_t>> counts(n, std::vector<int32_t>(experts)), index(n);
  for (int32_t r = 0; r < n; ++r) {
    index[r].assign(ids[r].size(), -1);
    for (int32_t k = 0; k < choices; ++k) {  // first choices of all tokens before second ones
      for (int32_t t = 0; t < tokens; ++t) {
        const int32_t e = ids[r][t * choices + k];
        if (e >= 0) index[r][t * choices + k] = counts[r][e]++;
      }
    }
  }
  std::vector<int32_t> starts(experts);
  for (int32_t p = 0; p < n; ++p) {
    int32_t next = 0;
    for (int32_t e = p * local; e < (p + 1) * local; ++e) {
      int32_t rows = 0;
      for (int32_t r = 0; r < n; ++r) rows += counts[r][e];
      starts[e] = slots > 0 ? (e - p * local) * slots : next;
      next = slots > 0 ? local * slots : next + (rows + align - 1) / align * align;
    }
    routed.capacity = std::max(routed.capacity, next);
  }
  routed.capacity += spare;
  routed.table.assign(size_t(n) * 4 * experts, 0);
  const auto at = [&](int32_t r, int32_t vector, int32_t e) -> int32_t& {
    return routed.table[(r * 4 + vector) * experts + e];
  };
  for (int32_t r = 0; r < n; ++r) {
    int32_t packed = 0;
    for (int32_t e = 0; e < experts; ++e) {
      at(r, 0, e) = packed, at(r, 1, e) = counts[r][e];
      at(r, 2, e) = r == 0 ? starts[e] : at(r - 1, 2, e) + counts[r - 1][e];
      packed += counts[r][e];
    }
  }
  for (int32_t r = 0; r < n; ++r) {
    routed.slot.emplace_back(ids[r].size(), -1);
    routed.expert.emplace_back(ids[r].size(), -1);
    routed.order.emplace_back(ids[r].size(), -1);
    for (size_t c = 0; c < ids[r].size(); ++c) {
      const int32_t e = ids[r][c];
      if (e < 0) continue;
      routed.expert[r][c] = e;
      routed.slot[r][c] = at(r, 2, e) + index[r][c];
      routed.order[r][at(r, 0, e) + index[r][c]] = static_cast<int32_t>(c);
    }
  }
  return routed;
}

// The rows of `order` for a payload with a row per token or per choice; 0 behind the packed choices.
inline std::vector<int32_t> RowsOf(const Routed& routed, int32_t rank, bool per_choice) {
  std::vector<int32_t> rows;
  for (const int32_t choice : routed.order[rank]) {
    rows.push_back(choice < 0 ? 0 : per_choice ? choice : choice / routed.choices);
  }
  return rows;
}

// dispatch, by the definition: slot(t, k) of the rank of its expert holds the row of the token; all other slots are
// zero. x: by rank.
inline std::vector<Bytes> Dispatched(const Routed& routed, const std::vector<Bytes>& x, int64_t row_bytes,
                                     bool per_choice = false) {
  std::vector<Bytes> y(routed.n, Bytes(static_cast<size_t>(routed.capacity * row_bytes)));
  for (int32_t r = 0; r < routed.n; ++r) {
    for (size_t c = 0; c < routed.slot[r].size(); ++c) {
      if (routed.slot[r][c] < 0) continue;
      const auto from = static_cast<int64_t>(per_choice ? c : c / routed.choices);
      std::memcpy(y[routed.RankOf(routed.expert[r][c])].data() + routed.slot[r][c] * row_bytes,
                  x[r].data() + from * row_bytes, static_cast<size_t>(row_bytes));
    }
  }
  return y;
}

// Payloads of f32 by rank, which differ in every element and in every run.
inline std::vector<Bytes> FloatPayloads(int32_t n, int32_t tokens, int32_t row, int32_t run) {
  std::vector<Bytes> all;
  for (int32_t r = 0; r < n; ++r) {
    std::vector<float> values;
    for (int32_t i = 0; i < tokens * row; ++i) values.push_back(static_cast<float>(1000 * (8 * run + r) + i + 1));
    const auto* const bytes = reinterpret_cast<const char*>(values.data());
    all.emplace_back(bytes, bytes + values.size() * sizeof(float));
  }
  return all;
}

// Expert ids by rank, of one of the first `num_kinds` kinds.
inline std::vector<std::vector<int32_t>> DrawIds(int32_t n, int32_t tokens, int32_t choices, int32_t experts,
                                                 std::mt19937_64& random, uint64_t num_kinds = 5) {
  const uint64_t kind = random() % num_kinds;
  std::vector<std::vector<int32_t>> ids(n);
  for (int32_t r = 0; r < n; ++r) {
    for (int32_t c = 0; c < tokens * choices; ++c) {
      int32_t e = static_cast<int32_t>(random() % experts);
      if (kind == 1) e = experts / 2;                                     // one hot expert
      if (kind == 2 && r == 0) e = -1;                                    // a rank that sends nothing
      if (kind == 3 && random() % 2 == 0) e = -1;                         // choices without an expert
      if (kind == 4) e = static_cast<int32_t>(random() % (experts / n));  // one hot rank
      if (kind == 5) e = -1;                                              // nobody sends
      if (kind == 6 && random() % 8 != 0) e = experts - 1;                // almost all to one
      ids[r].push_back(e);
    }
  }
  return ids;
}

}  // namespace cuda
}  // namespace jaxcomm
