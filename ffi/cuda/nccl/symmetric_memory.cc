#include "cuda/nccl/symmetric_memory.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/nccl_calls.h"
#include "cuda/program/call_program.h"

namespace jaxcomm::cuda {

// A rank without memory reports it to all ranks, which would otherwise wait for it forever when they register theirs.
StatusOr<device::Window> SymmetricMemory::Allocate(const char* what, int64_t bytes, device::Multicast* multicast) {
  const NcclLibrary& nccl = bootstrap_.nccl();
  const auto own = static_cast<uint64_t>(bytes);
  void* memory = nullptr;
  const Status allocated = CheckNccl(nccl, nullptr, "ncclMemAlloc", nccl.MemAlloc(&memory, own));
  if (!allocated.ok()) memory = nullptr;
  JAXCOMM_ASSIGN_OR_RETURN(const std::vector<uint64_t> all, bootstrap_.AllGather(memory != nullptr ? own : 0));
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == own) continue;
    std::string text = "rank " + std::to_string(r) + " of the group " +
                       (all[r] == 0 ? "has no " + std::to_string(bytes) + " bytes of GPU memory left for the " + what +
                                          "; leave it some, for instance with XLA_PYTHON_CLIENT_MEM_FRACTION"
                                    : "wants " + std::to_string(all[r]) + " bytes for the " + what + ", this one " +
                                          std::to_string(bytes) + ": their programs differ");
    if (!allocated.ok()) text += " (" + allocated.message() + ")";
    if (memory != nullptr) nccl.MemFree(memory);
    return Status(all[r] == 0 ? StatusCode::kUnavailable : StatusCode::kInvalidArgument, std::move(text));
  }
  ncclWindow_t registered = nullptr;
  const StatusOr<device::Window> window = Register(what, memory, own, &registered);
  // After a timeout, NCCL may still use the memory.
  const bool ended = window.status().code() != StatusCode::kDeadlineExceeded;
  if (registered == nullptr && ended) nccl.MemFree(memory);
  JAXCOMM_RETURN_IF_ERROR(bootstrap_.AllDone("when it registered memory with NCCL", window.status()));
  registered_[window->base] = registered;
  if (multicast != nullptr) JAXCOMM_RETURN_IF_ERROR(FindMulticast(registered, multicast));
  return window;
}

StatusOr<device::Window> SymmetricMemory::Register(const char* what, void* memory, uint64_t bytes,
                                                   ncclWindow_t* registered) {
  const auto made = std::make_shared<ncclWindow_t>(nullptr);
  const auto call = [made, memory, bytes, comm = bootstrap_.nccl_comm(), nccl = &bootstrap_.nccl()] {
    // Not NCCL_WIN_COLL_SYMMETRIC: for its symmetric kernels, NCCL would make a device communicator with slots,
    // barriers and connections of GIN. Source: NVIDIA/nccl 2.30.7, src/dev_runtime.cc (ncclDevrWindowRegisterInGroup).
    return nccl->CommWindowRegister(comm, memory, bytes, made.get(), NCCL_WIN_DEFAULT);
  };
  JAXCOMM_RETURN_IF_ERROR(bootstrap_.Call("ncclCommWindowRegister", call));
  *registered = *made;
  if (*registered == nullptr) {
    return UnavailableError(
        "NCCL gave no window for the " + std::string(what) +
        ": the group's GPUs can't address each other's memory (see python -m jaxcomm.info --communicator)");
  }
  return Address(*registered, 0);
}

Status SymmetricMemory::Clear(const device::Window& window, int64_t bytes) {
  void* const own = window.At(node_.rank);
  const Status begun =
      CheckCuda("cudaMemsetAsync", cudaMemsetAsync(own, 0, static_cast<size_t>(bytes), bootstrap_.stream()));
  return bootstrap_.AllDone("when it cleared memory", begun);
}

StatusOr<device::Window> SymmetricMemory::Address(ncclWindow_t registered, int64_t offset) const {
  std::vector<char*> addresses;
  for (int32_t r = 0; r < node_.size; ++r) {
    void* address = nullptr;
    const ncclResult_t found =
        bootstrap_.nccl().GetLsaDevicePointer(registered, static_cast<size_t>(offset), r, &address);
    JAXCOMM_RETURN_IF_ERROR(CheckNccl(bootstrap_.nccl(), nullptr, "ncclGetLsaDevicePointer", found));
    addresses.push_back(static_cast<char*>(address));
  }
  return MakeWindow(addresses);
}

// The first call for a node is collective: its first rank sends a handle to the others, which wait for it. Source:
// NVIDIA/nccl 2.30.7, src/dev_runtime.cc (symTeamObtain).
Status SymmetricMemory::FindMulticast(ncclWindow_t registered, device::Multicast* multicast) {
  JAXCOMM_ASSIGN_OR_RETURN(const bool all_may, bootstrap_.AllTrue(multimem_));
  if (!all_may) return OkStatus();
  const auto address = std::make_shared<void*>(nullptr);
  const auto call = [address, registered, nccl = &bootstrap_.nccl()] {
    return nccl->GetLsaMultimemDevicePointer(registered, 0, address.get());
  };
  const Status found = bootstrap_.Call("ncclGetLsaMultimemDevicePointer", call);
  if (found.code() == StatusCode::kDeadlineExceeded) return found;
  JAXCOMM_ASSIGN_OR_RETURN(const bool all_can, bootstrap_.AllTrue(found.ok() && *address != nullptr));
  if (all_can) multicast->base = static_cast<char*>(*address);
  return OkStatus();
}

}  // namespace jaxcomm::cuda
