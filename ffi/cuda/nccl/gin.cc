#include "cuda/nccl/gin.h"

// Included only here, because it defines global names such as Put and None.
#include <nccl_device/comm.h>
#include <nccl_device/impl/comm__types.h>

namespace jaxcomm {
namespace cuda {

Gin::Gin() : nccl_comm_(std::make_unique<ncclDevComm>()) {}
Gin::~Gin() = default;

// NCCL_CROSS_NIC=0 allows GIN on rails only, which is not enough for plans.
bool Gin::Usable(const NcclLibrary& nccl, const ncclCommProperties_t& properties) {
  return nccl.version == NCCL_VERSION_CODE && nccl.DevCommCreate != nullptr && properties.ginType != NCCL_GIN_TYPE_NONE;
}

// Signals received from each rank, and puts.
int64_t Gin::CountBytes(int32_t num_channels, int32_t num_ranks) {
  return static_cast<int64_t>(num_channels) * (num_ranks + 1) * static_cast<int64_t>(sizeof(uint64_t));
}

StatusOr<std::unique_ptr<Gin>> Gin::Make(const NcclLibrary& nccl, ncclComm_t nccl_comm, const device::Comm& comm,
                                         uint64_t* counts, const Check& check) {
  const int32_t num_channels = comm.signals.num_channels;
  ncclDevCommRequirements_t requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  requirements.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  requirements.ginSignalCount = NumGinSignals(num_channels, comm.world.size);
  requirements.ginCounterCount = NumGinCounters(num_channels);
  requirements.ginStrongSignalsRequired = true;
  requirements.ginVaSignalsRequired = false;  // some networks lack them
  std::unique_ptr<Gin> made(new Gin);
  made->counts_ = counts;
  // A non-blocking communicator may still write to the ncclDevComm after the call returns, so it must not move.
  JAXCOMM_RETURN_IF_ERROR(
      check("ncclDevCommCreate", nccl.DevCommCreate(nccl_comm, &requirements, made->nccl_comm_.get())));
  return made;
}

GinNetworkArgs Gin::Args(const device::Comm& comm, ncclWindow_t arena, const ArenaLayout& layout) const {
  GinNetworkArgs args;
  args.comm = comm;
  args.comm.local = comm.world;
  args.comm.signals = {};
  args.comm.signals.received = counts_;
  args.comm.signals.num_channels = comm.signals.num_channels;
  args.puts = counts_ + static_cast<int64_t>(comm.signals.num_channels) * comm.world.size;
  args.input = {arena, layout.input};
  args.output = {arena, layout.output};
  args.scratch = {arena, layout.scratch};
  return args;
}

}  // namespace cuda
}  // namespace jaxcomm
