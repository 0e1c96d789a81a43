// jaxcomm's communicators of groups of GPUs.
//
// A group has one communicator per process and rank. It is identified by its GPUs in rank order, each with the
// incarnation of its process: the same GPUs in another order are another group, and so are the GPUs of a process that
// has restarted. A communicator lives as long as the process. XLA's communicator of the group only leads to it
// (first_contact.h) and may be destroyed right after. Where XLA provides none (jaxlib up to 0.11.1), the lowering
// writes the group's GPUs into the call, and its processes exchange a key of NCCL's when they compile the call.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <vector>

#include "common/status.h"
#include "cuda/nccl/first_contact.h"
#include "cuda/runtime/communicator.h"

namespace jaxcomm {
namespace cuda {

// Each GPU of a process needs a thread of its own. The first call for a group makes its communicator, together with the
// group's other GPUs. Its outcome is final, also an error.
class OwnCommunicators {
 public:
  // The communicator of the group whose communicator of XLA is `of_xla` in this run. Collective in any case: all ranks
  // of the group call this for the same call site.
  static StatusOr<Communicator*> Get(ncclComm_t of_xla, int32_t device);

  // Where XLA provides no communicators. `Member::process` is the number of the process. Add() sets the key of a group
  // that has GPUs of this process; the first key of a group is kept.
  static void Add(int32_t own_process, const std::vector<Member>& group, const ncclUniqueId& key);
  static StatusOr<Communicator*> Get(const std::vector<Member>& groups, int64_t group_size, int32_t device);
};

}  // namespace cuda
}  // namespace jaxcomm
