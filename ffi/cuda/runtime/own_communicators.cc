#include "cuda/runtime/own_communicators.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

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

// One GPU of this process.
struct Entry {
  std::mutex mutex;  // held during Make(): other GPUs make theirs at the same time
  std::optional<StatusOr<ncclComm_t>> made;
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

// Non-blocking, because NCCL would wait for the other ranks forever.
StatusOr<ncclComm_t> Make(const Group& group, const ncclUniqueId& key, int32_t rank, int32_t device) {
  const StatusOr<const NcclLibrary*> opened = NcclLibrary::Open("");
  JAXCOMM_RETURN_IF_ERROR(opened.status());
  const NcclLibrary* const nccl = *opened;
  JAXCOMM_RETURN_IF_ERROR(nccl->Require("ncclCommInitRankConfig"));
  ScopedDevice keep;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(device)));
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
      return DeadlineExceededError("the other ranks of the group of " + std::to_string(group.size()) +
                                   " did not come to make its communicator within " + TimeoutText(timeout_s));
    }
  }
  if (result == ncclSuccess) return nccl_comm;
  cudaGetLastError();  // as in CheckCuda
  std::string text = std::string("ncclCommInitRankConfig: ") + nccl->GetErrorString(result);
  if (nccl_comm != nullptr) nccl->CommAbort(nccl_comm);
  return UnavailableError(std::move(text));
}

}  // namespace

void OwnCommunicators::Add(int32_t own_process, const std::vector<Member>& group, const ncclUniqueId& key) {
  Known& known = GetKnown();
  std::lock_guard<std::mutex> lock(known.mutex);
  known.own_process = own_process;
  known.keys.emplace(group, key);
}

StatusOr<ncclComm_t> OwnCommunicators::Get(const std::vector<Member>& groups, int64_t group_size, int32_t device) {
  Known& known = GetKnown();
  Group group;
  ncclUniqueId key;
  int32_t rank;
  Entry* entry;
  {
    std::lock_guard<std::mutex> lock(known.mutex);
    const auto own = std::find(groups.begin(), groups.end(), Member{known.own_process, device});
    if (own == groups.end()) {
      return InvalidArgumentError(
          "GPU " + std::to_string(device) + " of process " + std::to_string(known.own_process) +
          " is not one of those that the call was compiled for; XLA before jaxlib 0.11.2 does not tell which it is");
    }
    const int64_t position = own - groups.begin();
    const auto first = groups.begin() + position / group_size * group_size;
    group.assign(first, first + group_size);
    rank = static_cast<int32_t>(position % group_size);
    const auto found = known.keys.find(group);
    if (found == known.keys.end()) {
      return UnavailableError(
          "this process has not compiled the call, and XLA before jaxlib 0.11.2 provides no communicators: install "
          "jax, jaxlib and JAX's CUDA plugin 0.11.2 or later");
    }
    key = found->second;
    std::unique_ptr<Entry>& slot = known.entries[{group, rank}];
    if (!slot) slot = std::make_unique<Entry>();
    entry = slot.get();
  }
  std::lock_guard<std::mutex> lock(entry->mutex);
  if (!entry->made) entry->made = Make(group, key, rank, device);
  return *entry->made;
}

}  // namespace cuda
}  // namespace jaxcomm
