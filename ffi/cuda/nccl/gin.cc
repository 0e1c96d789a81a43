#include "cuda/nccl/gin.h"

#include <string>
#include <utility>

namespace jaxcomm::cuda {

// JAXCOMM_GIN(namespace) for each further version of the headers (cmake/Cuda.cmake).
#ifndef JAXCOMM_OTHER_GIN
#define JAXCOMM_OTHER_GIN
#endif

#define JAXCOMM_GIN(name)           \
  namespace name {                  \
  extern const GinVersion kVersion; \
  }
JAXCOMM_GIN(gin)
JAXCOMM_OTHER_GIN
#undef JAXCOMM_GIN

namespace {

#define JAXCOMM_GIN(name) &name::kVersion,
const GinVersion* const kVersions[] = {JAXCOMM_GIN(gin) JAXCOMM_OTHER_GIN};
#undef JAXCOMM_GIN

}  // namespace

// The versions must be equal. NCCL's table of versions (getNcclVersionCompat in its dev_runtime.cc) is not enough: NCCL
// 2.32.3 accepts kernels of 2.30.7, but its GIN contexts of the CPU proxy are larger, and a kernel of 2.30.7 finds only
// the first one (ncclGinProxyGpuCtx_t, an array indexed by kernels).
const GinVersion* Gin::Find(int nccl_version) {
  for (const GinVersion* const version : kVersions) {
    if (version->nccl_version == nccl_version) return version;
  }
  return nullptr;
}

std::string Gin::Versions() {
  std::string text;
  for (const GinVersion* const version : kVersions) {
    text += (text.empty() ? "" : ", ") + NcclVersionText(version->nccl_version);
  }
  return text;
}

Status Gin::Problem(const NcclLibrary& nccl, const ncclCommProperties_t& properties) {
  if (Find(nccl.version) == nullptr) {
    const std::string built = NcclVersionText(NCCL_VERSION_CODE);
    return UnavailableError("jaxcomm has kernels with GIN for NCCL " + Versions() + ", but " + nccl.path + " is " +
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

StatusOr<std::unique_ptr<Gin>> Gin::Make(const NcclLibrary& nccl, ncclComm_t nccl_comm, const device::Comm& comm,
                                         uint64_t* counts, const GinVersion::Check& check) {
  const GinVersion& version = *Find(nccl.version);
  JAXCOMM_ASSIGN_OR_RETURN(auto made, version.make(reinterpret_cast<void*>(nccl.DevCommCreate), nccl_comm,
                                                   comm.signals.num_channels, comm.world.size, check));
  return std::unique_ptr<Gin>(new Gin(version, std::move(made), counts));
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

GinNetworkArgs Gin::Args(const device::Comm& comm, ncclWindow_t arena, const ArenaLayout& layout) const {
  GinNetworkArgs args;
  static_cast<device::GinHandle&>(args) = Handle(comm, arena);
  args.input = {arena, layout.input};
  args.output = {arena, layout.output};
  args.scratch = {arena, layout.scratch};
  return args;
}

}  // namespace jaxcomm::cuda
