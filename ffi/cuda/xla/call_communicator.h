// The ncclComm_t of a call's group: XLA's, or one of OwnCommunicators where XLA provides none.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <vector>

#include "common/status.h"
#include "cuda/runtime/own_communicators.h"
#include "cuda/xla/xla_collectives.h"

namespace jaxcomm {
namespace cuda {

// Stage Prepare. `members`: of all groups, in the order of their ids; empty if the lowering expected communicators of
// XLA.
Status RequestCommunicator(const XlaCollectives& collectives, const DeviceGroups& groups,
                           const std::vector<Member>& members);
// Stage Initialize.
StatusOr<ncclComm_t> GetCommunicator(const XlaCollectives& collectives, const DeviceGroups& groups,
                                     const std::vector<Member>& members, int32_t device);

}  // namespace cuda
}  // namespace jaxcomm
