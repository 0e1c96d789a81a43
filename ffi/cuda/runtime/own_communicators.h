// The ncclComm_t of a group where XLA provides none: jaxlib up to 0.11.1.
//
// A group is identified by its GPUs, which the lowering writes into the call. Its processes exchange a key of NCCL's
// (ncclUniqueId) when they compile the call. The first run on a GPU makes the communicator, together with the group's
// other GPUs.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <string>
#include <vector>

namespace jaxcomm {
namespace cuda {

// A GPU: its process, and its number there.
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
  // For groups of GPUs that this process shares. What has been said of a group first is kept.
  static void Add(int32_t own_process, const std::vector<Member>& group, const ncclUniqueId& key);

  // Of the group that the GPU is in. Made at the first call, which waits for the group's other GPUs, no longer than the
  // timeout; what comes of it is final. Every GPU of a process must come in a thread of its own. Empty, or what is
  // wrong.
  static std::string Get(const std::vector<Member>& groups, int64_t group_size, int32_t device, ncclComm_t* nccl_comm);
};

}  // namespace cuda
}  // namespace jaxcomm
