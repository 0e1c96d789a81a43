// The ranks of one node in the emulation, with an arena that all calls of a series share.
#pragma once

#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

constexpr uint64_t kDeadlineNs = 1'000'000'000;
constexpr int64_t kArenaBytes = 1 << 20;

struct NodeGroup {
  NodeGroup(int32_t n, int32_t num_channels, uint64_t timeout_ns = kDeadlineNs, int64_t arena_bytes = kArenaBytes)
      : n(n), num_channels(num_channels), ranks(memory, {1, n, true, true}, num_channels, timeout_ns) {
    arena = {memory.Take(n * arena_bytes), arena_bytes};
  }

  device::Comm CommOf(int32_t rank) const {
    device::Comm comm = ranks.CommOfNode(rank);
    comm.arena = arena;
    comm.arena_bytes = arena.stride;
    return comm;
  }
  const device::Report& report(int32_t rank) const { return ranks.reports()[rank]; }

  HostMemory memory;
  const int32_t n, num_channels;
  const VirtualRanks ranks;
  device::Window arena;
};

}  // namespace cuda
}  // namespace jaxcomm
