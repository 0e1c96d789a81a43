// State that the watchdog thread reads, and the kernels that write it. Kernels of one thread record it before and after
// each round between nodes, also in CUDA graphs.
#pragma once

#include <cstdint>

#include "include/jaxcomm/device.h"

namespace jaxcomm {
namespace device {

// Resides in memory that the host reads while kernels run.
struct WatchdogState {
  uint64_t count = 0;     // number of times that a round has begun or ended
  uint64_t call = 0;      // Comm::call_id of the round's call
  uint64_t round = 0;     // 1 + number of the current round; 0: none
  uint64_t held = 0;      // 1: a round waits for the host to abort, since a kernel has aborted on this GPU
  uint64_t aborting = 0;  // set by the host: all data from other nodes is undefined from now on
};

}  // namespace device
}  // namespace jaxcomm

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace cuda {

JAXCOMM_DEVICE void BeginRound(const device::Comm& comm, device::WatchdogState& state, uint64_t round) {
  constexpr uint64_t kHoldNs = 10'000'000;  // after `aborting` is set: NCCL needs time to notify its own kernels
  const uint64_t begin = device::NowNs();
  uint64_t aborted = 0;
  device::StoreRelease(&state.call, comm.call_id);  // the watchdog may read it at any time
  for (bool reported = false; device::LoadAcquire(comm.abort_flag) != 0; reported = true) {
    if (!reported) device::StoreRelease(&state.held, 1);
    const uint64_t now = device::NowNs();
    if (aborted == 0 && device::LoadAcquire(&state.aborting) != 0) aborted = now;
    if (now - begin > comm.timeout_ns || (aborted != 0 && now - aborted > kHoldNs)) break;
    device::Pause();
  }
  device::StoreRelease(&state.round, round);
  device::StoreRelease(&state.count, state.count + 1);
}

JAXCOMM_DEVICE void EndRound(const device::Comm& comm, device::WatchdogState& state) {
  if (device::LoadAcquire(&state.aborting) != 0) device::SetAbortFlag(comm);
  device::StoreRelease(&state.round, 0);
  device::StoreRelease(&state.count, state.count + 1);
}

}  // namespace cuda
}  // namespace jaxcomm
#endif
