// The routing of a mixture of experts: its check, and the places of all rows.
#pragma once

#include <cstdint>
#include <vector>

#include "common/status.h"

namespace jaxcomm {

// Where the rows of experts lie. Rank r has num_experts / num_ranks experts.
struct ExpertLayout {
  int32_t num_ranks = 1;
  int64_t num_experts = 1;
  int64_t capacity = 0;  // rows of a rank
  int64_t align = 1;     // groups start at multiples of it
  int64_t slots = 0;     // rows of an expert; 0: groups follow each other
};

// counts: (num_ranks, num_experts + 1), the choices of each rank for each expert, and for experts that do not exist.
// Fails if there are such choices or, if `bounded`, a rank or an expert gets more rows than it has. Every rank has the
// same counts, so every rank gets the same result. ranks: names of the ranks in messages.
Status CheckRouting(const int32_t* counts, const ExpertLayout& layout, bool bounded, const int64_t* ranks);

// The choices of a rank.
struct Choices {
  int64_t tokens = 0, per_token = 1;
  const int32_t* ids = nullptr;  // (tokens, per_token); num_experts: unknown, negative: no choice

  // counts: a row of those of CheckRouting. All counts are written.
  void Count(int64_t num_experts, int32_t* counts) const;
};

// Where all choices go if none is dropped: the places of jaxcomm/moe/routing.py. Only for choices that CheckRouting
// accepts.
class Places {
 public:
  // counts: as in CheckRouting; it must outlive this object.
  Places(const ExpertLayout& layout, const int32_t* counts);

  int64_t start(int64_t expert) const { return starts_[expert]; }  // the first row of its group, at its rank
  int64_t size(int64_t expert) const { return sizes_[expert]; }    // rows of its group, without padding
  // Rows of the groups of a rank, with padding.
  int64_t demand(int32_t rank) const;
  // slot: (tokens, per_token) of rank `own`, -1 for choices that have no row: no choice, or more than `counts` has.
  void Slots(const Choices& choices, int32_t own, int32_t* slot) const;

 private:
  const ExpertLayout layout_;
  const int32_t* const counts_;
  std::vector<int64_t> starts_, sizes_;  // by expert
};

// Where FillFields writes what jaxcomm.moe.Routing has on a rank: (tokens, per_token) slots and experts, (local
// experts) sizes and counts, numbers, and the table (num_ranks, num_experts).
struct RoutingFields {
  int32_t* slot = nullptr;
  int32_t* expert = nullptr;
  int32_t* group_sizes = nullptr;
  int32_t* group_counts = nullptr;
  int32_t* demand = nullptr;
  int32_t* dropped = nullptr;
  int32_t* table = nullptr;
};

// The routing of rank `own` with these choices. wanted, kept: counts as in CheckRouting, of all choices and of those
// that get a row.
void FillFields(const ExpertLayout& layout, const Choices& choices, int32_t own, const int32_t* wanted,
                const int32_t* kept, const RoutingFields& fields);

// The table of plan/slices.h, (num_ranks, 4, num_experts), over choices that are packed by expert. table: rows of each
// rank for each expert. starts: first row of each expert at its rank.
void FillSlices(int32_t num_ranks, int64_t num_experts, const int32_t* table, const int32_t* starts, int32_t* slices);

// order: for each packed choice of rank `own`, the number of the choice divided by choices_per_row; 0 where there is
// none. slices: of FillSlices. A wrong routing gives a wrong order, without access outside of the arrays.
void FillOrder(int32_t own, int64_t num_experts, const int32_t* slices, const int32_t* slot, const int32_t* expert,
               int64_t num_choices, int64_t choices_per_row, int32_t* order);

}  // namespace jaxcomm
