#include "plan/routing.h"

#include <string>

namespace jaxcomm {

Status CheckRouting(const int32_t* counts, const ExpertLayout& layout, bool bounded, const int64_t* ranks) {
  const int64_t n = layout.num_ranks, total = layout.num_experts, local = total / n;
  for (int64_t r = 0; r < n; ++r) {
    const int32_t unknown = counts[r * (total + 1) + total];
    if (unknown == 0) continue;
    return InvalidArgumentError("rank " + std::to_string(ranks[r]) + " has " + std::to_string(unknown) +
                                " expert ids that are not below num_experts=" + std::to_string(total));
  }
  for (int64_t r = 0; r < n && bounded; ++r) {
    int64_t demand = 0;
    for (int64_t e = r * local; e < (r + 1) * local; ++e) {
      int64_t rows = 0;
      for (int64_t from = 0; from < n; ++from) rows += counts[from * (total + 1) + e];
      if (layout.slots > 0 && rows > layout.slots) {
        return InvalidArgumentError("expert " + std::to_string(e) + " of rank " + std::to_string(ranks[r]) + " gets " +
                                    std::to_string(rows) + " rows, but slots is " + std::to_string(layout.slots) +
                                    "; pass more slots, or on_overflow=\"drop\"");
      }
      demand += (rows + layout.align - 1) / layout.align * layout.align;
    }
    if (layout.slots > 0 || demand <= layout.capacity) continue;
    return InvalidArgumentError("rank " + std::to_string(ranks[r]) + " gets " + std::to_string(demand) +
                                " rows, but capacity is " + std::to_string(layout.capacity) +
                                "; pass a larger capacity, or on_overflow=\"drop\"");
  }
  return OkStatus();
}

}  // namespace jaxcomm
