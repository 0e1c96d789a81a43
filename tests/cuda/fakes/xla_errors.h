// Errors of the fakes of XLA: texts that handlers read and delete.
#pragma once

#include <string>

#include "xla/ffi/api/c_api.h"

namespace jaxcomm {
namespace fake {

inline XLA_FFI_Error* NewError(const std::string& text) {
  return reinterpret_cast<XLA_FFI_Error*>(new std::string(text));
}

template <typename Args>
void TextOf(Args* args) {
  args->message = reinterpret_cast<std::string*>(args->error)->c_str();
}

// The function has another name from jaxlib 0.12 on.
template <typename Api>
auto SetTexts(Api& api, int) -> decltype(void(api.XLA_FFI_Error_GetMessage)) {
  api.XLA_FFI_Error_GetMessage = &TextOf;
}
template <typename Api>
void SetTexts(Api& api, long) {
  api.XLA_FFI_Error_GetDetails = &TextOf;
}

inline void SetErrors(XLA_FFI_Api& api) {
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) { return NewError(args->message); };
  SetTexts(api, 0);
  api.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) {
    delete reinterpret_cast<std::string*>(args->error);
  };
}

}  // namespace fake
}  // namespace jaxcomm
