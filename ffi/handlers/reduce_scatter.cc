// reduce_scatter: x holds one block per rank, y is the reduction of this rank's block.
#include "handlers/call.h"

namespace jaxcomm {

XLA_FFI_DEFINE_HANDLER_SYMBOL(ReduceScatterInstantiate, Instantiate<Collective::kReduceScatter>, BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ReduceScatterExecute, Execute, BindExecute());

}  // namespace jaxcomm
