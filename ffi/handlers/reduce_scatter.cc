// reduce_scatter: x holds one block per rank, y is this rank's, reduced.
#include "handlers/call.h"

namespace jaxcomm {

XLA_FFI_DEFINE_HANDLER_SYMBOL(ReduceScatterInstantiate, Instantiate<Collective::kReduceScatter>, BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ReduceScatterExecute, Execute, BindExecute());

}  // namespace jaxcomm
