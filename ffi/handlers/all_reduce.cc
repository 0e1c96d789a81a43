// all_reduce: y is the sum, maximum or minimum of all x.
#include "handlers/call.h"

namespace jaxcomm {

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllReduceInstantiate, Instantiate<Collective::kAllReduce>, BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(AllReduceExecute, Execute, BindExecute());

}  // namespace jaxcomm
