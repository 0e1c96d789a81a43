// Which ranks of a communicator address each other's memory, and communicators of NCCL's for some of its ranks.
#pragma once

#include <nccl.h>
#include <nccl_device/core.h>

#include <cstdint>
#include <string>

#include "cuda/nccl/bootstrap.h"
#include "include/jaxcomm/comm.h"

namespace jaxcomm {
namespace cuda {

// The nodes of a communicator, as one rank sees them. They are of equal size, of ranks that follow each other.
struct Nodes {
  device::Team own;           // the ranks of this rank's node
  ncclComm_t comm = nullptr;  // of these ranks; with GIN, of all
  bool gin = false;           // kernels can reach other nodes, on all ranks, and nodes are what NCCL takes for them
};

// `properties`: of the bootstrap's communicator. `name`: ranks that have other names are of other nodes. `can_gin`:
// this process can. Collective. False: `error` is filled in.
bool FindNodes(Bootstrap& bootstrap, const ncclCommProperties_t& properties, uint64_t name, bool can_gin, Nodes* nodes,
               std::string* error);

// A communicator of the `count` ranks from `first` on, this one among them; other ranks make others at the same time.
// Collective for all ranks of the bootstrap, all of which get an error if one does. Blocking: waits for the ranks as
// long as NCCL does.
bool MakeSubCommunicator(Bootstrap& bootstrap, int32_t first, int32_t count, ncclComm_t* part, std::string* error);

}  // namespace cuda
}  // namespace jaxcomm
