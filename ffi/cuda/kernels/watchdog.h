// State that the watchdog thread reads: kernels of one thread before and after each round between nodes record it, in
// CUDA graphs too.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "include/jaxcomm/device.h"

namespace jaxcomm {
namespace device {

// Lies in memory that the host reads while kernels run.
struct WatchdogState {
  uint64_t count = 0;     // of what has begun or ended
  uint64_t call = 0;      // Comm::call_id of the one that is under way
  uint64_t round = 0;     // 1 + its number, 0: none is under way
  uint64_t held = 0;      // a round waits to be aborted, since a kernel has aborted on this GPU
  uint64_t aborting = 0;  // set by the host: nothing that comes from other nodes has a meaning any more
};

}  // namespace device

namespace cuda {

// Before a round. Where a kernel has aborted, of this communicator or another, what would be sent has no meaning:
// holds the stream until the host has begun to abort NCCL's communicator, at most for the timeout.
cudaError_t LaunchBegin(const device::Comm& comm, device::WatchdogState* state, uint64_t round, cudaStream_t stream);
// After it. If the host is aborting, nothing begins any more that might tell the node what has no meaning.
cudaError_t LaunchEnd(const device::Comm& comm, device::WatchdogState* state, cudaStream_t stream);
// As LoadKernel.
cudaError_t LoadWatchdog();

}  // namespace cuda
}  // namespace jaxcomm

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace cuda {

JAXCOMM_DEVICE void BeginRound(const device::Comm& comm, device::WatchdogState& state, uint64_t round) {
  constexpr uint64_t kHoldNs = 10'000'000;  // from the mark on, until NCCL has told its own kernels
  const uint64_t begin = device::NowNs();
  uint64_t aborted = 0;
  state.call = comm.call_id;
  for (bool told = false; device::LoadAcquire(comm.abort_flag) != 0; told = true) {
    if (!told) device::StoreRelease(&state.held, 1);
    const uint64_t now = device::NowNs();
    if (aborted == 0 && device::LoadAcquire(&state.aborting) != 0) aborted = now;
    if (now - begin > comm.timeout_ns || (aborted != 0 && now - aborted > kHoldNs)) break;
    device::Pause();
  }
  state.round = round;
  device::StoreRelease(&state.count, state.count + 1);
}

JAXCOMM_DEVICE void EndRound(const device::Comm& comm, device::WatchdogState& state) {
  if (device::LoadAcquire(&state.aborting) != 0) device::SetAbortFlag(comm);
  state.round = 0;
  device::StoreRelease(&state.count, state.count + 1);
}

}  // namespace cuda
}  // namespace jaxcomm
#endif
