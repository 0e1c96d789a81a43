// A fake of XLA:GPU: data of a call on one device, XLA's table of functions with its extension for collectives, and
// calls of a handler's stages.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../../ffi/cuda/xla/call.h"
#include "../../../ffi/cuda/xla/user_call.h"
#include "../../../ffi/cuda/xla/xla_collectives_abi.h"
#include "../../check.h"
#include "xla_attributes.h"

namespace jaxcomm {
namespace fake {

// Errors: texts that handlers read and delete.
inline std::atomic<int> num_errors{0};  // that have not been deleted
inline XLA_FFI_Error* NewError(const std::string& text) {
  ++num_errors;
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
    --num_errors;
    delete reinterpret_cast<std::string*>(args->error);
  };
}

// XLA's data of a call on one device.
struct CallOnDevice {
  ffi::TypeId* state_type = &cuda::UserCallState::id;
  void* state = nullptr;  // of the handler
  cudaStream_t stream = nullptr;
  int32_t device = 0;
  int64_t run = 0;
  void* nccl_comm = nullptr;
  bool has_extension = true;
  xla_abi::Extension extension = {sizeof(xla_abi::CollectivesWithWindows), xla_abi::kCollectives,
                                  xla_abi::kCollectivesMajor, 2, nullptr};
  std::string refused;  // the function that returns an error: "extension", "request", "get", "window" or "get window"
  // Collective memory. Buffers outside of it have no window.
  void* window = nullptr;
  char* memory = nullptr;
  int64_t memory_bytes = 0;

  // The requests of one run.
  int num_communicators = 0;
  const xla_abi::ReplicaGroup* groups = nullptr;  // owned by the caller
  size_t num_groups = 0;
  std::vector<xla_abi::Region> regions;  // that windows were requested for
};

// The table of XLA's functions, with room for the functions of newer runtimes at its end.
struct Xla {
  XLA_FFI_Api api;
  char more[256];
};

template <typename Args>
CallOnDevice& Of(Args* args) {
  return *reinterpret_cast<CallOnDevice*>(args->ctx);
}
inline CallOnDevice& Of(const xla_abi::Collectives* self) { return *static_cast<CallOnDevice*>(self->state); }

inline XLA_FFI_Error* FindCollectives(xla_abi::FindExtensionArgs* args) {
  auto& call = *reinterpret_cast<CallOnDevice*>(args->context);
  if (call.refused == "extension") return NewError("not now");
  if (!call.has_extension) return nullptr;
  // One extension per context, because the functions do not receive their caller.
  thread_local xla_abi::CollectivesWithWindows with_windows;
  xla_abi::Collectives& collectives = with_windows.communicators;
  CHECK(args->type == xla_abi::kCollectives);
  collectives.base = call.extension;
  collectives.state = args->context;
  collectives.request_communicator = [](const xla_abi::Collectives* self, xla_abi::GroupArgs* args) {
    if (Of(self).refused == "request") return NewError("not now");
    CHECK(args->group_mode == xla_abi::kFlattenedIds && args->communication_id == 0);
    ++Of(self).num_communicators;
    Of(self).groups = args->groups;
    Of(self).num_groups = args->num_groups;
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  collectives.get_communicator = [](const xla_abi::Collectives* self, xla_abi::GetArgs* args) {
    if (Of(self).refused == "get") return NewError("not now");
    CHECK(Of(self).num_communicators == 1);
    args->communicator = Of(self).nccl_comm;
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  with_windows.request_window = [](const xla_abi::Collectives* self, xla_abi::RequestWindowArgs* args) {
    CHECK(Of(self).num_communicators == 1);
    if (Of(self).refused == "window") return NewError("not now");
    Of(self).regions.assign(args->regions, args->regions + args->num_regions);
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  with_windows.get_window = [](const xla_abi::Collectives* self, xla_abi::GetWindowArgs* args) {
    const CallOnDevice& call = Of(self);
    if (call.refused == "get window") return NewError("not now");
    CHECK(args->groups.group_mode == xla_abi::kFlattenedIds && args->groups.communication_id == 0);
    const int64_t offset = static_cast<const char*>(args->buffer) - call.memory;
    for (const xla_abi::Region& region : call.regions) {
      if (region.buffer != args->buffer || offset < 0 || offset >= call.memory_bytes) continue;
      args->window = call.window;
      args->offset = static_cast<size_t>(offset);
    }
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  args->extension = &collectives.base;
  return nullptr;
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
    CHECK(args->type_id == Of(args).state_type);
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
  const xla_abi::FindExtension find = &FindCollectives;
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
  execution.state_type->type_id = 1;  // as XLA does when the type is registered
  if (stage == XLA_FFI_ExecutionStage_PREPARE) {
    execution.num_communicators = 0;
    execution.regions.clear();
  }
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
  --num_errors;
  const std::unique_ptr<std::string> text(reinterpret_cast<std::string*>(error));
  return *text;
}

// A call of jaxcomm's own on one device, of one operand and one result, stage by stage. Its attributes are in the
// state.
struct FakeXla : CallOnDevice {
  FakeXla() { state_type = &cuda::GpuCallState::id; }
  // Of a run whose communicator XLA has found.
  FakeXla(cuda::GpuCallState& of, cudaStream_t on, int32_t of_device, void* comm) : FakeXla() {
    state = &of, stream = on, device = of_device, nccl_comm = comm, num_communicators = 1;
  }
  FakeXla(const FakeXla&) = delete;

  // Operands behind x.
  struct Operand {
    const void* data;
    int64_t count;
    XLA_FFI_DataType dtype;
  };
  std::vector<Operand> more;
  XLA_FFI_DataType dtype = XLA_FFI_DataType_S32;  // of x and y
  void *x = nullptr, *y = nullptr;
  int64_t x_count = 0, y_count = 0;

  void Use(void* operand, int64_t operand_count, void* result, int64_t result_count) {
    x = operand, x_count = operand_count, y = result, y_count = result_count;
  }
  // One stage. The operands are the rank, which is not read, x and `more`. Returns the handler's error.
  std::string Run(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage) {
    int32_t rank = 0;
    std::vector<Array> args = {{&rank, {}}, {x, {x_count}}};
    for (const Operand& operand : more) {
      args.push_back({const_cast<void*>(operand.data), {operand.count}, operand.dtype});
    }
    return Invoke(handler, stage, *this, {}, dtype, std::move(args), {{y, {y_count}}});
  }
  std::string Prepare() { return Run(&CudaPrepare, XLA_FFI_ExecutionStage_PREPARE); }
  std::string Initialize() { return Run(&CudaInitialize, XLA_FFI_ExecutionStage_INITIALIZE); }
  std::string Execute() { return Run(&CudaExecute, XLA_FFI_ExecutionStage_EXECUTE); }
};

}  // namespace fake
}  // namespace jaxcomm
