#include "cuda/nccl/bootstrap.h"

#include <algorithm>

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/deadline.h"
#include "cuda/nccl/wait_for_stream.h"
#include "cuda/program/call_program.h"

namespace jaxcomm {
namespace cuda {

bool Bootstrap::Make(int32_t rank, int32_t size, std::string* error) {
  rank_ = rank;
  size_ = size;
  const size_t bytes = static_cast<size_t>(size) * sizeof(uint64_t);
  void* host = nullptr;
  if (!CheckCuda("cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), error) ||
      !CheckCuda("cudaHostAlloc", cudaHostAlloc(&host, bytes, cudaHostAllocMapped), error) ||
      !CheckCuda("cudaMalloc", cudaMalloc(&words_, bytes + sizeof(uint64_t)), error)) {
    return false;
  }
  words_on_host_ = static_cast<uint64_t*>(host);
  return true;
}

bool Bootstrap::AllGather(uint64_t own, std::vector<uint64_t>* all, std::string* error) {
  if (const std::string failure = Failure(); !failure.empty()) {
    *error = "ranks did not meet before: " + failure;
    return false;
  }
  if (TryAllGather(own, all, error)) return true;
  std::lock_guard<std::mutex> lock(mutex_);
  failure_ = *error;
  return false;
}

bool Bootstrap::TryAllGather(uint64_t own, std::vector<uint64_t>* all, std::string* error) {
  const size_t bytes = static_cast<size_t>(size_) * sizeof own;
  if (!CheckCuda("cudaMemcpyAsync", cudaMemcpyAsync(words_, &own, sizeof own, cudaMemcpyHostToDevice, stream_),
                 error) ||
      !Check("ncclAllGather", nccl_.AllGather(words_, words_ + 1, 1, ncclUint64, nccl_comm_, stream_), error) ||
      !CheckCuda("cudaMemcpyAsync", cudaMemcpyAsync(words_on_host_, words_ + 1, bytes, cudaMemcpyDeviceToHost, stream_),
                 error) ||
      !WaitForStream(stream_, timeout_s_, "the other ranks of the group of " + std::to_string(size_), error)) {
    return false;
  }
  all->assign(words_on_host_, words_on_host_ + size_);
  return true;
}

bool Bootstrap::CheckEqual(const char* what, uint64_t own, std::string* error) {
  std::vector<uint64_t> all;
  if (!AllGather(own, &all, error)) return false;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == own) continue;
    *error = std::string(what) + " must be the same on all ranks, but is " + std::to_string(all[r]) + " on rank " +
             std::to_string(r) + " and " + std::to_string(own) + " on rank " + std::to_string(rank_);
    return false;
  }
  return true;
}

bool Bootstrap::AllTrue(bool own, bool* all, std::string* error) {
  std::vector<uint64_t> answers;
  if (!AllGather(own ? 1 : 0, &answers, error)) return false;
  *all = std::find(answers.begin(), answers.end(), 0) == answers.end();
  return true;
}

bool Bootstrap::AllDone(const char* at, bool own, std::string* error) {
  std::vector<uint64_t> answers;
  std::string failure;
  if (!AllGather(own ? 1 : 0, &answers, &failure)) {
    if (own) *error = failure;
    return false;
  }
  const auto failed = std::find(answers.begin(), answers.end(), 0);
  if (own && failed != answers.end()) {
    *error = "rank " + std::to_string(failed - answers.begin()) + " of the group failed " + at + "; its error says why";
  }
  return failed == answers.end();
}

std::string Bootstrap::Failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

bool Bootstrap::Check(const char* name, ncclResult_t result, std::string* error) const {
  const Deadline deadline(timeout_s_);
  while (result == ncclInProgress) {
    if (const ncclResult_t asked = nccl_.CommGetAsyncError(nccl_comm_, &result); asked != ncclSuccess) result = asked;
    if (result == ncclInProgress && !deadline.Wait()) {
      *error = std::string(name) + " was not over within " + TimeoutText(timeout_s_);
      return false;
    }
  }
  if (result == ncclSuccess) return true;
  cudaGetLastError();  // as in CheckCuda
  *error = std::string(name) + ": " + nccl_.GetErrorString(result);
  if (nccl_.GetLastError) {
    if (const char* more = nccl_.GetLastError(nccl_comm_); more && *more) *error += std::string(" (") + more + ")";
  }
  return false;
}

bool WaitForEarlier(cudaStream_t stream, std::string* error) {
  return CheckCuda("cudaStreamSynchronize", cudaStreamSynchronize(stream), error);
}

}  // namespace cuda
}  // namespace jaxcomm
