// combine: y holds the sums of the rows of each token, or the row of each choice.
#include <optional>

#include "handlers/call.h"

namespace jaxcomm {
namespace {

ffi::Future ExecuteCombine(CpuCallState* state, ffi::RunId run, ffi::Buffer<ffi::S32> rank, ffi::AnyBuffer rows,
                           ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> expert, ffi::AnyBuffer weights,
                           ffi::Buffer<ffi::S32> table, ffi::Result<ffi::AnyBuffer> y) {
  const std::optional<DType> dtype = FromFfi(rows.element_type());
  const bool wide = rows.element_type() == ffi::DataType::F64;
  if (!dtype || y->element_type() != rows.element_type() || slot.element_count() != expert.element_count() ||
      (weights.element_count() > 0 && (weights.element_count() != slot.element_count() ||
                                       weights.element_type() != (wide ? ffi::DataType::F64 : ffi::DataType::F32)))) {
    return Failed(InvalidArgumentError("jaxcomm: combine: element types or sizes of the operands do not match"));
  }
  Participant participant = ParticipantOf(run, rank, *dtype, rows, y);
  participant.table = table.untyped_data();
  participant.table_count = static_cast<int64_t>(table.element_count());
  participant.index = slot.typed_data();
  participant.index_count = static_cast<int64_t>(slot.element_count());
  participant.expert = expert.typed_data();
  if (weights.element_count() > 0) participant.weights = weights.untyped_data();
  return Arrive(*state->rendezvous, participant);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CombineInstantiate, Instantiate<Collective::kCombine>, BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CombineExecute, ExecuteCombine,
                              BindCall()
                                  .Arg<ffi::AnyBuffer>()         // rows
                                  .Arg<ffi::Buffer<ffi::S32>>()  // slot of each choice, or -1
                                  .Arg<ffi::Buffer<ffi::S32>>()  // expert of each choice
                                  .Arg<ffi::AnyBuffer>()         // weight of each choice; empty: ones
                                  .Arg<ffi::Buffer<ffi::S32>>()  // table of plan/slices.h, as of dispatch
                                  .Ret<ffi::AnyBuffer>());       // y

}  // namespace jaxcomm
