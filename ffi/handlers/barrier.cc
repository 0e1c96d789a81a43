// barrier: waits until every rank has arrived. Results are aliased to operands, so nothing is copied.
#include "handlers/call.h"

namespace jaxcomm {
namespace {

ffi::Future ExecuteBarrier(CpuCallState* state, ffi::RunId run, ffi::Buffer<ffi::S32> rank, ffi::RemainingArgs xs,
                           ffi::RemainingRets ys) {
  if (xs.size() != ys.size()) {
    return Failed(InvalidArgumentError("jaxcomm: barrier: got " + std::to_string(xs.size()) + " operands and " +
                                       std::to_string(ys.size()) + " results, expected one result per operand"));
  }
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
                              BindCall()
                                  .RemainingArgs()    // xs
                                  .RemainingRets());  // ys

}  // namespace jaxcomm
