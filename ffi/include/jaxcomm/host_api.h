// What jaxcomm's module offers to FFI handlers of others: a table of functions, which the library that holds them gets
// when it is registered (jaxcomm.register_ffi_target). Nothing is linked. Include jaxcomm/host.h, which wraps this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm.h"
#include "version.h"

namespace jaxcomm {
namespace host {

// What a handler knows of its call on one device.
struct CallData {
  device::Comm comm;
  int32_t max_channels = 0;
  void* call = nullptr;  // for Api::reserve
};

// Says why a function of the table returns false. The text lives as long as this runs.
using OnError = void (*)(void* sink, const char* text);

// `api` and `context` are the arguments of xla::ffi::CtxDecoding::Decode. Functions may be added at the end.
struct Api {
  size_t struct_size;
  size_t call_bytes;  // sizeof(CallData)
  int32_t version;    // JAXCOMM_VERSION
  // Stage Initialize. Collective at the first run on a device.
  bool (*start)(const void* api, void* context, CallData* call, OnError on_error, void* sink);
  // The same stage. Collective if `bytes` is more than the target has had so far.
  bool (*reserve)(CallData* call, int64_t bytes, OnError on_error, void* sink);
  // Stage Execute.
  bool (*find)(const void* api, void* context, CallData* call, OnError on_error, void* sink);
};

}  // namespace host
}  // namespace jaxcomm
