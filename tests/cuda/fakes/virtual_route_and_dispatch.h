// route_and_dispatch among virtual ranks: the kernel arguments of a call, and its results by definition.
#pragma once

#include <algorithm>
#include <tuple>
#include <vector>

#include "../../../ffi/cuda/kernels/route_and_dispatch.cuh"
#include "virtual_rows.h"

namespace jaxcomm {
namespace cuda {

// The results of a rank besides its rows.
struct MoeFields {
  std::vector<int32_t> slot, expert, group_sizes, group_counts, demand, dropped, table;

  auto All() const { return std::tie(slot, expert, group_sizes, group_counts, demand, dropped, table); }
  bool operator==(const MoeFields& other) const { return All() == other.All(); }
};

inline RouteAndDispatchShape ShapeOf(const Routed& routed, int32_t align, int32_t slots, int64_t row_bytes) {
  RouteAndDispatchShape shape;
  shape.tokens = routed.tokens;
  shape.choices = routed.choices;
  shape.num_experts = routed.experts;
  shape.capacity = routed.capacity;
  shape.align = align;
  shape.slots = slots;
  shape.row_bytes = row_bytes;
  return shape;
}

// Of the same sizes, with -7 everywhere: no result has it.
inline MoeFields UnwrittenFields(const RouteAndDispatchShape& shape, int32_t n) {
  const auto some = [](int64_t count) { return std::vector<int32_t>(static_cast<size_t>(count), -7); };
  const std::vector<int32_t> choices = some(shape.tokens * shape.choices), local = some(shape.num_experts / n);
  return {choices, choices, local, local, some(1), some(1), some(n * shape.num_experts)};
}

inline MoeFields FieldsOf(const Routed& routed, const RouteAndDispatchShape& shape, int32_t rank) {
  MoeFields fields = UnwrittenFields(shape, routed.n);
  fields.slot = routed.slot[rank];
  fields.expert = routed.expert[rank];
  const int32_t local = routed.experts / routed.n;
  fields.demand = {0};
  fields.dropped = {0};
  for (int32_t i = 0; i < local; ++i) {
    int32_t rows = 0;
    for (int32_t r = 0; r < routed.n; ++r) rows += routed.table[(r * 4 + 1) * routed.experts + rank * local + i];
    const auto align = static_cast<int32_t>(shape.align), whole = (rows + align - 1) / align * align;
    fields.group_counts[i] = rows;
    fields.group_sizes[i] = shape.slots > 0 ? static_cast<int32_t>(shape.slots) : whole;
    fields.demand[0] += shape.slots > 0 ? rows : whole;
  }
  for (int32_t r = 0; r < routed.n; ++r) {
    std::copy_n(routed.table.begin() + (r * 4 + 1) * routed.experts, routed.experts,
                fields.table.begin() + r * routed.experts);
  }
  return fields;
}

// The results of a refused call.
inline MoeFields EmptyFields(const RouteAndDispatchShape& shape, int32_t n) {
  MoeFields fields = UnwrittenFields(shape, n);
  for (auto* field : {&fields.slot, &fields.expert}) std::fill(field->begin(), field->end(), -1);
  for (auto* field : {&fields.group_sizes, &fields.group_counts, &fields.demand, &fields.dropped, &fields.table}) {
    std::fill(field->begin(), field->end(), 0);
  }
  return fields;
}

inline RouteAndDispatchBuffers BuffersOf(MoeFields& fields) {
  RouteAndDispatchBuffers buffers;
  buffers.slot = fields.slot.data();
  buffers.expert = fields.expert.data();
  buffers.group_sizes = fields.group_sizes.data();
  buffers.group_counts = fields.group_counts.data();
  buffers.demand = fields.demand.data();
  buffers.dropped = fields.dropped.data();
  buffers.table = fields.table.data();
  return buffers;
}

}  // namespace cuda
}  // namespace jaxcomm
