// The XLA handlers of all collectives on GPUs. Stages: Instantiate reads the attributes, Prepare asks XLA for the
// group's communicator, Initialize makes what the call needs at its first run on a device, Execute puts copies and one
// kernel on XLA's stream: no allocation, no waiting, so that it can be captured into a CUDA graph.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "../handlers/attributes.h"
#include "call_program.h"
#include "communicator.h"

namespace jaxcomm {
namespace cuda {

// A call site on one device.
class DeviceCall {
 public:
  // Collective: as Communicator::Reserve. Null, and `error` filled in, if it can't be made.
  static std::unique_ptr<DeviceCall> Make(const CallSpec& spec, Communicator& communicator, DType dtype,
                                          int64_t input_count, int64_t output_count, std::string* error);
  ~DeviceCall();
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  // Empty, or what is wrong. May be captured.
  std::string Launch(const void* x, void* y, cudaStream_t stream) const;

  Communicator& communicator() const { return communicator_; }

 private:
  explicit DeviceCall(Communicator& communicator) : communicator_(communicator) {}
  bool Upload(std::string* error);
  std::string CheckAlignment(const void* x, const void* y) const;

  Communicator& communicator_;
  CallProgram call_;
  char* image_ = nullptr;  // of the device
  RankArgs args_;          // without XLA's buffers
};

// One per call site and executable, shared by the local devices.
struct CallState {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  CallSpec spec;
  std::mutex mutex;
  std::map<int32_t, std::unique_ptr<DeviceCall>> calls;  // by local device
};

}  // namespace cuda
}  // namespace jaxcomm

extern "C" {
#define JAXCOMM_COLLECTIVE(enumerator, name, Handler) XLA_FFI_Error* Cuda##Handler##Instantiate(XLA_FFI_CallFrame*);
#include "../collectives.def"
#undef JAXCOMM_COLLECTIVE
// The same for all collectives.
XLA_FFI_Error* CudaPrepare(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaInitialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaExecute(XLA_FFI_CallFrame*);
}
