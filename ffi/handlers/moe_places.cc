// The rows of the choices of a rank: moe_count, moe_place and moe_slices, the custom calls of
// jaxcomm/moe/row_assignment.py. XLA would compute them by dozens of operations, each of which costs as much as a row.
#include <algorithm>
#include <vector>

#include "handlers/moe.h"

namespace jaxcomm {
namespace {

// counts: a row of the counts of plan/routing.h.
ffi::Error ExecuteMoeCount(ffi::Dictionary, ffi::Buffer<ffi::S32>, ffi::Buffer<ffi::S32> ids,
                           ffi::ResultBuffer<ffi::S32> counts) {
  const Choices own = {static_cast<int64_t>(ids.element_count()), 1, ids.typed_data()};
  own.Count(static_cast<int64_t>(counts->element_count()) - 1, counts->typed_data());
  return ffi::Error::Success();
}

// wanted: (ranks, experts + 1) counts of plan/routing.h. kept: (ranks, experts), the choices that get a row; none: all.
ffi::Error ExecuteMoePlace(ffi::Dictionary attributes, ffi::Buffer<ffi::S32> rank, ffi::Buffer<ffi::S32> ids,
                           ffi::Buffer<ffi::S32> wanted, ffi::RemainingArgs kept, ffi::RemainingRets results) {
  ExpertLayout layout;
  const ffi::ErrorOr<Member> member = DecodeMember(
      attributes, rank, {{"capacity", &layout.capacity}, {"align", &layout.align}, {"slots", &layout.slots}});
  if (!member) return member.error();
  const CallSpec& spec = member->spec;
  layout.num_ranks = static_cast<int32_t>(spec.group_size);
  const auto dimensions = ids.dimensions(), table = wanted.dimensions();
  if (dimensions.size() != 2 || table.size() != 2 || table[0] != spec.group_size ||
      (table[1] - 1) % spec.group_size != 0 || results.size() != kRoutingFields) {
    return ffi::Error::InvalidArgument(spec.Where() + ": operands or results have wrong shapes");
  }
  const int64_t total = layout.num_experts = table[1] - 1;
  const Choices choices = {dimensions[0], dimensions[1], ids.typed_data()};
  const ffi::ErrorOr<RoutingFields> fields = DecodeFields(spec, results, layout, choices.tokens * choices.per_token);
  if (!fields) return fields.error();
  std::vector<int32_t> counts;
  if (kept.size() > 0) {
    const auto rows = kept.get<ffi::Buffer<ffi::S32>>(0);
    if (!rows) return rows.error();
    if (static_cast<int64_t>(rows->element_count()) != spec.group_size * total) {
      return ffi::Error::InvalidArgument(spec.Where() + ": the kept choices have a wrong shape");
    }
    counts.resize(wanted.element_count());
    for (int64_t r = 0; r < spec.group_size; ++r) {
      std::copy_n(rows->typed_data() + r * total, total, counts.data() + r * (total + 1));
    }
  }
  FillFields(layout, choices, member->own, wanted.typed_data(), counts.empty() ? wanted.typed_data() : counts.data(),
             *fields);
  return ffi::Error::Success();
}

// table: (ranks, experts), rows of each rank for each expert.
ffi::Error ExecuteMoeSlices(ffi::Dictionary attributes, ffi::Buffer<ffi::S32> rank, ffi::Buffer<ffi::S32> slot,
                            ffi::Buffer<ffi::S32> expert, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> starts,
                            ffi::ResultBuffer<ffi::S32> slices, ffi::ResultBuffer<ffi::S32> order) {
  int64_t choices_per_row = 1;
  const ffi::ErrorOr<Member> member = DecodeMember(attributes, rank, {{"choices_per_row", &choices_per_row}});
  if (!member) return member.error();
  const CallSpec& spec = member->spec;
  const int64_t n = spec.group_size, total = static_cast<int64_t>(starts.element_count());
  if (total % n != 0 || static_cast<int64_t>(table.element_count()) != n * total ||
      static_cast<int64_t>(slices->element_count()) != 4 * n * total ||
      slot.element_count() != expert.element_count() || slot.element_count() != order->element_count() ||
      choices_per_row < 1) {
    return ffi::Error::InvalidArgument(spec.Where() + ": operands or results have wrong shapes");
  }
  FillSlices(static_cast<int32_t>(n), total, table.typed_data(), starts.typed_data(), slices->typed_data());
  FillOrder(member->own, total, slices->typed_data(), slot.typed_data(), expert.typed_data(),
            static_cast<int64_t>(slot.element_count()), choices_per_row, order->typed_data());
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoeCountExecute, ExecuteMoeCount,
                              BindAttributes()
                                  .Arg<ffi::Buffer<ffi::S32>>()    // expert ids
                                  .Ret<ffi::Buffer<ffi::S32>>());  // counts

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoePlaceExecute, ExecuteMoePlace,
                              BindAttributes()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // expert ids
                                  .Arg<ffi::Buffer<ffi::S32>>()  // wanted
                                  .RemainingArgs()               // kept
                                  .RemainingRets());             // the fields of Routing

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoeSlicesExecute, ExecuteMoeSlices,
                              BindAttributes()
                                  .Arg<ffi::Buffer<ffi::S32>>()    // slots of the choices
                                  .Arg<ffi::Buffer<ffi::S32>>()    // experts of the choices
                                  .Arg<ffi::Buffer<ffi::S32>>()    // table
                                  .Arg<ffi::Buffer<ffi::S32>>()    // first row of each expert
                                  .Ret<ffi::Buffer<ffi::S32>>()    // slices
                                  .Ret<ffi::Buffer<ffi::S32>>());  // the row of each packed choice

}  // namespace jaxcomm
