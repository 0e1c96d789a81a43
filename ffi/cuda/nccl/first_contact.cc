#include "cuda/nccl/first_contact.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <utility>

#include "cuda/nccl/bootstrap.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/failed_processes.h"
#include "cuda/nccl/nccl_calls.h"
#include "cuda/nccl/wait_for_stream.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr size_t kKeyWords = sizeof(ncclUniqueId) / sizeof(uint64_t);

// Memory of the exchanges on one GPU. Kept for the next one, because each call site makes one.
struct Memory {
  cudaStream_t stream = nullptr;
  uint64_t* on_device = nullptr;  // own words, then those of all ranks
  uint64_t* on_host = nullptr;    // the same
  size_t num_words = 0;
};

StatusOr<Memory> MakeMemory(size_t num_words) {
  Memory made;
  made.num_words = num_words;
  const size_t bytes = num_words * sizeof(uint64_t);
  void* host = nullptr;
  JAXCOMM_RETURN_IF_ERROR(
      CheckCuda("cudaStreamCreate", cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking)));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaHostAlloc", cudaHostAlloc(&host, bytes, cudaHostAllocMapped)));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaMalloc", cudaMalloc(&made.on_device, bytes)));
  made.on_host = static_cast<uint64_t*>(host);
  return made;
}

struct Kept {
  std::mutex mutex;
  std::map<int32_t, Memory> of_device;
};

Kept& GetKept() {
  static auto* kept = new Kept;
  return *kept;
}

// Takes what is kept for the GPU, if it is large enough. What an exchange that has failed may still use is not put
// back.
StatusOr<Memory> Take(int32_t device, size_t num_words) {
  {
    std::lock_guard<std::mutex> lock(GetKept().mutex);
    const auto found = GetKept().of_device.find(device);
    if (found != GetKept().of_device.end() && found->second.num_words >= num_words) {
      const Memory memory = found->second;
      GetKept().of_device.erase(found);
      return memory;
    }
  }
  return MakeMemory(num_words);
}

void PutBack(int32_t device, const Memory& memory) {
  std::lock_guard<std::mutex> lock(GetKept().mutex);
  GetKept().of_device[device] = memory;
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
  const size_t num_all = own.size() * static_cast<size_t>(size_);
  JAXCOMM_ASSIGN_OR_RETURN(const Memory memory, Take(device_, (kKeyWords + 1) * (static_cast<size_t>(size_) + 1)));
  std::memcpy(memory.on_host, own.data(), own.size() * sizeof(uint64_t));
  JAXCOMM_RETURN_IF_ERROR(
      CheckCuda("cudaMemcpyAsync", cudaMemcpyAsync(memory.on_device, memory.on_host, own.size() * sizeof(uint64_t),
                                                   cudaMemcpyHostToDevice, memory.stream)));
  // NCCL connects the ranks in the first collective call, and waits for them in the calling thread.
  uint64_t* const all = memory.on_device + own.size();
  const std::string late = "the other ranks of the group of " + std::to_string(size_);
  const auto call = [memory, all, count = own.size(), nccl = &nccl_, of_xla = of_xla_] {
    return nccl->AllGather(memory.on_device, all, count, ncclUint64, of_xla, memory.stream);
  };
  const std::vector<uint64_t> any;  // the processes of the group are not known yet
  const Status begun = CallNccl(nccl_, of_xla_, "ncclAllGather", call, timeout_s_, any);
  JAXCOMM_RETURN_IF_ERROR(FailureOf(any));
  if (begun.code() == StatusCode::kDeadlineExceeded) return Late(late, timeout_s_);
  JAXCOMM_RETURN_IF_ERROR(begun);
  JAXCOMM_RETURN_IF_ERROR(
      CheckCuda("cudaMemcpyAsync", cudaMemcpyAsync(memory.on_host + own.size(), all, num_all * sizeof(uint64_t),
                                                   cudaMemcpyDeviceToHost, memory.stream)));
  JAXCOMM_RETURN_IF_ERROR(WaitForStream(memory.stream, timeout_s_, late, &any));
  const uint64_t* const gathered = memory.on_host + own.size();
  std::vector<uint64_t> words(gathered, gathered + num_all);
  PutBack(device_, memory);
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

Status FirstContact::AllDone(const char* at, const Status& own) {
  const StatusOr<std::vector<uint64_t>> answers = AllGather({uint64_t{own.ok()}});
  JAXCOMM_RETURN_IF_ERROR(own);
  JAXCOMM_RETURN_IF_ERROR(answers.status());
  return Bootstrap::FailureOf(*answers, at);
}

}  // namespace cuda
}  // namespace jaxcomm
