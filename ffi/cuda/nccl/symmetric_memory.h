// Symmetric memory: windows of NCCL, of the same size at every rank, which all ranks of a node address.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <map>

#include "cuda/nccl/bootstrap.h"
#include "cuda/program/assign_or_return.h"
#include "include/jaxcomm/comm.h"

namespace jaxcomm::cuda {

// ncclMemAlloc allocates whole pages of this size on all GPUs so far. Windows cover whole pages.
constexpr int64_t kPageBytes = 2 << 20;
inline int64_t WholePages(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

// The symmetric memory of one communicator. Never freed, because executables and CUDA graphs keep its addresses. One
// thread at a time.
class SymmetricMemory {
 public:
  // `node`: the ranks of this rank's node.
  SymmetricMemory(Bootstrap& bootstrap, const device::Team& node, bool multimem)
      : bootstrap_(bootstrap), node_(node), multimem_(multimem) {}

  // Allocates and registers `bytes` at every rank. `what`: the purpose, for errors. Fills in `multicast`, if given,
  // only if all ranks have a multicast address. Collective for all ranks of the bootstrap.
  StatusOr<device::Window> Allocate(const char* what, int64_t bytes, device::Multicast* multicast = nullptr);

  // Zeroes the window. When this returns, the window is zero at all ranks. Collective. Comes before the launch of any
  // kernel that uses the window.
  Status Clear(const device::Window& window, int64_t bytes);

  // The memory that begins `offset` bytes after the begin of `registered`, at all ranks of the node.
  StatusOr<device::Window> Address(ncclWindow_t registered, int64_t offset) const;

  // NCCL's handle of `window`, which Allocate() returned.
  ncclWindow_t Registered(const device::Window& window) const { return registered_.at(window.base); }

 private:
  StatusOr<device::Window> Register(const char* what, void* memory, uint64_t bytes, ncclWindow_t* registered);
  Status FindMulticast(ncclWindow_t registered, device::Multicast* multicast);

  Bootstrap& bootstrap_;
  const device::Team node_;
  const bool multimem_;
  std::map<const char*, ncclWindow_t> registered_;  // by Window::base
};

}  // namespace jaxcomm::cuda
