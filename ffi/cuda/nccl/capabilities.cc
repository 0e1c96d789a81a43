#include "cuda/nccl/capabilities.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/deadline.h"
#include "cuda/nccl/nccl_calls.h"
#include "cuda/nccl/threads.h"

namespace jaxcomm {
namespace {

StatusOr<ncclCommProperties_t> Query(const NcclLibrary& nccl, const std::vector<int>& devices) {
  ScopedDevice keep;
  Status status;
  // Keeps the first failure.
  const auto check = [&](const char* name, ncclResult_t result) {
    if (status.ok()) status = cuda::CheckNccl(nccl, nullptr, name, result);
  };
  // Before the group starts: if one rank were missing, the others would wait for it forever.
  for (const int device : devices) {
    const std::string name = "cudaSetDevice(" + std::to_string(device) + ")";
    JAXCOMM_RETURN_IF_ERROR(cuda::CheckCuda(name, cudaSetDevice(device)));
  }
  ncclUniqueId id;
  check("ncclGetUniqueId", nccl.GetUniqueId(&id));
  JAXCOMM_RETURN_IF_ERROR(status);
  const int num_ranks = static_cast<int>(devices.size());
  std::vector<ncclComm_t> communicators(num_ranks, nullptr);
  check("ncclGroupStart", nccl.GroupStart());
  for (int rank = 0; rank < num_ranks && status.ok(); ++rank) {
    cudaSetDevice(devices[rank]);
    check("ncclCommInitRank", nccl.CommInitRank(&communicators[rank], num_ranks, id, rank));
  }
  check("ncclGroupEnd", nccl.GroupEnd());
  ncclCommProperties_t properties = NoProperties(nccl);
  if (status.ok()) check("ncclCommQueryProperties", nccl.CommQueryProperties(communicators[0], &properties));
  // ncclCommDestroy of an incomplete communicator would wait for the other ranks.
  const bool made = status.ok();
  for (ncclComm_t communicator : communicators) {
    if (communicator) made ? nccl.CommDestroy(communicator) : nccl.CommAbort(communicator);
  }
  JAXCOMM_RETURN_IF_ERROR(status);
  return properties;
}

}  // namespace

// All ranks are in one thread, so their communicator is blocking, and NCCL bounds no wait.
StatusOr<ncclCommProperties_t> QueryCommunicator(const NcclLibrary& nccl, const std::vector<int>& devices,
                                                 double limit_s) {
  const auto found = std::make_shared<StatusOr<ncclCommProperties_t>>(UnavailableError("not asked"));
  const bool done = cuda::RunBounded([found, &nccl, devices] { *found = Query(nccl, devices); }, Deadline(limit_s));
  if (done) return *found;
  return DeadlineExceededError("NCCL made no communicator of " + std::to_string(devices.size()) + " GPUs within " +
                               std::to_string(static_cast<int>(limit_s)) + " s");
}

}  // namespace jaxcomm
