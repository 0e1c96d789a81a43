// jaxcomm's communicators of groups of GPUs.
//
// A group has one communicator per process and rank. It is identified by its GPUs in rank order, each with the
// incarnation of its process: the same GPUs in another order are another group, and so are the GPUs of a process that
// has restarted. A communicator lives as long as the process. XLA's communicator of the group only leads to it
// (first_contact.h) and may be destroyed right after.
#pragma once

#include <nccl.h>

#include <cstdint>

#include "cuda/program/assign_or_return.h"
#include "cuda/runtime/communicator.h"

namespace jaxcomm::cuda {

// The communicator of the group whose communicator of XLA is `of_xla` in this run. Collective in any case: all ranks of
// the group call this for the same call site, each GPU of a process on a thread of its own. The first call for a group
// makes its communicator, and its outcome is final, also an error.
StatusOr<Communicator*> OwnCommunicator(ncclComm_t of_xla, int32_t device);

}  // namespace jaxcomm::cuda
