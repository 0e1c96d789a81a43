// all_reduce: y is the sum, maximum or minimum of all x.
#include "call.h"

namespace jaxcomm {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(CallAttributes call, Groups groups, Processes processes,
                                                     int64_t reduce_op) {
  CallSpec spec = MakeSpec(Collective::kAllReduce, call, groups, processes);
  spec.reduce_op = static_cast<ReduceOp>(reduce_op);
  return MakeState(std::move(spec));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllReduceInstantiate, Instantiate,
                              BindCall().Attr<int64_t>("reduce_op"));  // ReduceOp
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllReduceExecute, Execute, BindExecute());

}  // namespace jaxcomm
