// A call site on one GPU: its program, its buffers, and the work that a run enqueues on the stream.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/call_spec.h"
#include "cuda/program/assign_or_return.h"
#include "cuda/program/call_program.h"
#include "cuda/program/route_and_dispatch_args.h"
#include "cuda/runtime/buffer_places.h"
#include "cuda/runtime/call_names.h"
#include "cuda/runtime/communicator.h"

namespace jaxcomm::cuda {

// Prints, once per process, that JAXCOMM_SYMMETRIC_BUFFERS=1 has no effect on a buffer. Copies are slower, but correct.
void WarnOfCopies(const std::string& where, const std::string& why);

class DeviceCall {
 public:
  // Collective, as Communicator::Reserve. `exchanges_offsets`: ranks exchange the places of their buffers in every run,
  // and ExchangeOffsets() comes before Launch(). The same on all ranks.
  static StatusOr<std::unique_ptr<DeviceCall>> Make(const CallSpec& spec, Communicator& communicator, DType dtype,
                                                    int64_t input_count, int64_t output_count,
                                                    bool exchanges_offsets = false);
  // A call of route_and_dispatch. Collective, as Communicator::ReserveFor.
  static StatusOr<std::unique_ptr<DeviceCall>> Make(const CallSpec& spec, Communicator& communicator,
                                                    const RouteAndDispatchShape& shape);
  ~DeviceCall();
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  // A buffer of XLA as peers address it. Null if XLA gives no window.
  struct XlaWindow {
    ncclWindow_t window = nullptr;
    int64_t offset = 0;
  };
  // Sets the places of the buffers in this run. XLA's windows are of its communicator of this run, so nothing of them
  // is kept: a captured CUDA graph reads their places from memory that each run writes. The first run, which is
  // collective, decides for each buffer that peers use: if a rank has no window, the data of all ranks goes through the
  // arena, in this run and in all later ones, because a captured CUDA graph can't change from copies to none or back.
  // `stream`: of the run. Not captured.
  Status ExchangeOffsets(const void* x, const void* y, const XlaWindow& input, const XlaWindow& output,
                         cudaStream_t stream);

  // Enqueues the call on `stream`. May be captured. `rows`: the other operands of a dispatch, combine or
  // all_to_all_v.
  Status Launch(const void* x, void* y, cudaStream_t stream, const RowOperands& rows = {}) const;

  // The same for a call of route_and_dispatch.
  Status Launch(const RouteAndDispatchBuffers& buffers, cudaStream_t stream) const;

  Communicator& communicator() const { return communicator_; }
  bool shares_input() const { return call_.program.shares_input; }
  bool shares_output() const { return call_.program.shares_output; }

 private:
  // A buffer that peers use.
  struct Shared {
    bool in_place = false;          // else its data goes through the arena
    const void* address = nullptr;  // in XLA's memory, in this run
  };

  DeviceCall(Communicator& communicator, const CallSpec& spec)
      : communicator_(communicator), name_(spec.op + " at " + spec.site) {}
  Status Place(const char* name, const void* address, const XlaWindow& window, int64_t in_arena, Shared* shared,
               BufferPlace* place) const;
  Status Upload();
  // Of dispatch and combine.
  Status AllocateState(RowArgs* rows);
  Status CheckAlignment(const void* x, const void* y) const;
  // Enqueues work on this GPU, in the order of the communicator's calls.
  template <typename F>
  Status InOrder(cudaStream_t stream, F enqueue) const;
  Status Enqueue(const void* x, void* y, cudaStream_t stream, const RowOperands& rows) const;

  Communicator& communicator_;
  const CallName name_;
  CallProgram call_;
  char* image_ = nullptr;  // device memory
  RankArgs args_;          // without XLA's buffers
  std::string where_;
  std::unique_ptr<BufferPlaces> places_;  // null if ranks exchange none
  bool placed_ = false;                   // ExchangeOffsets() has been called
  Shared input_, output_;
  GinNetworkArgs gin_args_;            // for groups of several nodes
  RouteAndDispatchArgs one_exchange_;  // without operands and results
};

}  // namespace jaxcomm::cuda
