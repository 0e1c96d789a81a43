#include "cuda/nccl/symmetric_memory.h"

#include <algorithm>
#include <vector>

#include "cuda/nccl/check_cuda.h"
#include "cuda/program/call_program.h"

namespace jaxcomm {
namespace cuda {

// A rank that has no memory says so, or the others would wait for it without end when they register theirs.
bool SymmetricMemory::Allocate(const char* what, int64_t bytes, device::Window* window, std::string* error,
                               device::Multicast* multicast) {
  const NcclLibrary& nccl = bootstrap_.nccl();
  const auto own = static_cast<uint64_t>(bytes);
  void* memory = nullptr;
  std::string problem;
  if (!bootstrap_.Check("ncclMemAlloc", nccl.MemAlloc(&memory, own), &problem)) memory = nullptr;
  std::vector<uint64_t> all;
  if (!bootstrap_.AllGather(memory != nullptr ? own : 0, &all, error)) return false;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == own) continue;
    *error = "rank " + std::to_string(r) + " of the group " +
             (all[r] == 0 ? "has no " + std::to_string(bytes) + " bytes of GPU memory left for the " + what +
                                "; leave it some, for instance with XLA_PYTHON_CLIENT_MEM_FRACTION"
                          : "wants " + std::to_string(all[r]) + " bytes for the " + what + ", this one " +
                                std::to_string(bytes) + ": their programs differ");
    if (!problem.empty()) *error += " (" + problem + ")";
    if (memory != nullptr) nccl.MemFree(memory);
    return false;
  }
  ncclWindow_t registered = nullptr;
  if (bootstrap_.Check("ncclCommWindowRegister",
                       nccl.CommWindowRegister(nodes_.comm, memory, own, &registered, NCCL_WIN_COLL_SYMMETRIC),
                       error) &&
      registered == nullptr) {
    *error = "NCCL gave no window for the " + std::string(what) +
             ": the group's GPUs can't address each other's memory (see python -m jaxcomm.info --communicator)";
  }
  const bool addressed = registered != nullptr && Address(registered, 0, window, error);
  if (registered == nullptr) nccl.MemFree(memory);
  if (!bootstrap_.AllDone("when it registered memory with NCCL", addressed, error)) return false;
  registered_[window->base] = registered;
  return multicast == nullptr || FindMulticast(registered, multicast, error);
}

bool SymmetricMemory::Clear(const device::Window& window, int64_t bytes, std::string* error) {
  void* const own = window.At(nodes_.own.rank);
  const bool begun =
      CheckCuda("cudaMemsetAsync", cudaMemsetAsync(own, 0, static_cast<size_t>(bytes), bootstrap_.stream()), error);
  return bootstrap_.AllDone("when it cleared memory", begun, error);
}

bool SymmetricMemory::Address(ncclWindow_t registered, int64_t offset, device::Window* window,
                              std::string* error) const {
  std::vector<char*> addresses;
  for (int32_t r = 0; r < nodes_.own.size; ++r) {
    void* address = nullptr;
    const ncclResult_t found =
        bootstrap_.nccl().GetLsaDevicePointer(registered, static_cast<size_t>(offset), r, &address);
    if (!bootstrap_.Check("ncclGetLsaDevicePointer", found, error)) return false;
    addresses.push_back(static_cast<char*>(address));
  }
  return MakeWindow(addresses, window, error);
}

bool SymmetricMemory::FindMulticast(ncclWindow_t registered, device::Multicast* multicast, std::string* error) {
  void* address = nullptr;
  std::string problem;
  if (multimem_) {
    const ncclResult_t found = bootstrap_.nccl().GetLsaMultimemDevicePointer(registered, 0, &address);
    if (!bootstrap_.Check("ncclGetLsaMultimemDevicePointer", found, &problem)) address = nullptr;
  }
  bool all_can = false;
  if (!bootstrap_.AllTrue(address != nullptr, &all_can, error)) return false;
  if (all_can) multicast->base = static_cast<char*>(address);
  return true;
}

}  // namespace cuda
}  // namespace jaxcomm
