// The ranks of one node, with an arena that all calls share, and LL slots: emulated, or on a GPU.
#pragma once

#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

constexpr uint64_t kDeadlineNs = 1'000'000'000;
constexpr int64_t kArenaBytes = 1 << 20;

template <typename M>
struct NodeGroupIn {
  NodeGroupIn(int32_t n, int32_t num_channels, uint64_t timeout_ns = kDeadlineNs, int64_t arena_bytes = kArenaBytes,
              int32_t num_units = 0)
      : n(n),
        num_channels(num_channels),
        ranks(memory, {1, n, true, true}, num_channels, timeout_ns),
        slots(memory, n, num_channels, num_units),
        arena{memory.Take(n * arena_bytes), arena_bytes} {}

  device::Comm CommOf(int32_t rank) const {
    device::Comm comm = ranks.CommOfNode(rank);
    comm.arena = arena;
    comm.arena_bytes = arena.stride;
    comm.ll_slots = slots.Of(rank);
    return comm;
  }
  device::Report& report(int32_t rank) const { return ranks.reports()[rank]; }

  M memory;
  const int32_t n, num_channels;
  const VirtualRanks ranks;
  const VirtualSlots slots;
  device::Window arena;
};
using NodeGroup = NodeGroupIn<HostMemory>;

}  // namespace cuda
}  // namespace jaxcomm
