// all_to_all: x and y hold one block per rank, along the split and the concat axis.
#include "call.h"

namespace jaxcomm {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(CallAttributes call, Groups groups, Processes processes,
                                                     int64_t input_run, int64_t output_run) {
  CallSpec spec = MakeSpec(Collective::kAllToAll, call, groups, processes);
  spec.input_run = input_run;
  spec.output_run = output_run;
  return MakeState(std::move(spec));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllToAllInstantiate, Instantiate,
                              BindCall()
                                  .Attr<int64_t>("input_run")     // Layout::run of x
                                  .Attr<int64_t>("output_run"));  // and of y
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllToAllExecute, Execute, BindExecute());

}  // namespace jaxcomm
