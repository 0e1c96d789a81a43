#include "cuda/nccl/nccl_calls.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "cuda/nccl/deadline.h"
#include "cuda/nccl/failed_processes.h"
#include "cuda/nccl/threads.h"
#include "cuda/program/call_program.h"

namespace jaxcomm::cuda {

Status CheckNccl(const NcclLibrary& nccl, ncclComm_t nccl_comm, const char* name, ncclResult_t result) {
  if (result == ncclSuccess) return OkStatus();
  cudaGetLastError();  // as in CheckCuda
  std::string text = std::string(name) + ": " + nccl.GetErrorString(result);
  if (const char* more = nccl.GetLastError(nccl_comm); more && *more) text += std::string(" (") + more + ")";
  return UnavailableError(std::move(text));
}

Status CallNccl(const NcclLibrary& nccl, ncclComm_t nccl_comm, const char* name, std::function<ncclResult_t()> call,
                double timeout_s, const std::vector<uint64_t>& processes) {
  const Deadline deadline(timeout_s);
  const auto gives_up = [&] { return !FailureOf(processes).ok(); };
  const auto result = std::make_shared<ncclResult_t>(ncclSuccess);
  bool done = RunBounded([result, call = std::move(call)] { *result = call(); }, deadline, gives_up);
  // XLA's communicators may be non-blocking, and NCCL_COMM_BLOCKING=0 makes all of them so. ncclCommWindowRegister and
  // ncclDevCommCreate then return ncclSuccess while their work goes on, so the communicator is asked in any case.
  if (done && *result == ncclSuccess && nccl_comm != nullptr) *result = ncclInProgress;
  while (done && *result == ncclInProgress && nccl_comm != nullptr) {
    const ncclResult_t asked = nccl.CommGetAsyncError(nccl_comm, result.get());
    if (asked != ncclSuccess) *result = asked;
    if (*result == ncclInProgress) done = !gives_up() && deadline.Wait();
  }
  if (!done) JAXCOMM_RETURN_IF_ERROR(FailureOf(processes));
  if (!done) return DeadlineExceededError(std::string(name) + " was not over within " + TimeoutText(timeout_s));
  return CheckNccl(nccl, nccl_comm, name, *result);
}

StatusOr<ncclComm_t> MakeNcclComm(const NcclLibrary& nccl, const ncclUniqueId& key, int32_t size, int32_t rank,
                                  double timeout_s, const std::vector<uint64_t>& processes) {
  constexpr char kInit[] = "ncclCommInitRankConfig";
  struct Init {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t made = nullptr;
  };
  const auto init = std::make_shared<Init>();
  // jaxcomm's kernels use windows and GIN only. NCCL's own kernels run at first contact, for one word per rank.
  init->config.blocking = 1;
  init->config.minCTAs = init->config.maxCTAs = 1;
  init->config.nChannelsPerNetPeer = 1;
  init->config.collnetEnable = 0;
  if (nccl.version >= NCCL_VERSION(2, 30, 0)) init->config.numRmaCtx = 0;  // NCCL 2.29 refuses 0
  const auto call = [&nccl, init, key, size, rank] {
    ncclResult_t result = nccl.CommInitRankConfig(&init->made, size, key, rank, &init->config);
    while (result == ncclInProgress && Threads::Sleep(std::chrono::milliseconds(1))) {  // NCCL_COMM_BLOCKING=0
      if (const ncclResult_t asked = nccl.CommGetAsyncError(init->made, &result); asked != ncclSuccess) return asked;
    }
    return result;
  };
  const Status status = CallNccl(nccl, nullptr, kInit, call, timeout_s, processes);
  if (status.ok()) return init->made;
  JAXCOMM_RETURN_IF_ERROR(FailureOf(processes));
  if (status.code() != StatusCode::kDeadlineExceeded) return status;
  return DeadlineExceededError("the other ranks of the group of " + std::to_string(size) +
                               " did not come to make its communicator within " + TimeoutText(timeout_s));
}

void RevokeNcclComm(const NcclLibrary& nccl, ncclComm_t nccl_comm) {
  Threads::Start([&nccl, nccl_comm] { nccl.CommRevoke(nccl_comm, NCCL_REVOKE_DEFAULT); });
}

}  // namespace jaxcomm::cuda
