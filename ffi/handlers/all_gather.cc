// all_gather: x is one block, y holds one per rank.
#include "handlers/call.h"

namespace jaxcomm {

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllGatherInstantiate, Instantiate<Collective::kAllGather>, BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllGatherExecute, Execute, BindExecute());

}  // namespace jaxcomm
