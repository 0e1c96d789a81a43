// GIN (puts of NCCL from a kernel to other nodes) for one communicator, as LaunchGin needs it.
#pragma once

#include <functional>
#include <memory>

#include "common/status.h"
#include "cuda/nccl/nccl_library.h"
#include "cuda/program/call_program.h"
#include "cuda/program/gin_args.h"

namespace jaxcomm {
namespace cuda {

// One per communicator. Never deleted, like the communicator.
class Gin {
 public:
  // Waits for the end of a call of NCCL and returns its outcome.
  using Check = std::function<Status(const char* name, ncclResult_t result)>;

  // The reason why this process can't use GIN on a communicator with these properties; else OK. Other processes may
  // differ, so ranks must agree before Make().
  static Status Problem(const NcclLibrary& nccl, const ncclCommProperties_t& properties);

  // Size of the counts that Make() takes: device memory, all zero before the first kernel.
  static int64_t CountBytes(int32_t num_channels, int32_t num_ranks);

  // Collective; waits for all ranks. Not during the capture of a CUDA graph. Makes as many channels as `comm` has
  // signals for.
  static StatusOr<std::unique_ptr<Gin>> Make(const NcclLibrary& nccl, ncclComm_t nccl_comm, const device::Comm& comm,
                                             uint64_t* counts, const Check& check);
  ~Gin();

  // Kernel arguments of a call. `comm`: of the call. `arena`: the registered memory with the buffers, placed as in
  // `layout`.
  GinNetworkArgs Args(const device::Comm& comm, ncclWindow_t arena, const ArenaLayout& layout) const;

  // For kernels of users, whose arena is the memory registered as `arena`.
  device::GinHandle Handle(const device::Comm& comm, ncclWindow_t arena) const;

  // An argument for kernels of groups of one node, which use no GIN.
  static const ncclDevComm& NoNcclComm();

  const ncclDevComm& nccl_comm() const { return *nccl_comm_; }

 private:
  Gin();
  static int QueueDepth(int32_t num_channels, int32_t num_contexts);

  std::unique_ptr<ncclDevComm> nccl_comm_;
  uint64_t* counts_ = nullptr;
};

}  // namespace cuda
}  // namespace jaxcomm
