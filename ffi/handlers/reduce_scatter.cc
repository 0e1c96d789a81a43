// reduce_scatter: x holds one block per rank, y is this rank's, reduced.
#include "call.h"

namespace jaxcomm {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(CallAttributes call, Groups groups, Processes processes,
                                                     int64_t input_run, int64_t reduce_op) {
  CallSpec spec = MakeSpec(Collective::kReduceScatter, call, groups, processes);
  spec.input_run = input_run;
  spec.reduce_op = static_cast<ReduceOp>(reduce_op);
  return MakeState(std::move(spec));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ReduceScatterInstantiate, Instantiate,
                              BindCall()
                                  .Attr<int64_t>("input_run")    // Layout::run of x
                                  .Attr<int64_t>("reduce_op"));  // ReduceOp
XLA_FFI_DEFINE_HANDLER_SYMBOL(ReduceScatterExecute, Execute, BindExecute());

}  // namespace jaxcomm
