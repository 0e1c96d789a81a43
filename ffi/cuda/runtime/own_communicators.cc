#include "cuda/runtime/own_communicators.h"

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/first_contact.h"
#include "cuda/nccl/nccl_calls.h"
#include "cuda/nccl/nccl_library.h"

namespace jaxcomm::cuda {
namespace {

// A group, and the rank in it of one GPU of this process.
using RankOfGroup = std::pair<std::vector<Member>, int32_t>;

struct Entry {
  std::mutex mutex;  // held while the communicator is made: other GPUs make theirs at the same time
  std::optional<StatusOr<Communicator*>> made;
};

struct Known {
  std::mutex mutex;
  std::map<RankOfGroup, std::unique_ptr<Entry>> entries;  // never deleted
};

Known& GetKnown() {
  static auto* known = new Known;
  return *known;
}

Entry& EntryOf(const RankOfGroup& rank) {
  std::lock_guard<std::mutex> lock(GetKnown().mutex);
  std::unique_ptr<Entry>& slot = GetKnown().entries[rank];
  if (!slot) slot = std::make_unique<Entry>();
  return *slot;
}

StatusOr<Communicator*> Make(const NcclLibrary& nccl, FirstContact& contact, const std::vector<Member>& members,
                             int32_t device) {
  std::vector<uint64_t> processes;
  for (const Member& member : members) processes.push_back(member.process);
  JAXCOMM_ASSIGN_OR_RETURN(const ncclUniqueId key, contact.Key());
  const auto make = [&]() -> StatusOr<ncclComm_t> {
    JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(device)));
    return MakeNcclComm(nccl, key, static_cast<int32_t>(members.size()), contact.rank(),
                        Communicator::Configured().timeout_s, processes);
  };
  ScopedDevice keep;
  return Communicator::Make(nccl, make(), processes,
                            [&](const char* at, const Status& own) { return contact.AllDone(at, own); });
}

}  // namespace

StatusOr<Communicator*> OwnCommunicator(ncclComm_t of_xla, int32_t device) {
  // XLA has loaded the library that made its communicator.
  JAXCOMM_ASSIGN_OR_RETURN(const NcclLibrary* const nccl, NcclLibrary::Open(""));
  FirstContact contact(*nccl, of_xla, device, Communicator::Configured().timeout_s);
  const StatusOr<std::vector<Member>> found = contact.Members();
  // The other ranks wait for this one, and do not know yet who it is.
  if (found.status().code() == StatusCode::kUnavailable) {
    Communicator::NoteOwnFailure("first contact of a group: " + found.status().message());
  }
  JAXCOMM_ASSIGN_OR_RETURN(const std::vector<Member> members, found);
  Entry& entry = EntryOf({members, contact.rank()});
  std::lock_guard<std::mutex> lock(entry.mutex);
  if (!entry.made) entry.made = Make(*nccl, contact, members, device);
  return *entry.made;
}

}  // namespace jaxcomm::cuda
