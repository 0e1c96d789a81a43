// Ranks of nodes that GIN connects, with an arena. A fake of GIN and gin.h must be included before this file.
#pragma once

#include <vector>

#include "gin_names.h"
#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

struct GinNodes {
  GinNodes(Memory& memory, const VirtualRanks& ranks, int32_t num_channels, int64_t arena_bytes)
      : arenas{memory.Take(ranks.n() * arena_bytes + 16) + 16, arena_bytes}, registered{arenas.base, arenas.stride} {
    for (int32_t r = 0; r < ranks.n(); ++r) {
      device::Comm comm = ranks.CommOfNode(r);
      comm.arena = {arenas.At(comm.local.first), arena_bytes};
      comm.arena_bytes = arena_bytes;
      comms.push_back(comm);
      device::GinHandle handle;
      handle.comm = comm;
      handle.comm.local = comm.world;
      handle.comm.signals = {};
      handle.comm.signals.received = memory.Upload(std::vector<uint64_t>(ranks.n() * num_channels));
      handle.puts = memory.Upload(std::vector<uint64_t>(num_channels));
      handle.arena = &registered;
      handles.push_back(handle);
    }
  }
  GinNodes(const GinNodes&) = delete;  // handles point to `registered`

  const device::Window arenas;  // of all ranks
  ncclWindow_vidmem registered;
  std::vector<device::Comm> comms;  // of the node, by rank
  std::vector<device::GinHandle> handles;
};

}  // namespace cuda
}  // namespace jaxcomm
