// all_to_all: x and y hold one block per rank, along the split and the concat axis.
#include "handlers/call.h"

namespace jaxcomm {

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllToAllInstantiate, Instantiate<Collective::kAllToAll>, BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllToAllExecute, Execute, BindExecute());

}  // namespace jaxcomm
