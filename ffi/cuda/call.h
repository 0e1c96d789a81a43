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

#include "../handlers/attributes.h"
#include "call_names.h"
#include "call_program.h"
#include "communicator.h"
#include "locate.cuh"
#include "own_communicators.h"
#include "verdicts.h"

namespace jaxcomm {
namespace cuda {

// A call site on one device.
class DeviceCall {
 public:
  // Collective: as Communicator::Reserve. Null, and `error` filled in, if it can't be made. `moves`: ranks tell each
  // other in every run where their buffers are, and Locate() comes before Launch(). The same on all ranks.
  static std::unique_ptr<DeviceCall> Make(const CallSpec& spec, Communicator& communicator, DType dtype,
                                          int64_t input_count, int64_t output_count, std::string* error,
                                          bool moves = false);
  ~DeviceCall();
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  // Where XLA has put the buffers in this run; `input`, `output`: windows on them, null if there is none. Then, and
  // where peers don't use the buffer, data goes through the arena, in this run and in all later ones: a CUDA graph that
  // has been captured copies, or doesn't. Not captured; `stream` is that of the run. Returns what is wrong, or nothing.
  struct XlaWindow {
    ncclWindow_t window = nullptr;
    int64_t offset = 0;
  };
  std::string Locate(const void* x, const void* y, const XlaWindow& input, const XlaWindow& output,
                     cudaStream_t stream);

  // Empty, or what is wrong. May be captured.
  std::string Launch(const void* x, void* y, cudaStream_t stream) const;

  Communicator& communicator() const { return communicator_; }
  bool shares_input() const { return call_.program.shares_input; }
  bool shares_output() const { return call_.program.shares_output; }

 private:
  // A buffer that peers use.
  struct Shared {
    bool known = false;             // Locate() has been called
    bool in_place = false;          // else in the arena
    const void* address = nullptr;  // XLA's, of this run
  };

  DeviceCall(Communicator& communicator, const std::string& name) : communicator_(communicator), name_(name) {}
  std::string LocateBuffer(const char* name, const void* address, const XlaWindow& window, int64_t in_arena,
                           Shared* shared, int64_t* location) const;
  bool Upload(std::string* error);
  std::string CheckAlignment(const void* x, const void* y) const;

  Communicator& communicator_;
  const CallName name_;
  CallProgram call_;
  char* image_ = nullptr;  // of the device
  RankArgs args_;          // without XLA's buffers
  std::string where_;
  bool moves_ = false;
  LocateArgs locate_;
  Location location_;  // as the device has it
  Shared input_, output_;
  GinNetworkArgs gin_args_;  // of groups of several nodes with GIN
  RoundEvents events_;       // of those without
};

// One per call site and executable, shared by the local devices.
struct CallState {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  const DeviceGroups& Groups();

  CallSpec spec;
  std::vector<Member> members;  // of the groups, if XLA lends no communicators
  bool windows = false;         // buffers are in XLA's collective memory
  std::mutex mutex;
  std::map<int32_t, std::unique_ptr<DeviceCall>> calls;  // by local device
  std::map<int32_t, std::string> problems;               // by local device: why it has no call, and gets none
  Verdicts verdicts;

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
#include "../collectives.def"
#undef JAXCOMM_COLLECTIVE
// The same for all collectives.
XLA_FFI_Error* CudaPrepare(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaInitialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaExecute(XLA_FFI_CallFrame*);
}
