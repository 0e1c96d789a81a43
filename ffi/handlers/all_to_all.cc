// all_to_all: x holds one block per rank along the split axis, y along the concatenation axis.
#include "handlers/call.h"

namespace jaxcomm {

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllToAllInstantiate, Instantiate<Collective::kAllToAll>, BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllToAllExecute, Execute, BindExecute());

}  // namespace jaxcomm
