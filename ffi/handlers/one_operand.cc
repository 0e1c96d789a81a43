// The handlers of the collectives with one operand and one result: those whose elements are those of the array,
// and which have an input.
#include "handlers/call.h"

namespace jaxcomm {

#define JAXCOMM_HANDLERS(Name)                                                                           \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Name##Instantiate, Instantiate<Collective::k##Name>, BindInstantiate()); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Name##Execute, Execute, BindExecute());
#define JAXCOMM_HANDLERS_kNone(Name)
#define JAXCOMM_HANDLERS_kOne(Name) JAXCOMM_HANDLERS(Name)
#define JAXCOMM_HANDLERS_kPerRank(Name) JAXCOMM_HANDLERS(Name)
#define JAXCOMM_HANDLERS_OF_kArray(Name, input) JAXCOMM_HANDLERS_##input(Name)
#define JAXCOMM_HANDLERS_OF_kBoxes(Name, input) JAXCOMM_HANDLERS_##input(Name)
#define JAXCOMM_HANDLERS_OF_kSlices(Name, input)
#define JAXCOMM_HANDLERS_OF_kTokens(Name, input)
#define JAXCOMM_COLLECTIVE(enumerator, name, Handler, functions, elements, input, ...) \
  JAXCOMM_HANDLERS_OF_##elements(Handler, input)
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE

}  // namespace jaxcomm
