// dispatch: y holds the rows of x that all ranks send to the experts of this rank. Its other rows are zero.
#include <optional>

#include "handlers/call.h"

namespace jaxcomm {
namespace {

ffi::Future ExecuteDispatch(CpuCallState* state, ffi::RunId run, ffi::Buffer<ffi::S32> rank, ffi::AnyBuffer x,
                            ffi::Buffer<ffi::S32> order, ffi::Buffer<ffi::S32> table, ffi::Result<ffi::AnyBuffer> y) {
  const std::optional<DType> dtype = FromFfi(x.element_type());
  if (!dtype || y->element_type() != x.element_type()) {
    return Failed(InvalidArgumentError("jaxcomm: dispatch: element types of operand and result do not match"));
  }
  Participant participant = ParticipantOf(run, rank, *dtype, x, y);
  participant.table = table.untyped_data();
  participant.table_count = static_cast<int64_t>(table.element_count());
  participant.index = order.typed_data();
  participant.index_count = static_cast<int64_t>(order.element_count());
  return Arrive(*state->rendezvous, participant);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DispatchInstantiate, Instantiate<Collective::kDispatch>, BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(DispatchExecute, ExecuteDispatch,
                              BindCall()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::S32>>()  // order: the row of x for each packed row
                                  .Arg<ffi::Buffer<ffi::S32>>()  // table of plan/slices.h, over packed rows
                                  .Ret<ffi::AnyBuffer>());       // y

}  // namespace jaxcomm
