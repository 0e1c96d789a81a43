// The sizes of dispatch and combine, and where their plans keep messages in scratch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/combine_rows.h"
#include "plan/row_areas.h"

namespace jaxcomm {

struct TokenLayout {
  int64_t choices = 0;  // of a token; 0: neither a dispatch nor a combine
  int64_t experts_per_rank = 1;
  int64_t num_rows = 0;   // of the payload of a rank: tokens, or choices if each has a row of its own
  int64_t num_slots = 0;  // rows that a rank has for its experts
  int64_t row_bytes = 0;
  bool per_choice = false;
  bool combines = false;
  // Of the plan. Ranks of a node have consecutive numbers.
  bool hierarchical = false;
  int32_t num_nodes = 1;
  int32_t ranks_per_node = 1;
  // combine:
  bool rounds_nodes = false;    // the sum of each node is rounded
  int64_t weight_bytes = 0;     // of a choice; 0: no weights
  CombineFn combine = nullptr;  // null: Program::reduce, without weights

  int64_t num_choices() const { return per_choice ? num_rows : num_rows * choices; }

  // Hierarchical plans: a message of a dispatch has the number of its row for each entry, and then the rows. A list of
  // a combine has the entries of each token, and then their weights. Bytes, for a number of entries.
  static int64_t Aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  static int64_t NumberBytes(int64_t entries) { return Aligned(entries * int64_t{sizeof(int32_t)}); }
  int64_t ListBytes(int64_t entries) const { return NumberBytes(entries) + Aligned(entries * weight_bytes); }

  // Offsets in scratch, in bytes. `place`: offset of a place of the plan, in elements.
  int64_t MessageAt(int64_t place) const { return place / ranks_per_node * MessageBytes(); }
  int64_t AreaAt(int64_t place) const {
    const int64_t lists = areas().Begin(RowAreas::kSums);  // places of lists come first
    return std::min(place, lists) * ListBytes(num_choices()) +
           std::max<int64_t>(place - lists, 0) * Aligned(num_rows * row_bytes);
  }
  RowAreas areas() const { return {num_nodes}; }
  // scratch_count: of the plan.
  int64_t ScratchBytes(int64_t scratch_count) const {
    if (scratch_count == 0) return 0;
    if (!hierarchical) return num_choices() * row_bytes;  // rows of the choices, packed by expert
    return combines ? AreaAt(areas().Begin(RowAreas::kNumAreas)) : (num_nodes - 1) * MessageBytes();
  }

 private:
  int64_t MessageBytes() const { return NumberBytes(num_choices()) + Aligned(num_rows * row_bytes); }
};

}  // namespace jaxcomm
