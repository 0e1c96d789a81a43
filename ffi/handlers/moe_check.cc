// moe_check: fails on all ranks if the routing of a mixture of experts is not possible. The result is aliased to the
// operand. It sends nothing: all ranks have the same counts.
#include "handlers/call.h"
#include "plan/routing.h"

namespace jaxcomm {
namespace {

ffi::Error ExecuteMoeCheck(ffi::RunId run, ffi::Dictionary attributes, ffi::Buffer<ffi::S32> rank,
                           ffi::Buffer<ffi::S32> counts, ffi::ResultBuffer<ffi::S32> result) {
  const ffi::ErrorOr<CallSpec> spec = DecodeCall(Collective::kBarrier, attributes);
  if (!spec) return spec.error();
  int64_t numbers[4] = {};
  const char* const names[] = {"capacity", "align", "slots", "raises"};
  for (int i = 0; i < 4; ++i) {
    const auto number = attributes.get<int64_t>(names[i]);
    if (!number) return ffi::Error::InvalidArgument(spec->Where() + ": attribute " + names[i] + " is missing");
    numbers[i] = *number;
  }
  ExpertLayout layout;
  layout.num_ranks = static_cast<int32_t>(spec->group_size);
  layout.num_experts = static_cast<int64_t>(counts.element_count()) / spec->group_size - 1;
  layout.capacity = numbers[0];
  layout.align = numbers[1];
  layout.slots = numbers[2];
  if (result->untyped_data() != counts.untyped_data()) {
    return ffi::Error::InvalidArgument(spec->Where() + ": results must be aliased to operands");
  }
  for (size_t i = 0; i < spec->groups.size(); ++i) {
    if (spec->groups[i] != rank.typed_data()[0]) continue;
    const int64_t* const ranks = spec->groups.data() + static_cast<int64_t>(i) / spec->group_size * spec->group_size;
    const Status status = CheckRouting(counts.typed_data(), layout, numbers[3] != 0, ranks);
    if (status.ok()) return ffi::Error::Success();
    const std::string message = spec->Where() + ": " + status.message();
    Rendezvous::FailRun(run.run_id, InvalidArgumentError(message));
    return ffi::Error::InvalidArgument(message);
  }
  return ffi::Error::InvalidArgument(spec->Where() + ": this rank is not in any group");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoeCheckExecute, ExecuteMoeCheck,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Attrs()
                                  .Arg<ffi::Buffer<ffi::S32>>()    // logical id of this device
                                  .Arg<ffi::Buffer<ffi::S32>>()    // counts of plan/routing.h
                                  .Ret<ffi::Buffer<ffi::S32>>());  // the same

}  // namespace jaxcomm
