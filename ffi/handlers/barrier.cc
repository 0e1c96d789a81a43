// barrier: y is x, once every rank has arrived. Operands are aliased to results, so nothing is copied.
#include "handlers/call.h"

namespace jaxcomm {
namespace {

ffi::Future ExecuteBarrier(CpuCallState* state, ffi::RunId run, ffi::Buffer<ffi::S32> rank, ffi::RemainingArgs xs,
                           ffi::RemainingRets ys) {
  if (xs.size() != ys.size()) return Failed(InvalidArgumentError("jaxcomm: barrier: one result per operand expected"));
  for (size_t i = 0; i < xs.size(); ++i) {
    auto x = xs.get<ffi::AnyBuffer>(i);
    auto y = ys.get<ffi::AnyBuffer>(i);
    if (!x || !y || x->untyped_data() != (*y)->untyped_data()) {
      return Failed(InvalidArgumentError("jaxcomm: barrier: results must be aliased to operands"));
    }
  }
  Participant participant;
  participant.run_id = run.run_id;
  participant.rank = rank.typed_data()[0];
  return Arrive(*state->rendezvous, participant);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(BarrierInstantiate, Instantiate<Collective::kBarrier>, BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BarrierExecute, ExecuteBarrier,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::State<CpuCallState>>()
                                  .Ctx<ffi::RunId>()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // logical id of this device
                                  .RemainingArgs()               // xs
                                  .RemainingRets());             // ys

}  // namespace jaxcomm
