// moe_check: fails on all ranks if the routing of a mixture of experts is not possible. The result is aliased to the
// operand. It sends nothing: all ranks have the same counts.
#include "handlers/moe.h"

namespace jaxcomm {
namespace {

ffi::Error ExecuteMoeCheck(ffi::RunId run, ffi::Dictionary attributes, ffi::Buffer<ffi::S32> rank,
                           ffi::Buffer<ffi::S32> counts, ffi::ResultBuffer<ffi::S32> result) {
  ExpertLayout layout;
  int64_t raises = 0;
  const ffi::ErrorOr<Member> member = DecodeMember(
      attributes, rank,
      {{"capacity", &layout.capacity}, {"align", &layout.align}, {"slots", &layout.slots}, {"raises", &raises}});
  if (!member) return member.error();
  const CallSpec& spec = member->spec;
  layout.num_ranks = static_cast<int32_t>(spec.group_size);
  layout.num_experts = static_cast<int64_t>(counts.element_count()) / spec.group_size - 1;
  if (result->untyped_data() != counts.untyped_data()) {
    return ffi::Error::InvalidArgument(spec.Where() + ": results must be aliased to operands");
  }
  const Status status = CheckRouting(counts.typed_data(), layout, raises != 0, member->ranks());
  return status.ok() ? ffi::Error::Success() : FailRun(run, spec, status.message());
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
