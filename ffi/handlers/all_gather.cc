// all_gather: x is one block, y holds one per rank.
#include "call.h"

namespace jaxcomm {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(CallAttributes call, Groups groups, Processes processes,
                                                     int64_t output_run) {
  CallSpec spec = MakeSpec(Collective::kAllGather, call, groups, processes);
  spec.output_run = output_run;
  return MakeState(std::move(spec));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllGatherInstantiate, Instantiate,
                              BindCall().Attr<int64_t>("output_run"));  // Layout::run of y
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllGatherExecute, Execute, BindExecute());

}  // namespace jaxcomm
