// What the hosts of an ncclComm_t's ranks tell each other, by NCCL rather than by signals of our own, which this is
// there to set up.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "nccl_library.h"

namespace jaxcomm {
namespace cuda {

// One per communicator, never deleted, as that is. One thread at a time.
//
// What is collective is called by all ranks, in the same order, and waits for them no longer than the timeout.
class Exchange {
 public:
  Exchange(const NcclLibrary& nccl, ncclComm_t nccl_comm, double timeout_s)
      : nccl_(nccl), nccl_comm_(nccl_comm), timeout_s_(timeout_s) {}
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // On the current device. Before all that is collective.
  bool Make(int32_t rank, int32_t size, std::string* error);

  // A word of every rank. Collective. False: `error` is filled in.
  bool Gather(uint64_t own, std::vector<uint64_t>* all, std::string* error);

  // Whether all ranks have come with the same number. Collective. False: `error` says who has another.
  bool Agree(const char* what, uint64_t own, std::string* error);

  // `all`: whether every rank can. Collective.
  bool AllCan(bool own, bool* all, std::string* error);

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
  bool WaitForStream(std::string* error);

  const NcclLibrary& nccl_;
  const ncclComm_t nccl_comm_;
  const double timeout_s_;
  int32_t rank_ = 0;
  int32_t size_ = 0;
  cudaStream_t stream_ = nullptr;
  uint64_t* words_ = nullptr;          // of the device: own word, then those of all ranks
  uint64_t* words_on_host_ = nullptr;  // those of all ranks
};

}  // namespace cuda
}  // namespace jaxcomm
