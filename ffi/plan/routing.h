// The check of the routing of a mixture of experts.
#pragma once

#include <cstdint>

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

}  // namespace jaxcomm
