// The handlers of the collectives with one operand and one result.
#include "handlers/call.h"

namespace jaxcomm {

#define JAXCOMM_HANDLER(Name)                                                                            \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Name##Instantiate, Instantiate<Collective::k##Name>, BindInstantiate()); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Name##Execute, Execute, BindExecute())
JAXCOMM_HANDLER(AllGather);
JAXCOMM_HANDLER(AllReduce);
JAXCOMM_HANDLER(AllToAll);
JAXCOMM_HANDLER(Broadcast);
JAXCOMM_HANDLER(Permute);
JAXCOMM_HANDLER(ReduceScatter);
#undef JAXCOMM_HANDLER

}  // namespace jaxcomm
