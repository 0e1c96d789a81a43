// Nodes of a communicator (ranks that address each other's memory), and NCCL communicators for some of its ranks.
#pragma once

#include <cstdint>

#include "common/status.h"
#include "cuda/nccl/bootstrap.h"
#include "include/jaxcomm/comm.h"

namespace jaxcomm {
namespace cuda {

// The nodes of a communicator, seen from one rank. All nodes have the same size, and their ranks are consecutive.
struct Nodes {
  device::Team own;           // the ranks of this rank's node
  ncclComm_t comm = nullptr;  // of these ranks; with GIN, of all ranks
  bool gin = false;           // on all ranks, kernels can reach other nodes, and the nodes are NCCL's LSA teams
};

// `properties`: of the bootstrap's communicator. `name`: ranks with different names are on different nodes. `can_gin`:
// this process can use GIN. Collective.
StatusOr<Nodes> FindNodes(Bootstrap& bootstrap, const ncclCommProperties_t& properties, uint64_t name, bool can_gin);

// A communicator of the `count` ranks from `first` on, which include this rank. The other ranks make theirs at the same
// time. Collective for all ranks of the bootstrap: if one rank fails, all return an error.
StatusOr<ncclComm_t> MakeSubCommunicator(Bootstrap& bootstrap, int32_t first, int32_t count);

}  // namespace cuda
}  // namespace jaxcomm
