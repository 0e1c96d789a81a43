// Memory of the same size at every rank, which the ranks of a node address: windows of NCCL.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <map>
#include <string>

#include "cuda/nccl/bootstrap.h"
#include "cuda/nccl/nodes.h"
#include "include/jaxcomm/comm.h"

namespace jaxcomm {
namespace cuda {

// What ncclMemAlloc gives is of whole pages of this size on all GPUs so far; windows are of all of it.
constexpr int64_t kPageBytes = 2 << 20;
inline int64_t WholePages(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

// Of one communicator. Nothing is ever freed, for executables and CUDA graphs keep its addresses. One thread at a time.
class SymmetricMemory {
 public:
  SymmetricMemory(Bootstrap& bootstrap, const Nodes& nodes, bool multimem)
      : bootstrap_(bootstrap), nodes_(nodes), multimem_(multimem) {}

  // Collective for all ranks of the bootstrap; NCCL's own wait, in which it registers memory, is as long as NCCL's.
  // `multicast` is null unless all ranks have an address. False: `error` is filled in.
  bool Allocate(const char* what, int64_t bytes, device::Window* window, std::string* error,
                device::Multicast* multicast = nullptr);

  // When this returns, the window is zero at all ranks, and no kernel that uses it can have been launched before.
  // Collective.
  bool Clear(const device::Window& window, int64_t bytes, std::string* error);

  // What begins `offset` bytes behind the begin of `registered`, at all ranks of the node.
  bool Address(ncclWindow_t registered, int64_t offset, device::Window* window, std::string* error) const;

  // What NCCL has registered `window`, which is of Allocate, as.
  ncclWindow_t Registered(const device::Window& window) const { return registered_.at(window.base); }

 private:
  bool FindMulticast(ncclWindow_t registered, device::Multicast* multicast, std::string* error);

  Bootstrap& bootstrap_;
  const Nodes nodes_;
  const bool multimem_;
  std::map<const char*, ncclWindow_t> registered_;  // by Window::base
};

}  // namespace cuda
}  // namespace jaxcomm
