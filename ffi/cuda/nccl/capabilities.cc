#include "cuda/nccl/capabilities.h"

#include <cuda_runtime_api.h>

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/scoped_device.h"

namespace jaxcomm {

std::string QueryCommunicator(const NcclLibrary& nccl, const std::vector<int>& devices,
                              ncclCommProperties_t* properties) {
  if (std::string why = nccl.WhyNot("ncclCommQueryProperties"); !why.empty()) return why;
  ScopedDevice keep;
  std::string failure;
  // Only the first failure is of interest; NCCL has a longer text for it than its code.
  const auto check = [&](const char* name, ncclResult_t result) {
    if (result == ncclSuccess || !failure.empty()) return;
    failure = std::string(name) + ": " + nccl.GetErrorString(result);
    if (!nccl.GetLastError) return;
    if (const char* more = nccl.GetLastError(nullptr); more && *more) failure += std::string(" (") + more + ")";
  };
  // Before the group: with a rank missing, the others would wait for it without end.
  for (const int device : devices) {
    const std::string name = "cudaSetDevice(" + std::to_string(device) + ")";
    if (std::string why = cuda::Problem(name, cudaSetDevice(device)); !why.empty()) return why;
  }
  ncclUniqueId id;
  check("ncclGetUniqueId", nccl.GetUniqueId(&id));
  if (!failure.empty()) return failure;
  const int num_ranks = static_cast<int>(devices.size());
  std::vector<ncclComm_t> communicators(num_ranks, nullptr);
  check("ncclGroupStart", nccl.GroupStart());
  for (int rank = 0; rank < num_ranks && failure.empty(); ++rank) {
    cudaSetDevice(devices[rank]);
    check("ncclCommInitRank", nccl.CommInitRank(&communicators[rank], num_ranks, id, rank));
  }
  check("ncclGroupEnd", nccl.GroupEnd());
  if (failure.empty()) {
    *properties = NCCL_COMM_PROPERTIES_INITIALIZER;
    check("ncclCommQueryProperties", nccl.CommQueryProperties(communicators[0], properties));
  }
  // A communicator that was not made completely would wait for the others when it is destroyed.
  const bool made = failure.empty();
  for (ncclComm_t communicator : communicators) {
    if (communicator) made ? nccl.CommDestroy(communicator) : nccl.CommAbort(communicator);
  }
  return failure;
}

}  // namespace jaxcomm
