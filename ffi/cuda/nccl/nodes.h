// The nodes of a communicator.
#pragma once

#include <cstdint>

#include "common/status.h"
#include "cuda/nccl/bootstrap.h"

namespace jaxcomm {
namespace cuda {

// The number of ranks of each node: consecutive ranks that address each other's memory. As on CPUs, every rank is a
// node of its own if the nodes would be uneven. `properties`: of the bootstrap's communicator. `name`: ranks with
// different names are on different nodes. Collective.
StatusOr<int32_t> FindRanksPerNode(Bootstrap& bootstrap, const ncclCommProperties_t& properties, uint64_t name);

}  // namespace cuda
}  // namespace jaxcomm
