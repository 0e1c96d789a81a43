// broadcast: y is x of the root.
#include "call.h"

namespace jaxcomm {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(CallAttributes call, Groups groups, Processes processes,
                                                     int64_t root) {
  CallSpec spec = MakeSpec(Collective::kBroadcast, call, groups, processes);
  spec.root = static_cast<int32_t>(root);
  return MakeState(std::move(spec));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(BroadcastInstantiate, Instantiate,
                              BindCall().Attr<int64_t>("root"));  // position in the group
XLA_FFI_DEFINE_HANDLER_SYMBOL(BroadcastExecute, Execute, BindExecute());

}  // namespace jaxcomm
