#include "cuda/runtime/own_communicators.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/nccl_calls.h"
#include "cuda/nccl/nccl_library.h"
#include "cuda/nccl/scoped_device.h"

namespace jaxcomm {
namespace cuda {
namespace {

struct Group {
  bool of_xla = false;  // else the processes are numbers, not incarnations
  std::vector<Member> members;
  int32_t rank = 0;

  bool operator<(const Group& other) const {
    return std::tie(of_xla, members, rank) < std::tie(other.of_xla, other.members, other.rank);
  }
};

// One GPU of this process in a group.
struct Entry {
  std::mutex mutex;  // held while the communicator is made: other GPUs make theirs at the same time
  std::optional<StatusOr<Communicator*>> made;
};

struct Known {
  std::mutex mutex;
  int32_t own_process = 0;
  std::map<std::vector<Member>, ncclUniqueId> keys;
  std::map<Group, std::unique_ptr<Entry>> entries;  // never deleted
};

Known& GetKnown() {
  static auto* known = new Known;
  return *known;
}

// The means by which ranks agree before they have a communicator.
struct Contact {
  std::function<StatusOr<ncclUniqueId>()> key;
  Communicator::AllDoneFunction all_done;
};

StatusOr<Communicator*> Make(const NcclLibrary& nccl, const Group& group, const Contact& contact) {
  const StatusOr<ncclUniqueId> key = contact.key();
  JAXCOMM_RETURN_IF_ERROR(key.status());
  const auto make = [&]() -> StatusOr<ncclComm_t> {
    JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(group.members[group.rank].device)));
    return MakeNcclComm(nccl, *key, static_cast<int32_t>(group.members.size()), group.rank,
                        Communicator::Configured().timeout_s);
  };
  ScopedDevice keep;
  return Communicator::Make(nccl, make(), contact.all_done);
}

StatusOr<Communicator*> FindOrMake(const NcclLibrary& nccl, const Group& group, const Contact& contact) {
  Entry* entry;
  {
    std::lock_guard<std::mutex> lock(GetKnown().mutex);
    std::unique_ptr<Entry>& slot = GetKnown().entries[group];
    if (!slot) slot = std::make_unique<Entry>();
    entry = slot.get();
  }
  std::lock_guard<std::mutex> lock(entry->mutex);
  if (!entry->made) entry->made = Make(nccl, group, contact);
  return *entry->made;
}

}  // namespace

StatusOr<Communicator*> OwnCommunicators::Get(ncclComm_t of_xla, int32_t device) {
  // XLA has loaded the library that made its communicator.
  const StatusOr<const NcclLibrary*> nccl = NcclLibrary::Open("");
  JAXCOMM_RETURN_IF_ERROR(nccl.status());
  FirstContact contact(**nccl, of_xla, device, Communicator::Configured().timeout_s);
  const StatusOr<std::vector<Member>> members = contact.Members();
  JAXCOMM_RETURN_IF_ERROR(members.status());
  return FindOrMake(
      **nccl, {true, *members, contact.rank()},
      {[&] { return contact.Key(); }, [&](const char* at, const Status& own) { return contact.AllDone(at, own); }});
}

void OwnCommunicators::Add(int32_t own_process, const std::vector<Member>& group, const ncclUniqueId& key) {
  Known& known = GetKnown();
  std::lock_guard<std::mutex> lock(known.mutex);
  known.own_process = own_process;
  known.keys.emplace(group, key);
}

StatusOr<Communicator*> OwnCommunicators::Get(const std::vector<Member>& groups, int64_t group_size, int32_t device) {
  Known& known = GetKnown();
  Group group;
  ncclUniqueId key;
  {
    std::lock_guard<std::mutex> lock(known.mutex);
    const Member self = {static_cast<uint64_t>(known.own_process), device};
    const auto own = std::find(groups.begin(), groups.end(), self);
    if (own == groups.end()) {
      return InvalidArgumentError(
          "GPU " + std::to_string(device) + " of process " + std::to_string(known.own_process) +
          " is not one of those that the call was compiled for; XLA before jaxlib 0.11.2 does not tell which it is");
    }
    const int64_t position = own - groups.begin();
    const auto first = groups.begin() + position / group_size * group_size;
    group.members.assign(first, first + group_size);
    group.rank = static_cast<int32_t>(position % group_size);
    const auto found = known.keys.find(group.members);
    if (found == known.keys.end()) {
      return UnavailableError(
          "this process has not compiled the call, and XLA before jaxlib 0.11.2 provides no communicators: install "
          "jax, jaxlib and JAX's CUDA plugin 0.11.2 or later");
    }
    key = found->second;
  }
  const StatusOr<const NcclLibrary*> nccl = NcclLibrary::Open("");
  JAXCOMM_RETURN_IF_ERROR(nccl.status());
  // A rank that fails alone is noticed after the timeout.
  return FindOrMake(
      **nccl, group,
      {[&]() -> StatusOr<ncclUniqueId> { return key; }, [](const char*, const Status& own) { return own; }});
}

}  // namespace cuda
}  // namespace jaxcomm
