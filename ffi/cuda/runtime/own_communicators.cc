#include "cuda/runtime/own_communicators.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/deadline.h"
#include "cuda/nccl/nccl_library.h"
#include "cuda/nccl/scoped_device.h"
#include "cuda/program/call_program.h"
#include "cuda/runtime/communicator.h"

namespace jaxcomm {
namespace cuda {
namespace {

using Group = std::vector<Member>;

// Of one GPU of this process.
struct Entry {
  std::mutex mutex;  // held while it is made: other GPUs make theirs at the same time
  ncclComm_t nccl_comm = nullptr;
  std::string error;
};

struct Known {
  std::mutex mutex;
  int32_t own_process = 0;
  std::map<Group, ncclUniqueId> keys;
  std::map<std::pair<Group, int32_t>, std::unique_ptr<Entry>> entries;  // by rank; never deleted
};

Known& GetKnown() {
  static auto* known = new Known;
  return *known;
}

// Not blocking: NCCL waits for the other ranks without end.
std::string Make(const Group& group, const ncclUniqueId& key, int32_t rank, int32_t device, ncclComm_t* made) {
  std::string error;
  const NcclLibrary* const nccl = NcclLibrary::Open("", &error);
  if (nccl == nullptr) return error;
  if (error = nccl->WhyNot("ncclCommInitRankConfig"); !error.empty()) return error;
  ScopedDevice keep;
  if (error = Problem("cudaSetDevice", cudaSetDevice(device)); !error.empty()) return error;
  const double timeout_s = Communicator::Configured().timeout_s;
  const Deadline deadline(timeout_s);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t nccl_comm = nullptr;
  ncclResult_t result =
      nccl->CommInitRankConfig(&nccl_comm, static_cast<int>(group.size()), key, static_cast<int>(rank), &config);
  while (result == ncclInProgress) {
    if (const ncclResult_t asked = nccl->CommGetAsyncError(nccl_comm, &result); asked != ncclSuccess) result = asked;
    if (result == ncclInProgress && !deadline.Wait()) {
      nccl->CommAbort(nccl_comm);
      return "the other ranks of the group of " + std::to_string(group.size()) +
             " did not come to make its communicator within " + TimeoutText(timeout_s);
    }
  }
  if (result == ncclSuccess) {
    *made = nccl_comm;
    return "";
  }
  cudaGetLastError();
  error = std::string("ncclCommInitRankConfig: ") + nccl->GetErrorString(result);
  if (nccl_comm != nullptr) nccl->CommAbort(nccl_comm);
  return error;
}

}  // namespace

void OwnCommunicators::Add(int32_t own_process, const std::vector<Member>& group, const ncclUniqueId& key) {
  Known& known = GetKnown();
  std::lock_guard<std::mutex> lock(known.mutex);
  known.own_process = own_process;
  known.keys.emplace(group, key);
}

std::string OwnCommunicators::Get(const std::vector<Member>& groups, int64_t group_size, int32_t device,
                                  ncclComm_t* nccl_comm) {
  Known& known = GetKnown();
  Group group;
  ncclUniqueId key;
  int32_t rank;
  Entry* entry;
  {
    std::lock_guard<std::mutex> lock(known.mutex);
    const auto own = std::find(groups.begin(), groups.end(), Member{known.own_process, device});
    if (own == groups.end()) {
      return "GPU " + std::to_string(device) + " of process " + std::to_string(known.own_process) +
             " is not one of those that the call was compiled for; XLA before jaxlib 0.11.2 does not tell which it is";
    }
    const int64_t position = own - groups.begin();
    const auto first = groups.begin() + position / group_size * group_size;
    group.assign(first, first + group_size);
    rank = static_cast<int32_t>(position % group_size);
    const auto found = known.keys.find(group);
    if (found == known.keys.end()) {
      return "this process has not compiled the call, and XLA before jaxlib 0.11.2 provides no communicators: install "
             "jax, "
             "jaxlib and JAX's CUDA plugin 0.11.2 or later";
    }
    key = found->second;
    std::unique_ptr<Entry>& slot = known.entries[{group, rank}];
    if (!slot) slot = std::make_unique<Entry>();
    entry = slot.get();
  }
  std::lock_guard<std::mutex> lock(entry->mutex);
  if (entry->nccl_comm == nullptr && entry->error.empty()) {
    entry->error = Make(group, key, rank, device, &entry->nccl_comm);
  }
  *nccl_comm = entry->nccl_comm;
  return entry->error;
}

}  // namespace cuda
}  // namespace jaxcomm
