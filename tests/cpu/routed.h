// Random routings of a mixture of experts for tests: the operands of dispatch and combine on all ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "../../ffi/plan/slices.h"

namespace jaxcomm {

struct Routed {
  int32_t n = 1;
  int64_t tokens = 0, choices = 1, experts_per_rank = 1;
  int64_t slots = 0;                        // rows of a rank
  std::vector<std::vector<int32_t>> ids;    // by rank: expert of each choice, or -1
  std::vector<std::vector<int32_t>> slot;   // by rank: of each choice, or -1
  std::vector<std::vector<int32_t>> order;  // by rank: the choice at each packed place
  std::vector<int32_t> table;               // of Slices

  Slices slices() const { return Slices(table.data(), false, n, n * experts_per_rank); }
  int32_t RankOf(int32_t expert) const { return static_cast<int32_t>(expert / experts_per_rank); }
};

enum class Kind { kUniform, kHoles, kOneExpert, kOneRank, kSilentRank, kDuplicates, kNone, kNumKinds };

// Fills in slots, packed places and the table for given ids. Groups start at multiples of `align`.
inline void PlaceChoices(Routed& c, int64_t align) {
  const int64_t experts = c.n * c.experts_per_rank;
  std::vector<std::vector<int64_t>> counts(c.n, std::vector<int64_t>(experts));
  for (int32_t r = 0; r < c.n; ++r) {
    for (const int32_t e : c.ids[r]) {
      if (e >= 0) ++counts[r][e];
    }
  }
  c.table.assign(c.n * 4 * experts, 0);
  c.slot.assign(c.n, std::vector<int32_t>(c.ids[0].size(), -1));
  c.order.assign(c.n, std::vector<int32_t>(c.ids[0].size(), 0));
  c.slots = 0;
  for (int32_t r = 0; r < c.n; ++r) {
    int64_t packed = 0;
    for (int64_t e = 0; e < experts; ++e) {
      int64_t start = 0;  // of the group
      for (int64_t other = e / c.experts_per_rank * c.experts_per_rank; other < e; ++other) {
        int64_t rows = 0;
        for (const auto& of_rank : counts) rows += of_rank[other];
        start += (rows + align - 1) / align * align;
      }
      for (int32_t from = 0; from < r; ++from) start += counts[from][e];
      int32_t* const own = &c.table[r * 4 * experts];
      own[e] = static_cast<int32_t>(packed);
      own[experts + e] = static_cast<int32_t>(counts[r][e]);
      own[2 * experts + e] = static_cast<int32_t>(start);
      if (counts[r][e] == 0) own[e] = own[2 * experts + e] = 1 << 30;  // an empty slice may have any offsets
      const int64_t to = e / c.experts_per_rank;
      c.table[to * 4 * experts + 3 * experts + r * c.experts_per_rank + e % c.experts_per_rank] = own[experts + e];
      for (int64_t k = 0; k < c.choices; ++k) {
        for (int64_t t = 0; t < c.tokens; ++t) {
          if (c.ids[r][t * c.choices + k] != e) continue;
          c.order[r][packed++] = static_cast<int32_t>(t * c.choices + k);
          c.slot[r][t * c.choices + k] = static_cast<int32_t>(start++);
        }
      }
      c.slots = std::max(c.slots, start);
    }
  }
  ++c.slots;  // a row that no choice has
}

inline Routed DrawRouting(Kind kind, int32_t n, int64_t tokens, int64_t choices, int64_t experts_per_rank,
                          int64_t align, std::mt19937& random) {
  Routed c;
  c.n = n;
  c.tokens = tokens;
  c.choices = choices;
  c.experts_per_rank = experts_per_rank;
  const auto experts = static_cast<uint32_t>(n * experts_per_rank);
  c.ids.assign(n, std::vector<int32_t>(tokens * choices));
  for (int32_t r = 0; r < n; ++r) {
    for (size_t i = 0; i < c.ids[r].size(); ++i) {
      int32_t& id = c.ids[r][i];
      id = static_cast<int32_t>(random() % experts);
      if (kind == Kind::kHoles && random() % 3 == 0) id = -1;
      if (kind == Kind::kOneExpert) id = static_cast<int32_t>(experts) - 1;
      if (kind == Kind::kOneRank) id = static_cast<int32_t>(random() % experts_per_rank);
      if (kind == Kind::kSilentRank && r == n / 2) id = -1;
      if (kind == Kind::kDuplicates) id = c.ids[r][i / choices * choices];
      if (kind == Kind::kNone) id = -1;
    }
  }
  PlaceChoices(c, align);
  return c;
}

}  // namespace jaxcomm
