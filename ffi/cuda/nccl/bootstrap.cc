#include "cuda/nccl/bootstrap.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "common/hash.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/nccl_calls.h"
#include "cuda/nccl/wait_for_stream.h"

namespace jaxcomm {
namespace cuda {

Status Bootstrap::Make(int32_t rank, int32_t size) {
  rank_ = rank;
  size_ = size;
  const size_t bytes = static_cast<size_t>(size) * sizeof(uint64_t);
  void* host = nullptr;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaHostAlloc", cudaHostAlloc(&host, bytes, cudaHostAllocMapped)));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaMalloc", cudaMalloc(&words_, bytes + sizeof(uint64_t))));
  words_on_host_ = static_cast<uint64_t*>(host);
  return OkStatus();
}

StatusOr<std::vector<uint64_t>> Bootstrap::AllGather(uint64_t own) {
  JAXCOMM_RETURN_IF_ERROR(WithPrefix("ranks did not meet before: ", Failure()));
  StatusOr<std::vector<uint64_t>> all = TryAllGather(own);
  if (all.ok()) return all;
  Fail(all.status());
  return all;
}

void Bootstrap::Fail(const Status& failure) {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (!failure_.ok()) return;
  failure_ = failure;
  RevokeNcclComm(nccl_, nccl_comm_);
}

StatusOr<std::vector<uint64_t>> Bootstrap::TryAllGather(uint64_t own) {
  const size_t bytes = static_cast<size_t>(size_) * sizeof own;
  JAXCOMM_RETURN_IF_ERROR(
      CheckCuda("cudaMemcpyAsync", cudaMemcpyAsync(words_, &own, sizeof own, cudaMemcpyHostToDevice, stream_)));
  JAXCOMM_RETURN_IF_ERROR(
      // NCCL connects the ranks in the first exchange.
      Call("ncclAllGather",
           [this] { return nccl_.AllGather(words_, words_ + 1, 1, ncclUint64, nccl_comm_, stream_); }));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda(
      "cudaMemcpyAsync", cudaMemcpyAsync(words_on_host_, words_ + 1, bytes, cudaMemcpyDeviceToHost, stream_)));
  JAXCOMM_RETURN_IF_ERROR(
      WaitForStream(stream_, timeout_s_, "the other ranks of the group of " + std::to_string(size_), &processes_));
  return std::vector<uint64_t>(words_on_host_, words_on_host_ + size_);
}

Status Bootstrap::CheckEqual(const char* what, uint64_t own) {
  JAXCOMM_ASSIGN_OR_RETURN(const std::vector<uint64_t> all, AllGather(own));
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == own) continue;
    return InvalidArgumentError(std::string(what) + " must be the same on all ranks, but is " + std::to_string(all[r]) +
                                " on rank " + std::to_string(r) + " and " + std::to_string(own) + " on rank " +
                                std::to_string(rank_));
  }
  return OkStatus();
}

Status Bootstrap::CheckSameCall(const std::string& whole_name, uint64_t hash) {
  JAXCOMM_ASSIGN_OR_RETURN(const std::vector<uint64_t> hashes, AllGather(hash));
  // All ranks have the same words, so all of them exchange names or none does.
  const auto differs = [](uint64_t from) { return [from](uint64_t other) { return other != from; }; };
  if (std::none_of(hashes.begin(), hashes.end(), differs(hashes.front()))) return OkStatus();
  // The end of a name differs: its file and line. A long name loses its beginning.
  constexpr size_t kMostNameBytes = 128;
  const std::string name = whole_name.substr(whole_name.size() - std::min(whole_name.size(), kMostNameBytes));
  JAXCOMM_ASSIGN_OR_RETURN(const std::vector<uint64_t> name_hashes, AllGather(Mix(1, whole_name)));
  std::vector<std::string> names(hashes.size());
  for (size_t at = 0; at < kMostNameBytes; at += sizeof(uint64_t)) {
    char bytes[sizeof(uint64_t)] = {};
    uint64_t word = 0;
    if (at < name.size()) name.copy(bytes, sizeof bytes, at);
    std::memcpy(&word, bytes, sizeof word);
    JAXCOMM_ASSIGN_OR_RETURN(const std::vector<uint64_t> words, AllGather(word));
    for (size_t r = 0; r < names.size(); ++r) {
      std::memcpy(bytes, &words[r], sizeof bytes);
      names[r].append(bytes, strnlen(bytes, sizeof bytes));
    }
  }
  const auto other = static_cast<size_t>(std::find_if(hashes.begin(), hashes.end(), differs(hash)) - hashes.begin());
  const std::string& own_name = names[static_cast<size_t>(rank_)];
  const std::string other_rank = "rank " + std::to_string(other), own_rank = "rank " + std::to_string(rank_);
  if (name_hashes[other] == name_hashes[static_cast<size_t>(rank_)]) {
    return InvalidArgumentError(own_rank + " and " + other_rank +
                                " make this call with different shapes, types or arguments");
  }
  return InvalidArgumentError("the ranks make different calls, or calls in different orders: " + other_rank +
                              " makes " + names[other] + ", " + own_rank + " makes " + own_name);
}

StatusOr<bool> Bootstrap::AllTrue(bool own) {
  JAXCOMM_ASSIGN_OR_RETURN(const std::vector<uint64_t> answers, AllGather(own ? 1 : 0));
  return std::find(answers.begin(), answers.end(), 0) == answers.end();
}

Status Bootstrap::AllDone(const char* at, const Status& own) {
  const StatusOr<std::vector<uint64_t>> answers = AllGather(own.ok() ? 1 : 0);
  JAXCOMM_RETURN_IF_ERROR(own);
  JAXCOMM_RETURN_IF_ERROR(answers.status());
  return FailureOf(*answers, at);
}

Status Bootstrap::FailureOf(const std::vector<uint64_t>& answers, const char* at) {
  const auto failed = std::find(answers.begin(), answers.end(), 0);
  if (failed == answers.end()) return OkStatus();
  return UnavailableError("rank " + std::to_string(failed - answers.begin()) + " of the group failed " + at +
                          "; its error says why");
}

Status Bootstrap::Failure() const {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  return failure_;
}

Status Bootstrap::Call(const char* name, std::function<ncclResult_t()> call) {
  const Status status = CallNccl(nccl_, nccl_comm_, name, std::move(call), timeout_s_, processes_);
  if (status.code() == StatusCode::kDeadlineExceeded) Fail(status);
  return status;
}

Status WaitForEarlier(cudaStream_t stream, double timeout_s) {
  return WaitForStream(stream, kTimeoutsOfEarlierWork * timeout_s, "the end of earlier work on this GPU");
}

}  // namespace cuda
}  // namespace jaxcomm
