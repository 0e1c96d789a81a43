#include "plan/routing.h"

#include <algorithm>
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

void Choices::Count(int64_t num_experts, int32_t* counts) const {
  std::fill_n(counts, num_experts + 1, 0);
  for (int64_t i = 0; i < tokens * per_token; ++i) {
    if (ids[i] >= 0) ++counts[std::min<int64_t>(ids[i], num_experts)];
  }
}

Places::Places(const ExpertLayout& layout, const int32_t* counts)
    : layout_(layout), counts_(counts), starts_(layout.num_experts), sizes_(layout.num_experts) {
  const int64_t total = layout.num_experts, local = total / layout.num_ranks;
  int64_t next = 0;
  for (int64_t e = 0; e < total; ++e) {
    for (int64_t from = 0; from < layout.num_ranks; ++from) sizes_[e] += counts[from * (total + 1) + e];
    if (e % local == 0) next = 0;
    starts_[e] = layout.slots > 0 ? e % local * layout.slots : next;
    next += (sizes_[e] + layout.align - 1) / layout.align * layout.align;
  }
}

int64_t Places::demand(int32_t rank) const {
  const int64_t local = layout_.num_experts / layout_.num_ranks;
  int64_t rows = 0;
  for (int64_t e = rank * local; e < (rank + 1) * local; ++e) {
    rows += (sizes_[e] + layout_.align - 1) / layout_.align * layout_.align;
  }
  return rows;
}

void Places::Slots(const Choices& choices, int32_t own, int32_t* slot) const {
  const int64_t total = layout_.num_experts;
  std::vector<int64_t> next(starts_);
  for (int32_t from = 0; from < own; ++from) {
    for (int64_t e = 0; e < total; ++e) next[e] += counts_[from * (total + 1) + e];
  }
  std::vector<int64_t> end(next);
  for (int64_t e = 0; e < total; ++e) end[e] += counts_[own * (total + 1) + e];
  for (int64_t k = 0; k < choices.per_token; ++k) {
    for (int64_t t = 0; t < choices.tokens; ++t) {
      const int64_t i = t * choices.per_token + k;
      const int32_t expert = choices.ids[i];
      const bool has_row = expert >= 0 && expert < total && next[expert] < end[expert];
      slot[i] = has_row ? static_cast<int32_t>(next[expert]++) : -1;
    }
  }
}

void FillFields(const ExpertLayout& layout, const Choices& choices, int32_t own, const int32_t* wanted,
                const int32_t* kept, const RoutingFields& fields) {
  const int64_t total = layout.num_experts, local = total / layout.num_ranks;
  const Places places(layout, kept);
  places.Slots(choices, own, fields.slot);
  int32_t dropped = 0;
  for (int64_t i = 0; i < choices.tokens * choices.per_token; ++i) {
    const int32_t expert = choices.ids[i];
    fields.expert[i] = fields.slot[i] < 0 ? -1 : expert;
    dropped += fields.slot[i] < 0 && expert >= 0 && expert < total ? 1 : 0;
  }
  for (int64_t m = 0; m < local; ++m) {
    const int64_t size = places.size(own * local + m);
    fields.group_counts[m] = static_cast<int32_t>(size);
    fields.group_sizes[m] =
        static_cast<int32_t>(layout.slots > 0 ? layout.slots : (size + layout.align - 1) / layout.align * layout.align);
  }
  *fields.demand = static_cast<int32_t>(Places(layout, wanted).demand(own));
  *fields.dropped = dropped;
  for (int64_t r = 0; r < layout.num_ranks; ++r) std::copy_n(kept + r * (total + 1), total, fields.table + r * total);
}

void FillSlices(int32_t num_ranks, int64_t num_experts, const int32_t* table, const int32_t* starts, int32_t* slices) {
  const int64_t local = num_experts / num_ranks;
  std::vector<int64_t> outputs(starts, starts + num_experts);  // a wrong table must not overflow
  for (int64_t r = 0; r < num_ranks; ++r, slices += 4 * num_experts) {
    int64_t input = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
      const int32_t size = table[r * num_experts + e];
      slices[e] = static_cast<int32_t>(input);
      slices[num_experts + e] = size;
      slices[2 * num_experts + e] = static_cast<int32_t>(outputs[e]);
      slices[3 * num_experts + e] = table[e / local * num_experts + r * local + e % local];
      input += size;
      outputs[e] += size;
    }
  }
}

void FillOrder(int32_t own, int64_t num_experts, const int32_t* slices, const int32_t* slot, const int32_t* expert,
               int64_t num_choices, int64_t choices_per_row, int32_t* order) {
  const int32_t* const inputs = slices + own * 4 * num_experts;
  const int32_t* const outputs = inputs + 2 * num_experts;
  std::fill_n(order, num_choices, 0);
  for (int64_t i = 0; i < num_choices; ++i) {
    if (slot[i] < 0) continue;
    const int64_t e = std::clamp<int64_t>(expert[i], 0, num_experts - 1);
    const int64_t place = int64_t{slot[i]} - outputs[e] + inputs[e];
    if (place >= 0 && place < num_choices) order[place] = static_cast<int32_t>(i / choices_per_row);
  }
}

}  // namespace jaxcomm
