// GIN, NCCL's puts from a kernel to other nodes, for one communicator: what LaunchGin needs of it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "cuda/nccl/nccl_library.h"
#include "cuda/program/call_program.h"
#include "cuda/program/gin_args.h"

namespace jaxcomm {
namespace cuda {

// Made once per communicator, and like it never deleted.
class Gin {
 public:
  // Whether a call of NCCL has succeeded, once it is over. Fills in `error` if not.
  using Check = std::function<bool(const char* name, ncclResult_t result, std::string* error)>;

  // Whether this process can use GIN on a communicator that has these properties. Another one might not: ranks must
  // agree before Make.
  static bool Usable(const NcclLibrary& nccl, const ncclCommProperties_t& properties);

  // Of the counts that Make wants: memory of the device, which is all zero before the first kernel.
  static int64_t CountBytes(int32_t num_channels, int32_t num_ranks);

  // Collective, outside of the capture of a CUDA graph, waits for all ranks. As many channels as `comm` has signals
  // for. Null, and `error` filled in, if NCCL fails.
  static std::unique_ptr<Gin> Make(const NcclLibrary& nccl, ncclComm_t nccl_comm, const device::Comm& comm,
                                   uint64_t* counts, const Check& check, std::string* error);
  ~Gin();

  // For a call whose buffers lie as `layout` says in the memory that has been registered as `arena`. `comm` is the
  // call's.
  GinNetworkArgs Args(const device::Comm& comm, ncclWindow_t arena, const ArenaLayout& layout) const;

  const ncclDevComm& nccl_comm() const { return *nccl_comm_; }

 private:
  Gin();

  std::unique_ptr<ncclDevComm> nccl_comm_;
  uint64_t* counts_ = nullptr;
};

}  // namespace cuda
}  // namespace jaxcomm
