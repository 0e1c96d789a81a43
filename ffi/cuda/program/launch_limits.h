// Limits on the thread blocks of a launch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace jaxcomm {
namespace cuda {

// Thread blocks of other streams, XLA's NCCL collectives first of all, that may have to run while jaxcomm's kernels
// wait for their peers. NCCL's kernels have 16 to 32 thread blocks on most machines and at most 64; blocks without an
// SM begin when others end.
constexpr int32_t kSmsOfOthers = 32;
// The small kernels of send_recv_proxy.h.
constexpr int32_t kSmsOfProxies = 2;

// The channels of a group whose smallest GPU has `num_sms` SMs. If jaxcomm's kernels took all SMs, ranks could block
// each other. `limit`: JAXCOMM_MAX_SMS.
inline int32_t MaxChannels(int64_t num_sms, int32_t limit) {
  return static_cast<int32_t>(std::clamp<int64_t>(num_sms - kSmsOfOthers - kSmsOfProxies, 1, std::max(limit, 1)));
}

}  // namespace cuda
}  // namespace jaxcomm
