// First contact of the ranks of an ncclComm_t: small all-gathers through NCCL, before jaxcomm's own signals
// exist.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/nccl/nccl_library.h"
#include "cuda/program/assign_or_return.h"

namespace jaxcomm::cuda {

// Memory of one GPU and a stream, with which the ranks of a communicator exchange words.
struct Exchange {
  // On the current device. `num_words`: those of a rank and of all ranks together. `stream`: null for a new one.
  static StatusOr<Exchange> Make(size_t num_words, cudaStream_t stream = nullptr);
  // Gathers `own` from each of `size` ranks, in rank order. All pass the same number of words. `processes`: as in
  // CallNccl. Collective.
  StatusOr<std::vector<uint64_t>> AllGather(const NcclLibrary& nccl, ncclComm_t nccl_comm, int32_t size,
                                            const std::vector<uint64_t>& own, double timeout_s,
                                            const std::vector<uint64_t>& processes) const;

  cudaStream_t stream = nullptr;
  uint64_t* on_device = nullptr;  // own words, then those of all ranks
  uint64_t* on_host = nullptr;    // the same
  size_t num_words = 0;
};

// Whether a local step has succeeded on all ranks, from their answers. `own`: the outcome on this rank, returned if it
// is an error. Else the error of another rank is "rank 2 of the group failed <at>".
Status AllDone(const char* at, const Status& own, const StatusOr<std::vector<uint64_t>>& answers);

// One per ncclComm_t. Never deleted, like the communicators that share it. One thread at a time: whoever makes
// collective calls holds `mutex`.
//
// All ranks make the collective calls in the same order. A collective call waits for the other ranks no longer than the
// timeout. After one failure all later calls fail: other ranks may have continued, and their next word would be matched
// with a different call. The communicator is revoked then, so that no kernel of NCCL goes on waiting on the GPU.
class Bootstrap {
 public:
  // `processes`: those of the ranks. The failure of one of them ends every wait.
  Bootstrap(const NcclLibrary& nccl, ncclComm_t nccl_comm, double timeout_s, std::vector<uint64_t> processes)
      : nccl_(nccl), nccl_comm_(nccl_comm), timeout_s_(timeout_s), processes_(std::move(processes)) {}
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  std::mutex mutex;

  // Allocates memory and a stream on the current device. Comes before all collective calls.
  Status Make(int32_t rank, int32_t size);

  // Gathers one word of every rank, in rank order. Collective.
  StatusOr<std::vector<uint64_t>> AllGather(uint64_t own);

  // An error that names both ranks if two ranks pass different values of `what`. Collective.
  Status CheckEqual(const char* what, uint64_t own);

  // An error that names both calls if two ranks make different calls, or the same calls in different orders. `hash`: of
  // the call's attributes and shapes. Comes before the collective calls that make a call site. Collective.
  Status CheckSameCall(const std::string& whole_name, uint64_t hash);

  // Whether every rank passes true. Collective.
  StatusOr<bool> AllTrue(bool own);

  // As the function above. Collective. Comes before calls that would wait for a rank that has failed.
  Status AllDone(const char* at, const Status& own) { return cuda::AllDone(at, own, AllGather(own.ok())); }

  // The failure after which all collective calls fail. Any thread.
  Status Failure() const;

  // As CallNccl, on the communicator. A call that has not ended by the timeout is a failure as above.
  Status Call(const char* name, std::function<ncclResult_t()> call);

  const NcclLibrary& nccl() const { return nccl_; }
  ncclComm_t nccl_comm() const { return nccl_comm_; }
  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  const std::vector<uint64_t>& processes() const { return processes_; }
  // Work enqueued here has ended when the next collective call returns.
  cudaStream_t stream() const { return exchange_.stream; }

 private:
  void Fail(const Status& failure);

  const NcclLibrary& nccl_;
  const ncclComm_t nccl_comm_;
  const double timeout_s_;
  const std::vector<uint64_t> processes_;
  int32_t rank_ = 0;
  int32_t size_ = 0;
  Exchange exchange_;

  mutable std::mutex failure_mutex_;
  Status failure_;
};

// Waits for the earlier work on `stream`, before the first collective call of a run: the timeout of the other ranks
// must not cover that work. The work may be long and may itself wait for peers, so the limit is many timeouts.
constexpr double kTimeoutsOfEarlierWork = 10;
Status WaitForEarlier(cudaStream_t stream, double timeout_s);

// The number of ranks of each node: consecutive ranks that address each other's memory. As on CPUs, every rank is a
// node of its own if the nodes would be uneven. `properties`: of the bootstrap's communicator. `name`: ranks with
// different names are on different nodes. Collective.
StatusOr<int32_t> FindRanksPerNode(Bootstrap& bootstrap, const ncclCommProperties_t& properties, uint64_t name);

}  // namespace jaxcomm::cuda
