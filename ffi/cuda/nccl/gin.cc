#include "cuda/nccl/gin.h"

// Included only here, because it defines global names such as Put and None.
#include <nccl_device/comm.h>
#include <nccl_device/impl/comm__types.h>

#include <algorithm>
#include <string>

namespace jaxcomm {
namespace cuda {

Gin::Gin() : nccl_comm_(std::make_unique<ncclDevComm>()) {}
Gin::~Gin() = default;

// The versions must be equal. NCCL's table of versions (getNcclVersionCompat in its dev_runtime.cc) is not enough: NCCL
// 2.32.3 accepts kernels of 2.30.7, but its GIN contexts of the CPU proxy are larger, and a kernel of 2.30.7 finds only
// the first one (ncclGinProxyGpuCtx_t, an array indexed by kernels).
Status Gin::Problem(const NcclLibrary& nccl, const ncclCommProperties_t& properties) {
  if (nccl.version != NCCL_VERSION_CODE) {
    const std::string built = NcclVersionText(NCCL_VERSION_CODE);
    return UnavailableError("jaxcomm was built for NCCL " + built + ", but " + nccl.path + " is " +
                            NcclVersionText(nccl.version) + ". Install nvidia-nccl-cu12==" + built +
                            " or nvidia-nccl-cu13==" + built + ", or build jaxcomm with the headers of the other one");
  }
  if (properties.ginType != NCCL_GIN_TYPE_NONE) return OkStatus();
  if (properties.railedGinType != NCCL_GIN_TYPE_NONE) {
    return UnavailableError("NCCL offers GIN on rails only, and plans need it between all GPUs (NCCL_CROSS_NIC=0?)");
  }
  return UnavailableError("NCCL offers no GIN on this network (NCCL_DEBUG=INFO shows its reason)");
}

// Signals received from each rank, and puts.
int64_t Gin::CountBytes(int32_t num_channels, int32_t num_ranks) {
  return static_cast<int64_t>(num_channels) * (num_ranks + 1) * static_cast<int64_t>(sizeof(uint64_t));
}

// Entries of a queue that all channels of a context share: device::kMostEntries. A power of two.
int Gin::QueueDepth(int32_t num_channels, int32_t num_contexts) {
  constexpr int kDefault = 128;  // NCCL_GIN_GDAKI_QP_DEPTH
  const int64_t needed = (num_channels + num_contexts - 1) / num_contexts * device::kMostEntries;
  int depth = kDefault;
  while (depth < needed) depth *= 2;
  return depth;
}

StatusOr<std::unique_ptr<Gin>> Gin::Make(const NcclLibrary& nccl, ncclComm_t nccl_comm, const device::Comm& comm,
                                         uint64_t* counts, const Check& check) {
  const int32_t num_channels = comm.signals.num_channels;
  ncclDevCommRequirements_t requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  requirements.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  requirements.ginExclusiveContexts = true;  // the lanes of a group share the ncclComm_t, but no queues
  requirements.ginSignalCount = NumGinSignals(num_channels, comm.world.size);
  requirements.ginCounterCount = NumGinCounters(num_channels);
  requirements.ginQueueDepth = QueueDepth(num_channels, requirements.ginContextCount);
  requirements.ginStrongSignalsRequired = true;
  requirements.ginVaSignalsRequired = false;  // some networks lack them
  std::unique_ptr<Gin> made(new Gin);
  made->counts_ = counts;
  // A non-blocking communicator may still write to the ncclDevComm after the call returns, so it must not move.
  JAXCOMM_RETURN_IF_ERROR(
      check("ncclDevCommCreate", nccl.DevCommCreate(nccl_comm, &requirements, made->nccl_comm_.get())));
  // The number of contexts is a hint. The CPU proxy ignores the depth.
  const auto num_contexts = std::max(static_cast<int32_t>(made->nccl_comm_->ginContextCount), 1);
  if (made->nccl_comm_->ginNetDeviceTypes[0] != NCCL_GIN_TYPE_PROXY &&
      QueueDepth(num_channels, num_contexts) > requirements.ginQueueDepth) {
    return UnavailableError("NCCL made " + std::to_string(num_contexts) + " contexts of GIN instead of " +
                            std::to_string(requirements.ginContextCount) + ", whose queues of " +
                            std::to_string(requirements.ginQueueDepth) + " entries are too short for " +
                            std::to_string(num_channels) +
                            " channels. Lower JAXCOMM_MAX_SMS, or update the GIN plugin");
  }
  return made;
}

device::GinHandle Gin::Handle(const device::Comm& comm, ncclWindow_t arena) const {
  device::GinHandle handle;
  handle.comm = comm;
  handle.comm.local = comm.world;
  handle.comm.signals = {};
  handle.comm.signals.received = counts_;
  handle.comm.signals.num_channels = comm.signals.num_channels;
  handle.puts = counts_ + static_cast<int64_t>(comm.signals.num_channels) * comm.world.size;
  handle.arena = arena;
  return handle;
}

const ncclDevComm& Gin::NoNcclComm() {
  static const ncclDevComm none = {};
  return none;
}

GinNetworkArgs Gin::Args(const device::Comm& comm, ncclWindow_t arena, const ArenaLayout& layout) const {
  GinNetworkArgs args;
  static_cast<device::GinHandle&>(args) = Handle(comm, arena);
  args.input = {arena, layout.input};
  args.output = {arena, layout.output};
  args.scratch = {arena, layout.scratch};
  return args;
}

}  // namespace cuda
}  // namespace jaxcomm
