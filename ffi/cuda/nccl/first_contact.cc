#include "cuda/nccl/first_contact.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <utility>

#include "cuda/nccl/bootstrap.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/device_memory.h"
#include "cuda/nccl/nccl_calls.h"

namespace jaxcomm::cuda {
namespace {

constexpr size_t kKeyWords = sizeof(ncclUniqueId) / sizeof(uint64_t);

// Exchanges on each GPU, kept for the next one, because each call site makes one.
struct Kept {
  std::mutex mutex;
  std::map<int32_t, Exchange> of_device;
};

Kept& GetKept() {
  static auto* kept = new Kept;
  return *kept;
}

// Takes what is kept for the GPU, with new memory if a larger group needs it. What an exchange that has failed may
// still use is not put back.
StatusOr<Exchange> Take(int32_t device, size_t num_words) {
  Exchange kept;
  {
    std::lock_guard<std::mutex> lock(GetKept().mutex);
    std::swap(kept, GetKept().of_device[device]);
  }
  if (kept.num_words >= num_words) return kept;
  if (kept.num_words > 0) {
    Retire(device, kept.on_device);
    Retire(device, kept.on_host, true);
  }
  return Exchange::Make(num_words, kept.stream);
}

}  // namespace

uint64_t Incarnation() {
  static const uint64_t drawn = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return drawn;
}

StatusOr<std::vector<uint64_t>> FirstContact::AllGather(const std::vector<uint64_t>& own) {
  if (size_ == 1) return own;
  ScopedDevice keep;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(device_)));
  JAXCOMM_ASSIGN_OR_RETURN(const Exchange exchange, Take(device_, (kKeyWords + 1) * (static_cast<size_t>(size_) + 1)));
  // The processes of the group are not known yet.
  JAXCOMM_ASSIGN_OR_RETURN(std::vector<uint64_t> words, exchange.AllGather(nccl_, of_xla_, size_, own, timeout_s_, {}));
  std::lock_guard<std::mutex> lock(GetKept().mutex);
  GetKept().of_device[device_] = exchange;
  return words;
}

StatusOr<std::vector<Member>> FirstContact::Members() {
  JAXCOMM_RETURN_IF_ERROR(CheckNccl(nccl_, of_xla_, "ncclCommCount", nccl_.CommCount(of_xla_, &size_)));
  JAXCOMM_RETURN_IF_ERROR(CheckNccl(nccl_, of_xla_, "ncclCommUserRank", nccl_.CommUserRank(of_xla_, &rank_)));
  JAXCOMM_ASSIGN_OR_RETURN(const std::vector<uint64_t> words,
                           AllGather({Incarnation(), static_cast<uint64_t>(device_)}));
  std::vector<Member> members;
  for (size_t r = 0; r < static_cast<size_t>(size_); ++r) {
    members.push_back({words[2 * r], static_cast<int32_t>(words[2 * r + 1])});
  }
  return members;
}

// Rank 0 makes the key. Its last word says whether it could.
StatusOr<ncclUniqueId> FirstContact::Key() {
  ncclUniqueId key = {};
  std::vector<uint64_t> own(kKeyWords + 1);
  own[kKeyWords] = rank_ == 0 && nccl_.GetUniqueId(&key) == ncclSuccess ? 1 : 0;
  std::memcpy(own.data(), &key, sizeof key);
  JAXCOMM_ASSIGN_OR_RETURN(const std::vector<uint64_t> words, AllGather(own));
  if (words[kKeyWords] == 0) return UnavailableError("ncclGetUniqueId failed on rank 0 of the group");
  std::memcpy(&key, words.data(), sizeof key);
  return key;
}

}  // namespace jaxcomm::cuda
