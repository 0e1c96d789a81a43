// A fake of XLA:GPU that runs the stages of a handler for one call on one device, with or without XLA's extension for
// collectives.
#pragma once

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../../../ffi/cuda/xla/call.h"
#include "../../../ffi/cuda/xla/xla_collectives_abi.h"
#include "../../check.h"
#include "xla/ffi/api/c_api.h"
#include "xla_errors.h"

namespace jaxcomm {
namespace fake {

struct FakeXla {
  // XLA's data.
  void* state = nullptr;  // of the handler
  void* stream = nullptr;
  int32_t device = 0;
  int64_t run = 0;
  bool has_extension = true;
  std::string refused;  // the function that returns an error: "extension", "request" or "get"
  void* communicator = nullptr;
  // Collective memory. Buffers outside of it have no window.
  void* window = nullptr;
  char* memory = nullptr;
  int64_t memory_bytes = 0;

  // The requests that the fake received in one run.
  int num_communicators = 0;
  const xla_abi::ReplicaGroup* groups = nullptr;  // owned by the caller
  size_t num_groups = 0;
  std::vector<xla_abi::Region> regions;

  FakeXla() {
    cuda::GpuCallState::id.type_id = 1;  // as registration does it
    auto* table = reinterpret_cast<XLA_FFI_Api*>(api_);
    table->struct_size = sizeof api_;
    SetErrors(*table);
    table->XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) {
      args->state = Of(args->ctx).state;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    table->XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) {
      args->stream = Of(args->ctx).stream;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    table->XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) {
      args->device_ordinal = Of(args->ctx).device;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    table->XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) {
      args->run_id = Of(args->ctx).run;
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    const xla_abi::FindExtension find = [](xla_abi::FindExtensionArgs* args) -> XLA_FFI_Error* {
      FakeXla& self = Of(args->context);
      if (self.refused == "extension") return NewError("not now");
      args->extension = self.has_extension ? &self.extension_.communicators.base : nullptr;
      return nullptr;
    };
    std::memcpy(api_ + xla_abi::kFindExtensionOffset, &find, sizeof find);
    extension_.communicators.base = {sizeof extension_, xla_abi::kCollectives, 0, 2, nullptr};
    extension_.communicators.state = this;
    extension_.communicators.request_communicator = [](const xla_abi::Collectives* collectives,
                                                       xla_abi::RequestArgs* args) -> XLA_FFI_Error* {
      FakeXla& self = Of(collectives);
      if (self.refused == "request") return NewError("not now");
      ++self.num_communicators;
      self.groups = args->groups;
      self.num_groups = args->num_groups;
      return nullptr;
    };
    extension_.communicators.get_communicator = [](const xla_abi::Collectives* collectives,
                                                   xla_abi::GetArgs* args) -> XLA_FFI_Error* {
      if (Of(collectives).refused == "get") return NewError("not now");
      CHECK(Of(collectives).num_communicators == 1);
      args->communicator = Of(collectives).communicator;
      return nullptr;
    };
    extension_.request_window = [](const xla_abi::Collectives* collectives,
                                   xla_abi::RequestWindowArgs* args) -> XLA_FFI_Error* {
      Of(collectives).regions.assign(args->regions, args->regions + args->num_regions);
      return nullptr;
    };
    extension_.get_window = [](const xla_abi::Collectives* collectives,
                               xla_abi::GetWindowArgs* args) -> XLA_FFI_Error* {
      const FakeXla& self = Of(collectives);
      const int64_t offset = static_cast<const char*>(args->buffer) - self.memory;
      for (const xla_abi::Region& region : self.regions) {
        if (region.buffer != args->buffer || offset < 0 || offset >= self.memory_bytes) continue;
        args->window = self.window;
        args->offset = static_cast<size_t>(offset);
      }
      return nullptr;
    };
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

  // Runs one stage of a call. Its operands are the rank, x and `more`. Returns the handler's error.
  std::string Run(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), XLA_FFI_ExecutionStage stage, void* x, int64_t x_count,
                  void* y, int64_t y_count) {
    if (stage == XLA_FFI_ExecutionStage_PREPARE) num_communicators = 0, regions.clear();
    int32_t rank = 0;  // not read
    std::vector<XLA_FFI_Buffer> buffers(3 + more.size());
    const auto fill = [&](XLA_FFI_Buffer& buffer, void* data, int64_t dimensions, int64_t* count) {
      buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
      buffer.dtype = dtype;
      buffer.data = data;
      buffer.rank = dimensions;
      buffer.dims = count;
    };
    fill(buffers[0], &rank, 0, nullptr);
    fill(buffers[1], x, 1, &x_count);
    fill(buffers[2], y, 1, &y_count);
    std::vector<XLA_FFI_ArgType> arg_types(2 + more.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<void*> args = {&buffers[0], &buffers[1]};
    for (size_t i = 0; i < more.size(); ++i) {
      XLA_FFI_Buffer& buffer = buffers[3 + i];
      fill(buffer, const_cast<void*>(more[i].data), 1, &more[i].count);
      buffer.dtype = more[i].dtype;
      args.push_back(&buffer);
    }
    XLA_FFI_RetType ret_types[] = {XLA_FFI_RetType_BUFFER};
    void* rets[] = {&buffers[2]};
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = reinterpret_cast<XLA_FFI_Api*>(api_);
    frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(this);
    frame.stage = stage;
    frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
    frame.args.size = static_cast<int64_t>(args.size());
    frame.args.types = arg_types.data();
    frame.args.args = args.data();
    frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
    frame.rets.size = 1;
    frame.rets.types = ret_types;
    frame.rets.rets = rets;
    frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
    auto* const error = reinterpret_cast<std::string*>(handler(&frame));
    if (error == nullptr) return "";
    const std::string text = *error;
    delete error;
    return text;
  }

 private:
  static FakeXla& Of(XLA_FFI_ExecutionContext* context) { return *reinterpret_cast<FakeXla*>(context); }
  static FakeXla& Of(const xla_abi::Collectives* collectives) { return *static_cast<FakeXla*>(collectives->state); }

  alignas(XLA_FFI_Api) char api_[1024] = {};  // of any version
  xla_abi::CollectivesWithWindows extension_ = {};
};

}  // namespace fake
}  // namespace jaxcomm
