// Proxy for the rounds of a group of several nodes (send_recv_schedule.h): sends and receives of NCCL on a separate
// stream, beside the stream with the kernels.
//
// NCCL waits for a peer forever. A watchdog thread bounds the wait: if a round takes longer than the timeout, or a
// kernel has aborted, it aborts NCCL's communicator, and later calls return the reason. The watchdog never waits for a
// thread that waits for it. CUDA's launch queue may stay full until the abort and block a thread in a launch, so
// kernels are launched without the lock that the watchdog takes (nccl_mutex_). Calls of NCCL hold that lock, because
// NCCL allows one thread at a time. If such a call does not return, the watchdog first revokes the communicator, which
// sets the same abort flag and frees nothing.
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

#include "common/status.h"
#include "cuda/kernels/watchdog.h"
#include "cuda/nccl/nccl_library.h"
#include "cuda/program/call_program.h"

namespace jaxcomm {
namespace cuda {

// CUDA events of a call that runs in rounds.
struct RoundEvents {
  cudaEvent_t packed = nullptr;
  std::vector<cudaEvent_t> over;  // by own round
};

// One per communicator. Never deleted, like the communicator.
class SendRecvProxy {
 public:
  // `network`: a communicator of all ranks of the group, used only by this proxy. `comm`: of the communicator.
  // `report`: its report, as the host addresses it. `asynchronous`: it is an asynchronous lane.
  static StatusOr<std::unique_ptr<SendRecvProxy>> Make(const NcclLibrary& nccl, ncclComm_t network,
                                                       const device::Comm& comm, device::Report* report,
                                                       double timeout_s, bool asynchronous);

  // Connects to the peers that a call sends to or receives from, and checks that both sides expect the same sizes.
  // All ranks at the same time. `call`: number of the call, as device::Comm::call_id. After an error the proxy can't be
  // used any more: a word that was sent may be matched with another call.
  Status Connect(const SendRecvSchedule& schedule, int64_t item_bytes, uint64_t call);

  // After the last run of the call.
  void Forget(uint64_t call);

  // After an error, `events` holds those that were made.
  Status MakeEvents(const SendRecvSchedule& schedule, RoundEvents* events) const;
  static void Free(const RoundEvents& events);

  // Enqueues a call on `stream`, and its sends and receives on the proxy's own stream. An error if `stream` is being
  // captured: kernels of one stream may wait for peers that wait for this rank's messages on the other one, and nothing
  // promises that parallel branches of a CUDA graph run at the same time.
  Status Run(const CallProgram& call, const RankArgs& args, const RoundEvents& events, cudaStream_t stream);

  // The error after which the proxy can't be used any more. Sets `call` to the number of the call that failed; the
  // message continues a sentence that begins with the call's name.
  Status Failure(uint64_t* call) const;

 private:
  SendRecvProxy(const NcclLibrary& nccl, ncclComm_t network, const device::Comm& comm, device::Report* report,
                double timeout_s)
      : nccl_(nccl), network_(network), comm_(comm), report_(report), timeout_s_(timeout_s) {}

  Status Allocate(bool asynchronous);
  Status SendRecv(const Round& round, const std::function<char*(int64_t)>& at, int64_t item_bytes);
  Status Post(const CallProgram& call, const RankArgs& args, int32_t number, const RoundEvents& events,
              cudaStream_t stream);
  Status Handshake(const SendRecvSchedule& schedule, int64_t item_bytes);
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
  char* handshake_ = nullptr;  // device memory: words to each rank, then words from each rank

  std::mutex enqueue_mutex_;         // serializes calls
  std::timed_mutex nccl_mutex_;      // held during each call of NCCL, and only then
  std::atomic<bool> closed_{false};  // no call of NCCL may begin any more
  mutable std::mutex mutex_;
  std::map<uint64_t, std::vector<std::string>> peers_;  // of each round of a call, as text
  uint64_t failed_call_ = 0;
  Status failure_;
};

}  // namespace cuda
}  // namespace jaxcomm
