// permute: y is x of one other rank, or zeros.
#include "call.h"

namespace jaxcomm {
namespace {

ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(CallAttributes call, Groups groups, Processes processes,
                                                     ffi::Span<const int64_t> source_of) {
  CallSpec spec = MakeSpec(Collective::kPermute, call, groups, processes);
  spec.source_of.assign(source_of.begin(), source_of.end());
  return MakeState(std::move(spec));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    PermuteInstantiate, Instantiate,
    BindCall().Attr<ffi::Span<const int64_t>>("source_of"));  // position, by position; -1: none
XLA_FFI_DEFINE_HANDLER_SYMBOL(PermuteExecute, Execute, BindExecute());

}  // namespace jaxcomm
