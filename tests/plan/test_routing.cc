// CheckRouting: its result for counts of choices, and the text.
#include <string>
#include <vector>

#include "../../ffi/plan/routing.h"
#include "../check.h"

namespace jaxcomm {
namespace {

constexpr int64_t kRanks[] = {4, 9};

// Two ranks with two experts each. A row of counts: four experts, then unknown ones.
std::string Fault(const std::vector<int32_t>& counts, int64_t capacity, int64_t align, int64_t slots,
                  bool bounded = true) {
  ExpertLayout layout;
  layout.num_ranks = 2;
  layout.num_experts = 4;
  layout.capacity = capacity;
  layout.align = align;
  layout.slots = slots;
  return CheckRouting(counts.data(), layout, bounded, kRanks).message();
}

TEST_CASE("a routing fits exactly, and not with one more row") {
  const std::vector<int32_t> counts = {1, 2, 3, 4, 0, 5, 0, 0, 1, 0};  // groups of 6, 2, 3 and 5 rows
  CHECK(Fault(counts, 8, 1, 0).empty());
  CHECK(Fault(counts, 7, 1, 0) ==
        "rank 4 gets 8 rows, but capacity is 7; pass a larger capacity, or "
        "on_overflow=\"drop\"");
  CHECK(Fault(counts, 7, 1, 0, false).empty());
  CHECK(Fault(counts, 12, 4, 0).empty());  // groups of 8 and 4, 4 and 8
  CHECK(Fault(counts, 11, 4, 0).find("rank 4 gets 12 rows, but capacity is 11") == 0);
  CHECK(Fault(counts, 0, 1, 6).empty());
  CHECK(Fault(counts, 0, 1, 5) ==
        "expert 0 of rank 4 gets 6 rows, but slots is 5; pass more slots, or "
        "on_overflow=\"drop\"");
  CHECK(Fault({0, 0, 3, 4, 0, 0, 0, 0, 1, 0}, 7, 1, 0).find("rank 9 gets 8 rows") == 0);
  CHECK(Fault({0, 0, 3, 4, 0, 0, 0, 0, 1, 0}, 0, 1, 4).find("expert 3 of rank 9 gets 5 rows") == 0);
}

TEST_CASE("unknown experts are a fault in any case") {
  for (const bool bounded : {true, false}) {
    CHECK(Fault({0, 0, 0, 0, 0, 0, 0, 0, 0, 3}, 100, 1, 0, bounded) ==
          "rank 9 has 3 expert ids that are not below num_experts=4");
  }
}

}  // namespace
}  // namespace jaxcomm
