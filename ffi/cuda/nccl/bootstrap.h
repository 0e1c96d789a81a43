// First contact of the ranks of an ncclComm_t: small all-gathers through NCCL, before jaxcomm's own signals
// exist.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/nccl/nccl_library.h"

namespace jaxcomm {
namespace cuda {

// One per communicator, never deleted, as that is. One thread at a time.
//
// What is collective is called by all ranks, in the same order, and waits for them no longer than the timeout. If that
// fails here, others may have gone on, and the next word of theirs would be taken for the answer to another question:
// so all that comes after fails too.
class Bootstrap {
 public:
  Bootstrap(const NcclLibrary& nccl, ncclComm_t nccl_comm, double timeout_s)
      : nccl_(nccl), nccl_comm_(nccl_comm), timeout_s_(timeout_s) {}
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  // On the current device. Before all that is collective.
  bool Make(int32_t rank, int32_t size, std::string* error);

  // Gathers one word of every rank. Collective. False: `error` is filled in.
  bool AllGather(uint64_t own, std::vector<uint64_t>* all, std::string* error);

  // Whether all ranks have come with the same number. Collective. False: `error` says who has another.
  bool CheckEqual(const char* what, uint64_t own, std::string* error);

  // `all`: whether every rank can. Collective.
  bool AllTrue(bool own, bool* all, std::string* error);

  // Whether all ranks are done with what each does alone. Collective, and comes before what would wait for a rank that
  // is not. False: `error` is what is in it already if this one is not, else says who: "rank 2 of the group failed
  // <at>".
  bool AllDone(const char* at, bool own, std::string* error);

  // Empty, or what has failed: then there is nothing more to be had from other ranks. Any thread.
  std::string Failure() const;

  // Whether a call of NCCL on the communicator has succeeded, once it is over: XLA may have made it non-blocking.
  bool Check(const char* name, ncclResult_t result, std::string* error) const;

  const NcclLibrary& nccl() const { return nccl_; }
  ncclComm_t nccl_comm() const { return nccl_comm_; }
  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  double timeout_s() const { return timeout_s_; }
  // What is put here is over when a collective call returns.
  cudaStream_t stream() const { return stream_; }

 private:
  bool TryAllGather(uint64_t own, std::vector<uint64_t>* all, std::string* error);

  const NcclLibrary& nccl_;
  const ncclComm_t nccl_comm_;
  const double timeout_s_;
  int32_t rank_ = 0;
  int32_t size_ = 0;
  cudaStream_t stream_ = nullptr;
  uint64_t* words_ = nullptr;          // of the device: own word, then those of all ranks
  uint64_t* words_on_host_ = nullptr;  // those of all ranks

  mutable std::mutex mutex_;
  std::string failure_;
};

// Waits until what has been put on `stream` before is over, before a run's first collective call: or the deadlines of
// all ranks would count what each is still busy with. What is there ends: it may wait for what peers have put on their
// streams before they come here, as all ranks start the same programs in the same order, and kernels of ours abort.
bool WaitForEarlier(cudaStream_t stream, std::string* error);

}  // namespace cuda
}  // namespace jaxcomm
