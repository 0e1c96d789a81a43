// Ranks of nodes that GIN connects, with an arena, in a program for memory_model.h.
#pragma once

#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "litmus_gin.h"
#include "../../../ffi/include/jaxcomm/gin.h"
// clang-format on
#include "../../../ffi/cuda/program/gin_args.h"
#include "litmus_ranks.h"

namespace jaxcomm {
namespace cuda {

struct LitmusNodes {
  // sizes: ranks of each node, whose numbers follow each other.
  LitmusNodes(memory_model::Program& program, const std::vector<int32_t>& sizes, int64_t arena_bytes,
              int32_t num_channels = 1) {
    int32_t n = 0;
    for (const int32_t size : sizes) n += size;
    LitmusRanks world(program, n, num_channels);
    arena = world.Window(program, arena_bytes, "arena");
    registered = {arena.base, arena.stride};
    nccl_comms = NcclCommsOf(program, n, num_channels);
    int32_t first = 0;
    for (const int32_t size : sizes) {
      LitmusRanks node(program, size, num_channels);
      for (int32_t local = 0; local < size; ++local) {
        const int32_t r = first + local;
        device::GinHandle gin;
        gin.comm = world.comm(r);
        gin.puts = program.Words<uint64_t>(num_channels, "puts");
        gin.arena = &registered;
        device::Comm comm = node.comm(local);
        comm.world = gin.comm.world;
        comm.local = {local, size, first, 1};
        comm.report = gin.comm.report;
        comm.abort_flag = gin.comm.abort_flag;
        comm.arena = {arena.At(first), arena.stride};
        comm.arena_bytes = arena.stride;
        gins.push_back(gin);
        comms.push_back(comm);
      }
      first += size;
    }
  }
  LitmusNodes(const LitmusNodes&) = delete;  // handles point to `registered`

  device::Window arena;
  ncclWindow_vidmem registered;
  std::vector<device::GinHandle> gins;  // by rank
  std::vector<device::Comm> comms;      // the same, of the node
  std::vector<ncclDevComm> nccl_comms;
};

}  // namespace cuda
}  // namespace jaxcomm
