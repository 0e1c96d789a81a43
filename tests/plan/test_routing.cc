// CheckRouting: its result for counts of choices, and the text. The places of choices against routings by definition.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "../../ffi/plan/routing.h"
#include "../check.h"
#include "../cpu/routed.h"

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
        "rank 4 gets 8 rows, but capacity is 7; pass a larger capacity, or on_overflow=\"drop\"");
  CHECK(Fault(counts, 7, 1, 0, false).empty());
  CHECK(Fault(counts, 12, 4, 0).empty());  // groups of 8 and 4, 4 and 8
  CHECK(Fault(counts, 11, 4, 0).find("rank 4 gets 12 rows, but capacity is 11") == 0);
  CHECK(Fault(counts, 0, 1, 6).empty());
  CHECK(Fault(counts, 0, 1, 5) ==
        "expert 0 of rank 4 gets 6 rows, but slots is 5; pass more slots, or on_overflow=\"drop\"");
  CHECK(Fault({1, 0, 0, 0, 0, 0, 1, 0, 0, 0}, 0, 1, 1).empty());
  CHECK(Fault({1, 0, 0, 0, 0, 1, 0, 0, 0, 0}, 9, 1, 1).find("expert 0 of rank 4 gets 2 rows, but slots is 1;") == 0);
  CHECK(Fault({0, 0, 3, 4, 0, 0, 0, 0, 1, 0}, 7, 1, 0).find("rank 9 gets 8 rows") == 0);
  CHECK(Fault({0, 0, 3, 4, 0, 0, 0, 0, 1, 0}, 0, 1, 4).find("expert 3 of rank 9 gets 5 rows") == 0);
  CHECK(Fault({1 << 30, 0, 0, 0, 0, 1 << 30, 9, 0, 0, 0}, 7, 1, 0).find("rank 4 gets 2147483657 rows") == 0);
}

TEST_CASE("unknown experts are a fault in any case") {
  for (const bool bounded : {true, false}) {
    CHECK(Fault({101, 0, 0, 0, 0, 0, 0, 0, 0, 3}, 100, 1, 0, bounded) ==
          "rank 9 has 3 expert ids that are not below num_experts=4");
    CHECK(Fault({0, 0, 0, 0, 1, 0, 0, 0, 0, 0}, 100, 1, 0, bounded).find("rank 4 has 1 expert ids") == 0);
  }
}

struct Fields {
  Fields(const ExpertLayout& layout, const Routed& c, int32_t own, const std::vector<int32_t>& wanted,
         const std::vector<int32_t>& kept)
      : slot(c.ids[own].size(), 77), expert(slot), table(static_cast<size_t>(layout.num_ranks * layout.num_experts)) {
    sizes.resize(static_cast<size_t>(c.experts_per_rank), 77);
    counts = sizes;
    FillFields(layout, {c.tokens, c.choices, c.ids[own].data()}, own, wanted.data(), kept.data(),
               {slot.data(), expert.data(), sizes.data(), counts.data(), &demand, &dropped, table.data()});
  }
  std::vector<int32_t> slot, expert, sizes, counts, table;
  int32_t demand = -1, dropped = -1;
};

// (ranks, experts + 1)
std::vector<int32_t> CountsOf(const Routed& c) {
  const int64_t total = c.n * c.experts_per_rank;
  std::vector<int32_t> counts(static_cast<size_t>(c.n * (total + 1)), 77);
  for (int32_t r = 0; r < c.n; ++r) {
    const Choices choices = {c.tokens, c.choices, c.ids[r].data()};
    choices.Count(total, &counts[static_cast<size_t>(r * (total + 1))]);
  }
  return counts;
}

TEST_CASE("slots, slices and packed choices are those of the definition") {
  std::mt19937 random(2);
  for (int k = 0; k < static_cast<int>(Kind::kNumKinds); ++k) {
    const int64_t align = 1 + k % 3;
    const Routed c = DrawRouting(static_cast<Kind>(k), 3, 5, 4, 2, align, random);
    const int64_t total = 6;
    ExpertLayout layout;
    layout.num_ranks = c.n;
    layout.num_experts = total;
    layout.align = align;
    const std::vector<int32_t> wanted = CountsOf(c);
    for (int32_t r = 0; r < c.n; ++r) {
      const Fields fields(layout, c, r, wanted, wanted);
      CHECK(fields.slot == c.slot[r] && fields.dropped == 0);
      std::vector<int32_t> starts(total), slices(c.table.size()), order(c.ids[r].size(), 77);
      for (int64_t e = 0; e < total; ++e) starts[e] = static_cast<int32_t>(Places(layout, wanted.data()).start(e));
      FillSlices(c.n, total, fields.table.data(), starts.data(), slices.data());
      for (int64_t from = 0; from < c.n; ++from) {
        for (int64_t e = 0; e < total; ++e) {
          const int32_t* const got = &slices[from * 4 * total + e];
          const int32_t* const want = &c.table[from * 4 * total + e];
          CHECK(got[total] == want[total] && got[3 * total] == want[3 * total]);
          // An empty slice may have any offsets.
          CHECK(want[total] == 0 || (got[0] == want[0] && got[2 * total] == want[2 * total]));
        }
      }
      FillOrder(r, total, slices.data(), c.slot[r].data(), c.ids[r].data(), 20, 1, order.data());
      CHECK(order == c.order[r]);
      FillOrder(r, total, slices.data(), c.slot[r].data(), c.ids[r].data(), 20, 4, order.data());
      for (size_t i = 0; i < order.size(); ++i) CHECK(order[i] == c.order[r][i] / 4);
    }
  }
}

TEST_CASE("a wrong routing gives a wrong order") {
  const std::vector<int32_t> slices(2 * 4 * 2, 1 << 30), slot = {5, -7, 1 << 30, 0}, expert = {-9, 3, 1 << 30, 1};
  std::vector<int32_t> order(4, 77);
  FillOrder(1, 2, slices.data(), slot.data(), expert.data(), 4, 1, order.data());
  CHECK(order[0] == 3);
}

}  // namespace
}  // namespace jaxcomm
