// Ranks of nodes that GIN connects, with an arena and one channel, in a program for memory_model.h.
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
  LitmusNodes(memory_model::Program& program, const std::vector<int32_t>& sizes, int64_t arena_bytes) {
    int32_t n = 0;
    for (const int32_t size : sizes) n += size;
    LitmusRanks world(program, n, 1);
    arena = world.Window(program, arena_bytes, "arena");
    registered = {arena.base, arena.stride};
    auto* const signals = program.Words<uint64_t>(n * NumGinSignals(1, n), "GIN signals");
    int32_t first = 0;
    for (const int32_t size : sizes) {
      LitmusRanks node(program, size, 1);
      for (int32_t local = 0; local < size; ++local) {
        const int32_t r = first + local;
        device::GinHandle gin;
        gin.comm = world.comm(r);
        gin.puts = program.Words<uint64_t>(1, "puts");
        gin.arena = &registered;
        device::Comm comm = node.comm(local);
        comm.world = gin.comm.world;
        comm.local = {local, size, first, 1};
        comm.report = gin.comm.report;
        comm.abort_flag = gin.comm.abort_flag;
        comm.arena = {arena.At(first), arena.stride};
        ncclDevComm nccl_comm;
        nccl_comm.rank = r;
        nccl_comm.signals = signals;
        nccl_comm.num_signals = static_cast<uint32_t>(NumGinSignals(1, n));
        nccl_comm.counters = program.Words<uint64_t>(NumGinCounters(1), "GIN counters");
        nccl_comm.arrivals = program.Words<uint64_t>(n, "arrivals");
        gins.push_back(gin);
        comms.push_back(comm);
        nccl_comms.push_back(nccl_comm);
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
