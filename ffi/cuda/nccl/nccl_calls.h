// Calls of NCCL that wait for other ranks, with a limit.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/status.h"
#include "cuda/nccl/nccl_library.h"

namespace jaxcomm::cuda {

// The error of a call of NCCL; no error for ncclSuccess.
Status CheckNccl(const NcclLibrary& nccl, ncclComm_t nccl_comm, const char* name, ncclResult_t result);

// Runs a call that may wait for other ranks on a thread of its own, on the current GPU, and returns its outcome. After
// the timeout, NCCL goes on in that thread, so `call` must own what it uses, and no other call on the communicator may
// begin. The failure of a process ends the wait too, as FailureOf(processes).
//
// Not a non-blocking communicator: an error, such as that of a network without strong signals, would make it unusable
// for good, also for the exchange in which the ranks agree on the error.
Status CallNccl(const NcclLibrary& nccl, ncclComm_t nccl_comm, const char* name, std::function<ncclResult_t()> call,
                double timeout_s, const std::vector<uint64_t>& processes);

// Makes a communicator, together with the other ranks, on the current GPU.
StatusOr<ncclComm_t> MakeNcclComm(const NcclLibrary& nccl, const ncclUniqueId& key, int32_t size, int32_t rank,
                                  double timeout_s, const std::vector<uint64_t>& processes);

// Starts ncclCommRevoke: kernels and calls of NCCL stop waiting for peers. Frees nothing, so kernels in flight may
// still use windows.
void RevokeNcclComm(const NcclLibrary& nccl, ncclComm_t nccl_comm);

}  // namespace jaxcomm::cuda
