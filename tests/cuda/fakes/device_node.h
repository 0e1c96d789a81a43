// The ranks of one node for kernels that use only the device API, emulated.
#pragma once

#include <vector>

#include "node_group.h"

namespace jaxcomm {
namespace cuda {

// Every fourth rank of a larger group, with a window of `count` words each, which is also the arena, and LL slots for a
// unit.
struct Node : NodeGroup {
  Node(int32_t size, int32_t num_channels, int64_t count, int32_t num_tags = 1)
      : NodeGroup(size, num_channels * num_tags, 10'000'000, count * 4, 1),
        counters(ranks.intra_node()),
        reports(ranks.reports()),
        window(arena) {
    for (int32_t r = 0; r < size; ++r) {
      comms.push_back(CommOf(r));
      device::Comm& comm = comms.back();
      comm.world = {2 + 4 * r, 4 * size, 0, 1};
      comm.local = {r, size, 2, 4};
      comm.signals.num_channels = num_channels;
      comm.signals.num_tags = num_tags;
      comm.call_id = 7;
    }
  }
  uint32_t* At(int32_t rank) const { return window.At<uint32_t>(rank); }
  void CheckNoReports() const {
    for (size_t r = 0; r < comms.size(); ++r) CHECK(reports[r].state == device::Report::kNone);
  }

  const Counters& counters;
  device::Report* const reports;
  const device::Window window;
  std::vector<device::Comm> comms;
};

}  // namespace cuda
}  // namespace jaxcomm
