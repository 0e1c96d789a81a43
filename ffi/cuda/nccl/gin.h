// GIN (puts of NCCL from a kernel to other nodes) for one communicator.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "cuda/nccl/gin_version.h"
#include "cuda/nccl/nccl_library.h"
#include "cuda/program/assign_or_return.h"
#include "cuda/program/call_program.h"
#include "cuda/program/gin_args.h"

namespace jaxcomm::cuda {

// One per communicator. Never deleted, like the communicator.
class Gin {
 public:
  // The kernels for the libnccl of a version; null if the module has none.
  static const GinVersion* Find(int nccl_version);
  // The versions for which the module has kernels, as text.
  static std::string Versions();

  // The reason why this process can't use GIN on a communicator with these properties; else OK. Other processes may
  // differ, so ranks must agree before Make().
  static Status Problem(const NcclLibrary& nccl, const ncclCommProperties_t& properties);

  // Size of the counts that Make() takes: device memory, all zero before the first kernel.
  static int64_t CountBytes(int32_t num_channels, int32_t num_ranks);

  // After Problem() is OK. Collective; waits for all ranks. Not during the capture of a CUDA graph. Makes as many
  // channels as `comm` has signals for.
  static StatusOr<std::unique_ptr<Gin>> Make(const NcclLibrary& nccl, ncclComm_t nccl_comm, const device::Comm& comm,
                                             uint64_t* counts, const GinVersion::Check& check);

  // Kernel arguments of a call. `comm`: of the call. `arena`: the registered memory with the buffers, placed as in
  // `layout`.
  GinNetworkArgs Args(const device::Comm& comm, ncclWindow_t arena, const ArenaLayout& layout) const;

  // For kernels of users, whose arena is the memory registered as `arena`.
  device::GinHandle Handle(const device::Comm& comm, ncclWindow_t arena) const;

  const GinVersion& version() const { return version_; }
  const ncclDevComm& nccl_comm() const { return *nccl_comm_; }

 private:
  Gin(const GinVersion& version, std::shared_ptr<const ncclDevComm> nccl_comm, uint64_t* counts)
      : version_(version), nccl_comm_(std::move(nccl_comm)), counts_(counts) {}

  const GinVersion& version_;
  const std::shared_ptr<const ncclDevComm> nccl_comm_;
  uint64_t* const counts_;
};

}  // namespace jaxcomm::cuda
