// The ncclComm_t of a group where XLA provides none: jaxlib up to 0.11.1.
//
// A group is identified by its GPUs, which the lowering writes into the call. Its processes exchange a key of NCCL's
// (ncclUniqueId) when they compile the call. The first run on a GPU makes the communicator, together with the group's
// other GPUs.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <vector>

#include "common/status.h"

namespace jaxcomm {
namespace cuda {

// A GPU: its process, and its number in that process.
struct Member {
  int32_t process = 0;
  int32_t device = 0;

  bool operator<(const Member& other) const {
    return process != other.process ? process < other.process : device < other.device;
  }
  bool operator==(const Member& other) const { return process == other.process && device == other.device; }
};

class OwnCommunicators {
 public:
  // Adds the key of a group that has GPUs of this process. The first key of a group is kept.
  static void Add(int32_t own_process, const std::vector<Member>& group, const ncclUniqueId& key);

  // The communicator of the GPU's group. The first call makes it, together with the group's other GPUs, and waits for
  // them no longer than the timeout. Its outcome is final, also an error. Each GPU of a process needs a thread of its
  // own.
  static StatusOr<ncclComm_t> Get(const std::vector<Member>& groups, int64_t group_size, int32_t device);
};

}  // namespace cuda
}  // namespace jaxcomm
