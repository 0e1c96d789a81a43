// The XLA handlers of all collectives on GPUs. Stages: Instantiate reads the attributes, Prepare asks XLA for the
// group's communicator, Initialize makes what the call needs at its first run on a device, Execute puts one
// kernel on XLA's stream: no allocation, no waiting, so that it can be captured into a CUDA graph.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/attributes.h"
#include "cuda/runtime/device_call.h"
#include "cuda/xla/call_communicator.h"
#include "cuda/xla/run_status.h"
#include "cuda/xla/xla_collectives.h"

namespace jaxcomm {
namespace cuda {

// One per call site and executable, shared by the local devices.
struct GpuCallState {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  const DeviceGroups& Groups();

  CallSpec spec;
  std::vector<Member> members;  // of the groups, if XLA provides no communicators
  bool windows = false;         // buffers are in XLA's collective memory
  std::mutex mutex;
  std::map<int32_t, std::unique_ptr<DeviceCall>> calls;  // by local device
  std::map<int32_t, std::string> problems;               // by local device: why it has no call, and gets none
  RunStatus run_status;

  // What is the same in all runs, since shapes are; found in the first one.
  std::once_flag split_once, shared_once;
  std::optional<DeviceGroups> split;
  struct {
    int64_t input_bytes = 0;  // of the buffer, if peers use it; else 0
    int64_t output_bytes = 0;
  } shared;
};

}  // namespace cuda
}  // namespace jaxcomm

extern "C" {
#define JAXCOMM_COLLECTIVE(enumerator, name, Handler) XLA_FFI_Error* Cuda##Handler##Instantiate(XLA_FFI_CallFrame*);
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE
// The same for all collectives.
XLA_FFI_Error* CudaPrepare(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaInitialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaExecute(XLA_FFI_CallFrame*);
}
