// Compiled once for each version of NCCL's headers. What it shares with the module is plain data: types of NCCL have
// the same names in all versions, but not the same sizes.
#include "cuda/nccl/gin_version.h"

#include <nccl_device/comm.h>
#include <nccl_device/impl/comm__types.h>

#include <algorithm>
#include <string>

#include "cuda/nccl/nccl_headers.h"

namespace jaxcomm::cuda {
namespace JAXCOMM_GIN_NAMESPACE {
namespace {

struct Made {
  ncclDevComm comm = {};
};

const Made none;

// Entries of a queue that all channels of a context share: device::kMostEntries. A power of two.
int QueueDepth(int32_t num_channels, int32_t num_contexts) {
  constexpr int kDefault = 128;  // NCCL_GIN_GDAKI_QP_DEPTH
  const int64_t needed = (num_channels + num_contexts - 1) / num_contexts * device::kMostEntries;
  int depth = kDefault;
  while (depth < needed) depth *= 2;
  return depth;
}

StatusOr<std::shared_ptr<const ncclDevComm>> Make(void* create, ncclComm_t nccl_comm, int32_t num_channels,
                                                  int32_t num_ranks, const GinVersion::Check& check) {
  ncclDevCommRequirements_t requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  requirements.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  requirements.ginExclusiveContexts = true;  // the lanes of a group share the ncclComm_t, but no queues
  requirements.ginSignalCount = NumGinSignals(num_channels, num_ranks);
  requirements.ginCounterCount = NumGinCounters(num_channels);
  requirements.ginQueueDepth = QueueDepth(num_channels, requirements.ginContextCount);
#if NCCL_VERSION_CODE >= 23000  // before, all signals are strong
  requirements.ginStrongSignalsRequired = true;
  requirements.ginVaSignalsRequired = false;  // some networks lack them
#endif
  // A non-blocking communicator may still write to the ncclDevComm after the call returns, so it must not move.
  const auto made = std::make_shared<Made>();
  const auto dev_comm_create = reinterpret_cast<decltype(&ncclDevCommCreate)>(create);
  JAXCOMM_RETURN_IF_ERROR(check("ncclDevCommCreate", dev_comm_create(nccl_comm, &requirements, &made->comm)));
  // The number of contexts is a hint. The CPU proxy ignores the depth.
  const auto num_contexts = std::max(static_cast<int32_t>(made->comm.ginContextCount), 1);
  if (made->comm.ginNetDeviceTypes[0] != NCCL_GIN_TYPE_PROXY &&
      QueueDepth(num_channels, num_contexts) > requirements.ginQueueDepth) {
    return UnavailableError("NCCL made " + std::to_string(num_contexts) + " contexts of GIN instead of " +
                            std::to_string(requirements.ginContextCount) + ", whose queues of " +
                            std::to_string(requirements.ginQueueDepth) + " entries are too short for " +
                            std::to_string(num_channels) +
                            " channels. Lower JAXCOMM_MAX_SMS, or update the GIN plugin");
  }
  return std::shared_ptr<const ncclDevComm>(made, &made->comm);
}

}  // namespace

extern const GinVersion kVersion;
const GinVersion kVersion = {
    NCCL_VERSION_CODE, &none.comm, &Make, &LaunchGin, &LaunchInterNodeRows, &LoadGinKernel, &LoadInterNodeRowKernels};

}  // namespace JAXCOMM_GIN_NAMESPACE
}  // namespace jaxcomm::cuda
