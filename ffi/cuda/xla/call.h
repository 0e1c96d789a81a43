// The XLA handlers of all collectives on GPUs. Stages: Instantiate reads the attributes. Prepare requests the group's
// communicator from XLA, in every run. Initialize makes the DeviceCall in the first run on a device; the DeviceCall
// lives as long as the executable. Execute enqueues the call on XLA's stream; it neither allocates nor waits, so that
// it can be captured into a CUDA graph. ExecuteEagerly is the same for calls that XLA must not capture: asynchronous
// calls, which a graph would run one after the other with the computations, and calls between hosts, which have not run
// in a graph. Done ends an asynchronous call.
#pragma once

#include <cstdint>
#include <mutex>

#include "common/attributes.h"
#include "cuda/runtime/device_call.h"
#include "cuda/xla/call_site.h"

namespace jaxcomm::cuda {

// One per call site and executable, shared by the local devices.
struct GpuCallState : CallSite<DeviceCall> {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  bool symmetric_buffers = false;  // buffers are in XLA's collective memory

  // Found in the first run. The same in all runs, because the shapes are.
  std::once_flag shared_once;
  struct {
    int64_t input_bytes = 0;  // size of the buffer; 0 if peers don't use it
    int64_t output_bytes = 0;
  } shared;
};

}  // namespace jaxcomm::cuda

extern "C" {
#define JAXCOMM_COLLECTIVE(enumerator, name, Handler, ...) \
  XLA_FFI_Error* Cuda##Handler##Instantiate(XLA_FFI_CallFrame*);
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE
// One handler for all collectives.
XLA_FFI_Error* CudaPrepare(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaInitialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaExecute(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaExecuteEagerly(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaDone(XLA_FFI_CallFrame*);
}
