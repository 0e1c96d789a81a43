// permute: y is x of one other rank, or zeros.
#include "handlers/call.h"

namespace jaxcomm {

XLA_FFI_DEFINE_HANDLER_SYMBOL(PermuteInstantiate, Instantiate<Collective::kPermute>, BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(PermuteExecute, Execute, BindExecute());

}  // namespace jaxcomm
