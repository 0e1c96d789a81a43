// Ranks of nodes that GIN connects, with an arena, in a program for memory_model.h.
#pragma once

#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "litmus_gin.h"
#include "../../../ffi/include/jaxcomm/gin.h"
// clang-format on
#include "gin_nodes.h"
#include "litmus_ranks.h"

namespace jaxcomm {
namespace cuda {

struct LitmusNodes : LitmusRanks, GinNodes {
  LitmusNodes(memory_model::Program& program, int32_t num_nodes, int32_t ranks_per_node, int64_t arena_bytes,
              int32_t num_channels = 1)
      : LitmusRanks(program, num_nodes * ranks_per_node, num_channels, 0, num_nodes),
        GinNodes(memory_, ranks_, num_channels, (arena_bytes + 15) / 16 * 16),
        nccl_comms(NcclCommsOf(program, num_nodes * ranks_per_node, num_channels)) {}

  std::vector<ncclDevComm> nccl_comms;
};

}  // namespace cuda
}  // namespace jaxcomm
