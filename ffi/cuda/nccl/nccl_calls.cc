#include "cuda/nccl/nccl_calls.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <utility>

#include "cuda/nccl/deadline.h"
#include "cuda/nccl/threads.h"
#include "cuda/program/call_program.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr char kInit[] = "ncclCommInitRankConfig";

Status Missing(int32_t size, double timeout_s) {
  return DeadlineExceededError("the other ranks of the group of " + std::to_string(size) +
                               " did not come to make its communicator within " + TimeoutText(timeout_s));
}

}  // namespace

Status CheckNccl(const NcclLibrary& nccl, ncclComm_t nccl_comm, const char* name, ncclResult_t result) {
  if (result == ncclSuccess) return OkStatus();
  cudaGetLastError();  // as in CheckCuda
  std::string text = std::string(name) + ": " + nccl.GetErrorString(result);
  if (nccl.GetLastError) {
    if (const char* more = nccl.GetLastError(nccl_comm); more && *more) text += std::string(" (") + more + ")";
  }
  return UnavailableError(std::move(text));
}

Status WaitForNccl(const NcclLibrary& nccl, ncclComm_t nccl_comm, const char* name, ncclResult_t result,
                   double timeout_s) {
  const Deadline deadline(timeout_s);
  if (result == ncclSuccess) result = ncclInProgress;
  while (result == ncclInProgress) {
    if (const ncclResult_t asked = nccl.CommGetAsyncError(nccl_comm, &result); asked != ncclSuccess) result = asked;
    if (result == ncclInProgress && !deadline.Wait()) {
      return DeadlineExceededError(std::string(name) + " was not over within " + TimeoutText(timeout_s));
    }
  }
  return CheckNccl(nccl, nccl_comm, name, result);
}

StatusOr<ncclComm_t> MakeNcclComm(const NcclLibrary& nccl, const ncclUniqueId& key, int32_t size, int32_t rank,
                                  double timeout_s) {
  JAXCOMM_RETURN_IF_ERROR(nccl.Require(kInit));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t made = nullptr;
  const ncclResult_t asked = nccl.CommInitRankConfig(&made, size, key, rank, &config);
  if (made == nullptr) {
    return CheckNccl(nccl, nullptr, kInit, asked == ncclSuccess ? ncclInternalError : asked);
  }
  const Status status = WaitForNccl(nccl, made, kInit, asked, timeout_s);
  if (status.ok()) return made;
  AbortNcclComm(nccl, made);
  return status.code() == StatusCode::kDeadlineExceeded ? Missing(size, timeout_s) : status;
}

StatusOr<ncclComm_t> MakeBlockingNcclComm(const NcclLibrary& nccl, const ncclUniqueId& key, int32_t size, int32_t rank,
                                          double timeout_s) {
  JAXCOMM_RETURN_IF_ERROR(nccl.Require(kInit));
  struct Init {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t made = nullptr;
    ncclResult_t result = ncclSuccess;
  };
  const auto init = std::make_shared<Init>();
  init->config.blocking = 1;
  const bool done = RunBounded(
      [&nccl, init, key, size, rank] {
        init->result = nccl.CommInitRankConfig(&init->made, size, key, rank, &init->config);
      },
      Deadline(timeout_s));
  if (!done) return Missing(size, timeout_s);
  // In progress: NCCL_COMM_BLOCKING=0 overrides the configuration.
  JAXCOMM_RETURN_IF_ERROR(init->result == ncclInProgress
                              ? WaitForNccl(nccl, init->made, kInit, init->result, timeout_s)
                              : CheckNccl(nccl, nullptr, kInit, init->result));
  return init->made;
}

void AbortNcclComm(const NcclLibrary& nccl, ncclComm_t nccl_comm) {
  Threads::Start([&nccl, nccl_comm] { nccl.CommAbort(nccl_comm); });
}

void RevokeNcclComm(const NcclLibrary& nccl, ncclComm_t nccl_comm) {
  Threads::Start([&nccl, nccl_comm] { nccl.CommRevoke(nccl_comm, NCCL_REVOKE_DEFAULT); });
}

}  // namespace cuda
}  // namespace jaxcomm
