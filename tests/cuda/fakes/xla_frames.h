// A fake of XLA:GPU that passes attributes. Handlers of users read them with XLA's own headers.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../../ffi/cuda/xla/user_call.h"
#include "../../../ffi/cuda/xla/xla_collectives_abi.h"
#include "../../check.h"
#include "xla_attributes.h"
#include "xla_errors.h"

namespace jaxcomm {
namespace fake {

// XLA's data of a call on one device.
struct CallOnDevice {
  int32_t device = 0;
  cudaStream_t stream = nullptr;
  void* nccl_comm = nullptr;
  void* state = nullptr;
  bool requested = false;
  int64_t run = 0;
  // Collective memory. Buffers outside of it have no window.
  void* window = nullptr;
  char* memory = nullptr;
  int64_t memory_bytes = 0;
  bool refuses_windows = false;
  std::vector<xla_abi::Region> regions;  // that windows were requested for in this run
};

// The table of XLA's functions, with room for the functions of newer runtimes at its end.
struct Xla {
  XLA_FFI_Api api;
  char more[256];
};

// The type of the state of the handlers that a test calls.
inline ffi::TypeId* state_type = &cuda::UserCallState::id;

template <typename Args>
CallOnDevice& Of(Args* args) {
  return *reinterpret_cast<CallOnDevice*>(args->ctx);
}

inline Xla MakeXla() {
  Xla xla = {};
  xla.api.struct_size = sizeof xla;
  SetErrors(xla.api);
  xla.api.XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* args) -> XLA_FFI_Error* {
    Of(args).state = args->state;
    return nullptr;
  };
  xla.api.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) -> XLA_FFI_Error* {
    CHECK(args->type_id == state_type);
    args->state = Of(args).state;
    return nullptr;
  };
  xla.api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
    args->stream = Of(args).stream;
    return nullptr;
  };
  xla.api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
    args->device_ordinal = Of(args).device;
    return nullptr;
  };
  xla.api.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) -> XLA_FFI_Error* {
    args->run_id = Of(args).run;
    return nullptr;
  };
  // One extension per context, because the functions do not receive their caller.
  const xla_abi::FindExtension find = [](xla_abi::FindExtensionArgs* args) -> XLA_FFI_Error* {
    thread_local xla_abi::CollectivesWithWindows with_windows;
    xla_abi::Collectives& collectives = with_windows.communicators;
    collectives.base = {sizeof with_windows, xla_abi::kCollectives, xla_abi::kCollectivesMajor, 2, nullptr};
    collectives.state = args->context;
    collectives.request_communicator = [](const xla_abi::Collectives* self, xla_abi::RequestArgs* args) {
      CHECK(args->num_groups >= 1);
      static_cast<CallOnDevice*>(self->state)->requested = true;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    collectives.get_communicator = [](const xla_abi::Collectives* self, xla_abi::GetArgs* args) {
      CHECK(static_cast<CallOnDevice*>(self->state)->requested);
      args->communicator = static_cast<CallOnDevice*>(self->state)->nccl_comm;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    with_windows.request_window = [](const xla_abi::Collectives* self, xla_abi::RequestWindowArgs* args) {
      auto& execution = *static_cast<CallOnDevice*>(self->state);
      CHECK(execution.requested);
      if (execution.refuses_windows) return NewError("not now");
      execution.regions.assign(args->regions, args->regions + args->num_regions);
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    with_windows.get_window = [](const xla_abi::Collectives* self, xla_abi::GetWindowArgs* args) {
      const auto& execution = *static_cast<CallOnDevice*>(self->state);
      const int64_t offset = static_cast<const char*>(args->buffer) - execution.memory;
      for (const xla_abi::Region& region : execution.regions) {
        if (region.buffer != args->buffer || offset < 0 || offset >= execution.memory_bytes) continue;
        args->window = execution.window;
        args->offset = static_cast<size_t>(offset);
      }
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    args->extension = &collectives.base;
    return nullptr;
  };
  std::memcpy(reinterpret_cast<char*>(&xla) + xla_abi::kFindExtensionOffset, &find, sizeof find);
  return xla;
}

struct Array {
  void* data;
  std::vector<int64_t> dims;
  XLA_FFI_DataType dtype = XLA_FFI_DataType_INVALID;  // else that of the call
};

// Calls a handler. Returns the text of its error, or an empty string.
inline std::string Invoke(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, CallOnDevice& execution,
                          Attributes attributes, XLA_FFI_DataType dtype, std::vector<Array> args,
                          std::vector<Array> rets) {
  static const Xla xla = MakeXla();
  state_type->type_id = 1;  // as XLA does when the type is registered
  if (stage == XLA_FFI_ExecutionStage_PREPARE) execution.regions.clear();
  std::vector<XLA_FFI_Buffer> buffers;
  for (std::vector<Array>* arrays : {&args, &rets}) {
    for (Array& array : *arrays) {
      XLA_FFI_Buffer buffer = {};
      buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
      buffer.dtype = array.dtype == XLA_FFI_DataType_INVALID ? dtype : array.dtype;
      buffer.data = array.data;
      buffer.rank = static_cast<int64_t>(array.dims.size());
      buffer.dims = array.dims.data();
      buffers.push_back(buffer);
    }
  }
  std::vector<void*> pointers;
  for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &xla.api;
  frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&execution);
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()), arg_types.data(),
                pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()), ret_types.data(),
                pointers.data() + args.size()};
  frame.attrs = attributes.Get();
  std::remove_pointer_t<decltype(frame.extension_start)> unknown = {};  // of a newer XLA; its type's name varies
  unknown.struct_size = sizeof unknown;
  unknown.type = static_cast<decltype(unknown.type)>(XLA_FFI_Extension_Metadata + 1);
  frame.extension_start = &unknown;
  XLA_FFI_Error* const error = handler(&frame);
  if (error == nullptr) return "";
  const std::unique_ptr<std::string> text(reinterpret_cast<std::string*>(error));
  return *text;
}

}  // namespace fake
}  // namespace jaxcomm
