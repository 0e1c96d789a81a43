// The GPUs of a group, and the key of jaxcomm's own communicator of them, by way of XLA's communicator.
//
// XLA destroys its communicators and makes them anew in ordinary programs, possibly at the same address (openxla/xla:
// AcquireGpuClique). So an ncclComm_t of XLA identifies nothing beyond the current run. The ranks exchange over it
// which GPUs they are, and the key of a communicator that XLA does not know.
//
// Not ncclCommSplit: it runs on XLA's communicator, which is blocking by default, so the wait for the other ranks would
// have no limit, and a rank that is missing would leave XLA's communicator amidst a collective call.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "cuda/nccl/bootstrap.h"
#include "cuda/nccl/nccl_library.h"
#include "cuda/program/assign_or_return.h"

namespace jaxcomm::cuda {

// A GPU: its process, and its number in that process.
struct Member {
  uint64_t process = 0;
  int32_t device = 0;

  bool operator<(const Member& other) const {
    return std::tie(process, device) < std::tie(other.process, other.device);
  }
  bool operator==(const Member& other) const { return process == other.process && device == other.device; }
};

// A number drawn by this process. A process that has restarted has another one.
uint64_t Incarnation();

class FirstContact {
 public:
  // `of_xla`: XLA's communicator of this run. `device`: the GPU of this rank.
  FirstContact(const NcclLibrary& nccl, ncclComm_t of_xla, int32_t device, double timeout_s)
      : nccl_(nccl), of_xla_(of_xla), device_(device), timeout_s_(timeout_s) {}

  // The group's GPUs, in rank order, with the incarnations of their processes. Collective.
  StatusOr<std::vector<Member>> Members();

  // A new key, the same on all ranks. After Members(). Collective.
  StatusOr<ncclUniqueId> Key();

  // As Bootstrap::AllDone, before there is one. Collective.
  Status AllDone(const char* at, const Status& own) { return cuda::AllDone(at, own, AllGather({uint64_t{own.ok()}})); }

  int32_t rank() const { return rank_; }  // after Members()

 private:
  // Gathers `own` from every rank. All ranks pass the same number of words.
  StatusOr<std::vector<uint64_t>> AllGather(const std::vector<uint64_t>& own);

  const NcclLibrary& nccl_;
  const ncclComm_t of_xla_;
  const int32_t device_;
  const double timeout_s_;
  int32_t rank_ = 0;
  int32_t size_ = 0;
};

}  // namespace jaxcomm::cuda
