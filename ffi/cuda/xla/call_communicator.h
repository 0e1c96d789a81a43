// The ncclComm_t of a call's group: XLA's, or, where XLA provides none, one of OwnCommunicators.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/runtime/own_communicators.h"
#include "cuda/xla/xla_collectives.h"

namespace jaxcomm {
namespace cuda {

// Stages Prepare and Initialize. `members`: of all groups, in the order of their ids; empty if the lowering counted on
// XLA. Empty, or what is wrong.
std::string RequestCommunicator(const XlaCollectives& collectives, const DeviceGroups& groups,
                                const std::vector<Member>& members);
std::string GetCommunicator(const XlaCollectives& collectives, const DeviceGroups& groups,
                            const std::vector<Member>& members, int32_t device, ncclComm_t* nccl_comm);

}  // namespace cuda
}  // namespace jaxcomm
