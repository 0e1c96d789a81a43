#include "cuda/nccl/bootstrap.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "common/hash.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/device_memory.h"
#include "cuda/nccl/failed_processes.h"
#include "cuda/nccl/nccl_calls.h"
#include "cuda/nccl/wait_for_stream.h"

namespace jaxcomm::cuda {

StatusOr<Exchange> Exchange::Make(size_t num_words, cudaStream_t stream) {
  Exchange made;
  made.num_words = num_words;
  made.stream = stream;
  const size_t bytes = num_words * sizeof(uint64_t);
  void* host = nullptr;
  int device = 0;
  Status status = CheckCuda("cudaGetDevice", cudaGetDevice(&device));
  if (status.ok()) status = CheckCuda("cudaHostAlloc", cudaHostAlloc(&host, bytes, cudaHostAllocMapped));
  if (status.ok()) status = CheckCuda("cudaMalloc", cudaMalloc(&made.on_device, bytes));
  if (status.ok() && stream == nullptr) {
    status = CheckCuda("cudaStreamCreate", cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking));
  }
  made.on_host = static_cast<uint64_t*>(host);
  if (status.ok()) return made;
  if (made.on_host != nullptr) Retire(device, made.on_host, true);
  if (made.on_device != nullptr) Retire(device, made.on_device);
  return status;
}

StatusOr<std::vector<uint64_t>> Exchange::AllGather(const NcclLibrary& nccl, ncclComm_t nccl_comm, int32_t size,
                                                    const std::vector<uint64_t>& own, double timeout_s,
                                                    const std::vector<uint64_t>& processes) const {
  const size_t own_bytes = own.size() * sizeof(uint64_t), num_all = own.size() * static_cast<size_t>(size);
  std::memcpy(on_host, own.data(), own_bytes);
  JAXCOMM_RETURN_IF_ERROR(
      CheckCuda("cudaMemcpyAsync", cudaMemcpyAsync(on_device, on_host, own_bytes, cudaMemcpyHostToDevice, stream)));
  // NCCL connects the ranks in the first collective call, and waits for them in the calling thread.
  const std::string late = "the other ranks of the group of " + std::to_string(size);
  const auto call = [to = on_device, count = own.size(), stream = stream, nccl = &nccl, nccl_comm] {
    return nccl->AllGather(to, to + count, count, ncclUint64, nccl_comm, stream);
  };
  const Status begun = CallNccl(nccl, nccl_comm, "ncclAllGather", call, timeout_s, processes);
  JAXCOMM_RETURN_IF_ERROR(FailureOf(processes));
  if (begun.code() == StatusCode::kDeadlineExceeded) return Late(late, timeout_s);
  JAXCOMM_RETURN_IF_ERROR(begun);
  uint64_t* const all = on_host + own.size();
  JAXCOMM_RETURN_IF_ERROR(CheckCuda(
      "cudaMemcpyAsync",
      cudaMemcpyAsync(all, on_device + own.size(), num_all * sizeof(uint64_t), cudaMemcpyDeviceToHost, stream)));
  JAXCOMM_RETURN_IF_ERROR(WaitForStream(stream, timeout_s, late, &processes));
  return std::vector<uint64_t>(all, all + num_all);
}

Status AllDone(const char* at, const Status& own, const StatusOr<std::vector<uint64_t>>& answers) {
  JAXCOMM_RETURN_IF_ERROR(own);
  JAXCOMM_RETURN_IF_ERROR(answers.status());
  const auto failed = std::find(answers->begin(), answers->end(), 0);
  if (failed == answers->end()) return OkStatus();
  return UnavailableError("rank " + std::to_string(failed - answers->begin()) + " of the group failed " + at +
                          "; its error says why");
}

Status Bootstrap::Make(int32_t rank, int32_t size) {
  rank_ = rank;
  size_ = size;
  JAXCOMM_ASSIGN_OR_RETURN(exchange_, Exchange::Make(static_cast<size_t>(size) + 1));
  return OkStatus();
}

StatusOr<std::vector<uint64_t>> Bootstrap::AllGather(uint64_t own) {
  JAXCOMM_RETURN_IF_ERROR(WithPrefix("ranks did not meet before: ", Failure()));
  StatusOr<std::vector<uint64_t>> all = exchange_.AllGather(nccl_, nccl_comm_, size_, {own}, timeout_s_, processes_);
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

// NCCL forms LSA teams of equal size from consecutive ranks that address each other's memory.
StatusOr<int32_t> FindRanksPerNode(Bootstrap& bootstrap, const ncclCommProperties_t& properties, uint64_t name) {
  JAXCOMM_ASSIGN_OR_RETURN(const std::vector<uint64_t> names, bootstrap.AllGather(name));
  const int32_t team_size = bootstrap.size() / properties.nLsaTeams;
  const auto node_of = [&](int32_t r) { return std::pair(names[r], r / team_size); };
  std::vector<int32_t> lengths;
  for (int32_t r = 0; r < bootstrap.size(); ++r) {
    if (r == 0 || node_of(r) != node_of(r - 1)) lengths.push_back(0);
    ++lengths.back();
  }
  const bool even = std::all_of(lengths.begin(), lengths.end(), [&](int32_t length) { return length == lengths[0]; });
  return even ? lengths[0] : 1;
}

}  // namespace jaxcomm::cuda
