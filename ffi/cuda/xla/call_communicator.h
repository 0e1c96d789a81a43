// The communicator of a call's group. XLA's leads to it; where XLA provides none, the call names the group's GPUs.
#pragma once

#include <cstdint>
#include <vector>

#include "common/status.h"
#include "cuda/runtime/own_communicators.h"
#include "cuda/xla/xla_collectives.h"

namespace jaxcomm {
namespace cuda {

// Stage Prepare, in every run: XLA locks the group's communicator for the run, and so orders the calls of all
// collectives on all ranks. `members`: of all groups, in the order of their ids; empty if the lowering expected
// communicators of XLA.
Status RequestCommunicator(const XlaCollectives& collectives, const DeviceGroups& groups,
                           const std::vector<Member>& members);
// Stage Initialize, in the first run of a call site only: a later run may have another communicator of XLA, but the
// call keeps its own. Collective.
StatusOr<Communicator*> GetCommunicator(const XlaCollectives& collectives, const DeviceGroups& groups,
                                        const std::vector<Member>& members, int32_t device);

}  // namespace cuda
}  // namespace jaxcomm
