// Proxy for the rounds of a group of several nodes (send_recv_schedule.h): sends and receives of NCCL on a stream of
// their own, beside the stream with the kernels.
//
// NCCL waits for a peer without end. So a thread watches: if a round takes longer than the timeout, or a kernel has
// aborted, it aborts NCCL's communicator, and the calls that come after say why. It waits for nobody who waits for it:
// CUDA's queue of launches may be full until it has aborted, and hold up a thread in a launch. So launches of kernels
// are made without the lock that it takes. NCCL's own are made with it, as NCCL allows one thread at a time; if such a
// call does not return, the thread revokes the communicator first, which sets the same word and frees nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/kernels/watchdog.h"
#include "cuda/nccl/nccl_library.h"
#include "cuda/program/call_program.h"

namespace jaxcomm {
namespace cuda {

// What a call needs to run in rounds.
struct RoundEvents {
  cudaEvent_t packed = nullptr;
  std::vector<cudaEvent_t> over;  // by own round
};

// One per communicator, never deleted, as that is.
class SendRecvProxy {
 public:
  // `network`: all ranks of the group, for nothing but this. `comm`: of the communicator. `report`: its report, as the
  // host addresses it. Null, and `error` filled in, if memory, a stream or kernels can't be had.
  static std::unique_ptr<SendRecvProxy> Make(const NcclLibrary& nccl, ncclComm_t network, const device::Comm& comm,
                                             device::Report* report, double timeout_s, std::string* error);

  // Connects to the peers that a call sends to or receives from, and compares what each of the two will send: all ranks
  // at the same time. `call`: number of the call, as device::Comm::call_id.
  // If it fails, this is of no more use: what has been sent may be taken for the answer to another call.
  bool Connect(const SendRecvSchedule& schedule, int64_t item_bytes, uint64_t call, std::string* error);

  // After the last run of the call.
  void Forget(uint64_t call);

  bool MakeEvents(const SendRecvSchedule& schedule, RoundEvents* events, std::string* error) const;
  static void Free(const RoundEvents& events);

  // Puts a call on `stream`, with all that it needs. May be captured. Empty, or what is wrong.
  std::string Run(const CallProgram& call, const RankArgs& args, const RoundEvents& events, cudaStream_t stream);

  // Empty, or why this is of no more use: after the name of the call, of which `call` is set to the number.
  std::string Failure(uint64_t* call) const;

 private:
  SendRecvProxy(const NcclLibrary& nccl, ncclComm_t network, const device::Comm& comm, device::Report* report,
                double timeout_s)
      : nccl_(nccl), network_(network), comm_(comm), report_(report), timeout_s_(timeout_s) {}

  bool Allocate(std::string* error);
  std::string SendRecv(const Round& round, const std::function<char*(int64_t)>& at, int64_t item_bytes);
  std::string Post(const CallProgram& call, const RankArgs& args, int32_t number, const RoundEvents& events,
                   cudaStream_t stream);
  bool Handshake(const SendRecvSchedule& schedule, int64_t item_bytes, std::string* error);
  void RunWatchdog();
  void Fail(uint64_t call, const std::string& text);

  const NcclLibrary& nccl_;
  const ncclComm_t network_;
  const device::Comm comm_;
  device::Report* const report_;
  const double timeout_s_;
  cudaStream_t stream_ = nullptr;
  device::WatchdogState* state_ = nullptr;  // as the host addresses it
  device::WatchdogState* state_on_device_ = nullptr;
  char* handshake_ = nullptr;  // of the device: sent to each rank, then received from each

  std::mutex enqueue_mutex_;         // calls one after the other
  std::timed_mutex nccl_mutex_;      // held in each call of NCCL's, and for nothing else
  std::atomic<bool> closed_{false};  // nobody begins a call of NCCL's any more
  mutable std::mutex mutex_;
  std::map<uint64_t, std::vector<std::string>> peers_;  // whom each round of a call is with, for people
  uint64_t failed_call_ = 0;
  std::string failure_;
};

}  // namespace cuda
}  // namespace jaxcomm
