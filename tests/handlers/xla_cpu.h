// A fake of XLA:CPU: instantiates a call site, then executes it on several devices and waits for their futures.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/handlers/call.h"
#include "../check.h"
#include "../cuda/fakes/xla_attributes.h"

namespace jaxcomm {
namespace fake {

struct XlaError {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string text;
};

// The end of one execution.
class XlaFuture {
 public:
  void Complete(XlaError error) {
    std::lock_guard<std::mutex> lock(mutex_);
    CHECK(!complete_);
    complete_ = true;
    error_ = std::move(error);
    changed_.notify_all();
  }
  XlaError Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::seconds(60), [&] { return complete_; }));
    return error_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool complete_ = false;
  XlaError error_;
};

struct Buffer {
  XLA_FFI_DataType type = XLA_FFI_DataType_S32;
  void* data = nullptr;
  std::vector<int64_t> dims;
};

// A call site of an executable.
class CallSite {
 public:
  using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

  CallSite() {
    CpuCallState::id.type_id = 1;  // as XLA does when the type is registered
    std::memset(api_, 0, sizeof(api_));
    auto* table = reinterpret_cast<XLA_FFI_Api*>(api_);
    table->struct_size = sizeof(api_);
    table->XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return reinterpret_cast<XLA_FFI_Error*>(new XlaError{args->errc, args->message});
    };
    table->XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* args) -> XLA_FFI_Error* {
      CHECK(args->type_id->type_id == CpuCallState::id.type_id);
      Of(args).site->state_.reset(static_cast<CpuCallState*>(args->state));
      return nullptr;
    };
    table->XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) -> XLA_FFI_Error* {
      CHECK(args->type_id->type_id == CpuCallState::id.type_id);
      args->state = Of(args).site->state_.get();
      return nullptr;
    };
    table->XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) -> XLA_FFI_Error* {
      args->run_id = Of(args).run;
      return nullptr;
    };
    table->XLA_FFI_Future_Create = [](XLA_FFI_Future_Create_Args* args) -> XLA_FFI_Error* {
      args->future = reinterpret_cast<XLA_FFI_Future*>(new XlaFuture);
      return nullptr;
    };
    table->XLA_FFI_Future_SetAvailable = [](XLA_FFI_Future_SetAvailable_Args* args) -> XLA_FFI_Error* {
      reinterpret_cast<XlaFuture*>(args->future)->Complete({});
      return nullptr;
    };
    table->XLA_FFI_Future_SetError = [](XLA_FFI_Future_SetError_Args* args) -> XLA_FFI_Error* {
      reinterpret_cast<XlaFuture*>(args->future)->Complete(Take(args->error));
      return nullptr;
    };
  }
  CallSite(const CallSite&) = delete;

  XlaError Instantiate(Handler* handler, Attributes attributes) {
    Context context{this, 0};
    XLA_FFI_CallFrame frame = Frame(context, XLA_FFI_ExecutionStage_INSTANTIATE);
    frame.attrs = attributes.Get();
    return Take(handler(&frame));
  }

  // Begins an execution on one device. The future is the caller's.
  std::unique_ptr<XlaFuture> Execute(Handler* handler, int64_t run, std::vector<Buffer> args,
                                     std::vector<Buffer> rets) {
    Context context{this, run};
    std::vector<XLA_FFI_Buffer> buffers;
    for (std::vector<Buffer>* group : {&args, &rets}) {
      for (Buffer& buffer : *group) {
        XLA_FFI_Buffer raw = {};
        raw.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
        raw.dtype = buffer.type;
        raw.data = buffer.data;
        raw.rank = static_cast<int64_t>(buffer.dims.size());
        raw.dims = buffer.dims.data();
        buffers.push_back(raw);
      }
    }
    std::vector<void*> pointers;
    for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
    std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);
    XLA_FFI_CallFrame frame = Frame(context, XLA_FFI_ExecutionStage_EXECUTE);
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()), arg_types.data(),
                  pointers.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()), ret_types.data(),
                  pointers.data() + args.size()};
    const XlaError error = Take(handler(&frame));
    if (!error.text.empty()) std::fprintf(stderr, "%s\n", error.text.c_str());
    CHECK(error.code == XLA_FFI_Error_Code_OK && frame.future != nullptr);
    return std::unique_ptr<XlaFuture>(reinterpret_cast<XlaFuture*>(frame.future));
  }

 private:
  struct Context {
    CallSite* site;
    int64_t run;
  };
  template <typename Args>
  static Context& Of(Args* args) {
    return *reinterpret_cast<Context*>(args->ctx);
  }
  static XlaError Take(XLA_FFI_Error* error) {
    const std::unique_ptr<XlaError> taken(reinterpret_cast<XlaError*>(error));
    return taken ? *taken : XlaError{};
  }
  XLA_FFI_CallFrame Frame(Context& context, XLA_FFI_ExecutionStage stage) {
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = reinterpret_cast<XLA_FFI_Api*>(api_);
    frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(&context);
    frame.stage = stage;
    frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
    frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
    frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
    return frame;
  }

  alignas(XLA_FFI_Api) char api_[1024];  // with room for the functions of newer versions
  std::unique_ptr<CpuCallState> state_;
};

}  // namespace fake
}  // namespace jaxcomm
