// broadcast: y is x of the root.
#include "handlers/call.h"

namespace jaxcomm {

XLA_FFI_DEFINE_HANDLER_SYMBOL(BroadcastInstantiate, Instantiate<Collective::kBroadcast>, BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(BroadcastExecute, Execute, BindExecute());

}  // namespace jaxcomm
