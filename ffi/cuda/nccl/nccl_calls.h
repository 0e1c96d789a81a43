// Calls of NCCL that wait for other ranks, with a limit.
#pragma once

#include <functional>

#include "common/status.h"
#include "cuda/nccl/nccl_library.h"

namespace jaxcomm {
namespace cuda {

// The error of a call of NCCL; no error for ncclSuccess.
Status CheckNccl(const NcclLibrary& nccl, ncclComm_t nccl_comm, const char* name, ncclResult_t result);

// Waits until a call on the communicator has ended, and returns its outcome. ncclCommWindowRegister and
// ncclDevCommCreate return ncclSuccess while their work on a non-blocking communicator goes on, so the communicator is
// asked in any case.
Status WaitForNccl(const NcclLibrary& nccl, ncclComm_t nccl_comm, const char* name, ncclResult_t result,
                   double timeout_s);

// Makes a non-blocking communicator, together with the other ranks, on the current GPU. Aborts it if they do not come
// within the timeout.
StatusOr<ncclComm_t> MakeNcclComm(const NcclLibrary& nccl, const ncclUniqueId& key, int32_t size, int32_t rank,
                                  double timeout_s);

// The same for a blocking communicator. It is for sends and receives in every run: each group of calls on a
// non-blocking communicator would start a thread. NCCL does not bound the wait for the other ranks; after the timeout,
// the call goes on in its thread.
StatusOr<ncclComm_t> MakeBlockingNcclComm(const NcclLibrary& nccl, const ncclUniqueId& key, int32_t size, int32_t rank,
                                          double timeout_s);

// Starts ncclCommAbort, which may wait for the GPU.
void AbortNcclComm(const NcclLibrary& nccl, ncclComm_t nccl_comm);

// Starts ncclCommRevoke: kernels and threads of NCCL stop to wait for peers. Frees nothing, so kernels in flight may
// still use windows.
void RevokeNcclComm(const NcclLibrary& nccl, ncclComm_t nccl_comm);

}  // namespace cuda
}  // namespace jaxcomm
