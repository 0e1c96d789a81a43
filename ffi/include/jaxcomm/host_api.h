// The table of functions that jaxcomm's module provides to FFI handlers of users. jaxcomm.register_ffi_target passes it
// to the library that holds the handlers, so nothing is linked. Include jaxcomm/host.h, which wraps this file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm.h"
#include "version.h"

struct ncclDevComm;

namespace jaxcomm {
namespace host {

// The data of a handler's call on one device.
struct CallData {
  device::Comm comm;
  int32_t max_channels = 0;
  void* call = nullptr;  // for the functions of the table
  device::GinHandle gin;
  const ncclDevComm* nccl_comm = nullptr;
};

// Receives the reason why a function of the table returns false. The text is valid only during the callback.
using OnError = void (*)(void* sink, const char* text);

// `api` and `context` are the arguments of xla::ffi::CtxDecoding::Decode. New functions may be added at the end.
struct Api {
  size_t struct_size;
  size_t call_bytes;  // sizeof(CallData)
  int32_t version;    // JAXCOMM_VERSION
  // Stage Initialize. Collective at the first run on a device.
  bool (*start)(const void* api, void* context, CallData* call, OnError on_error, void* sink);
  // Stage Initialize. Collective if `bytes` exceeds all earlier requests of the target.
  bool (*reserve)(CallData* call, int64_t bytes, OnError on_error, void* sink);
  // Stage Execute.
  bool (*find)(const void* api, void* context, CallData* call, OnError on_error, void* sink);
  // Stage Initialize. Collective at the first run on a device.
  bool (*use_gin)(CallData* call, int32_t nccl_version, OnError on_error, void* sink);
  // Stages Initialize and Execute.
  bool (*check_windows)(const CallData* call, OnError on_error, void* sink);
  // Stage Execute.
  bool (*find_window)(const CallData* call, const void* buffer, device::BufferWindow* window, OnError on_error,
                      void* sink);
};

}  // namespace host
}  // namespace jaxcomm
