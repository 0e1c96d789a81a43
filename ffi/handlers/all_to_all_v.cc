// all_to_all_v: y is the start value `output`, with the rows that other ranks send written into it.
#include <cstring>
#include <optional>

#include "handlers/call.h"

namespace jaxcomm {
namespace {

ffi::Future ExecuteAllToAllV(CpuCallState* state, ffi::RunId run, ffi::Buffer<ffi::S32> rank, ffi::AnyBuffer operand,
                             ffi::AnyBuffer output, ffi::AnyBuffer table, ffi::Result<ffi::AnyBuffer> y) {
  const std::optional<DType> dtype = FromFfi(operand.element_type());
  const bool wide = table.element_type() == ffi::DataType::S64;
  if (!dtype || output.element_type() != operand.element_type() || y->element_type() != operand.element_type() ||
      (!wide && table.element_type() != ffi::DataType::S32) || output.element_count() != y->element_count()) {
    return Failed(InvalidArgumentError("jaxcomm: all_to_all_v: element types or sizes of the operands do not match"));
  }
  // The lowering aliases them, so XLA has made a copy if it needs one.
  if (y->untyped_data() != output.untyped_data() && y->size_bytes() > 0) {
    std::memcpy(y->untyped_data(), output.untyped_data(), output.size_bytes());
  }
  Participant participant = ParticipantOf(run, rank, *dtype, operand, y);
  participant.table = table.untyped_data();
  participant.int64_table = wide;
  participant.table_count = static_cast<int64_t>(table.element_count());
  return Arrive(*state->rendezvous, participant);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllToAllVInstantiate, Instantiate<Collective::kAllToAllV>, BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllToAllVExecute, ExecuteAllToAllV,
                              BindCall()
                                  .Arg<ffi::AnyBuffer>()    // operand
                                  .Arg<ffi::AnyBuffer>()    // output: start value of y
                                  .Arg<ffi::AnyBuffer>()    // table of plan/slices.h
                                  .Ret<ffi::AnyBuffer>());  // y

}  // namespace jaxcomm
