// A call site on one GPU: its program there, its buffers, and what a run puts on the stream.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/call_spec.h"
#include "cuda/kernels/exchange_offsets.cuh"
#include "cuda/program/call_program.h"
#include "cuda/runtime/call_names.h"
#include "cuda/runtime/communicator.h"

namespace jaxcomm {
namespace cuda {

// Prints once per process that JAXCOMM_SYMMETRIC_BUFFERS=1 has no effect on a buffer. Copies are slower, not wrong.
void WarnOfCopies(const std::string& where, const std::string& why);

// A call site on one device.
class DeviceCall {
 public:
  // Collective: as Communicator::Reserve. Null, and `error` filled in, if it can't be made. `moves`: ranks tell each
  // other in every run where their buffers are, and ExchangeOffsets() comes before Launch(). The same on all ranks.
  static std::unique_ptr<DeviceCall> Make(const CallSpec& spec, Communicator& communicator, DType dtype,
                                          int64_t input_count, int64_t output_count, std::string* error,
                                          bool exchanges_offsets = false);
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
  std::string ExchangeOffsets(const void* x, const void* y, const XlaWindow& input, const XlaWindow& output,
                              cudaStream_t stream);

  // Empty, or what is wrong. May be captured.
  std::string Launch(const void* x, void* y, cudaStream_t stream) const;

  Communicator& communicator() const { return communicator_; }
  bool shares_input() const { return call_.program.shares_input; }
  bool shares_output() const { return call_.program.shares_output; }

 private:
  // A buffer that peers use.
  struct Shared {
    bool known = false;             // ExchangeOffsets() has been called
    bool in_place = false;          // else in the arena
    const void* address = nullptr;  // XLA's, of this run
  };

  DeviceCall(Communicator& communicator, const std::string& name) : communicator_(communicator), name_(name) {}
  std::string FindOffset(const char* name, const void* address, const XlaWindow& window, int64_t in_arena,
                         Shared* shared, int64_t* buffer_offset) const;
  bool Upload(std::string* error);
  std::string CheckAlignment(const void* x, const void* y) const;

  Communicator& communicator_;
  const CallName name_;
  CallProgram call_;
  char* image_ = nullptr;  // of the device
  RankArgs args_;          // without XLA's buffers
  std::string where_;
  bool exchanges_offsets_ = false;
  ExchangeOffsetsArgs offset_args_;
  BufferOffsets offsets_;  // as the device has it
  Shared input_, output_;
  GinNetworkArgs gin_args_;  // of groups of several nodes with GIN
  RoundEvents events_;       // of those without
};

}  // namespace cuda
}  // namespace jaxcomm
