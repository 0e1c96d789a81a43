// Limits on the thread blocks of a launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/channels.h"

namespace jaxcomm::cuda {

// Thread blocks of other streams, XLA's NCCL collectives first of all, that may have to run while jaxcomm's kernels
// wait for their peers. NCCL's kernels have 16 to 32 thread blocks on most machines and at most 64; blocks without an
// SM begin when others end.
constexpr int32_t kSmsOfOthers = 32;
// The channels of the two lanes of a group (Communicator::AsynchronousLane).
struct LaneChannels {
  int32_t synchronous = 1;
  int32_t asynchronous = 1;
};

// `num_sms`: of the smallest GPU of the group. `limit`: JAXCOMM_MAX_SMS. A kernel of each lane and the kernels of
// others may wait for their peers at the same time. If they had more thread blocks than there are SMs, ranks could
// block each other. GPUs with fewer than 34 SMs can't be protected in this way.
inline LaneChannels MaxChannels(int64_t num_sms, int32_t limit) {
  const int64_t free = num_sms - kSmsOfOthers;
  const int64_t most = std::max(limit, 1);
  LaneChannels channels;
  channels.asynchronous =
      static_cast<int32_t>(std::clamp<int64_t>(free / 4, 1, std::min<int64_t>(most, kAsynchronousChannels)));
  channels.synchronous = static_cast<int32_t>(std::clamp<int64_t>(free - channels.asynchronous, 1, most));
  return channels;
}

}  // namespace jaxcomm::cuda
