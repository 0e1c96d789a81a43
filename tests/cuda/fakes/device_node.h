// The ranks of one node for kernels that use only the device API, emulated.
#pragma once

#include <cstdint>
#include <vector>

#include "virtual_ll.h"

namespace jaxcomm {
namespace cuda {

// Every fourth rank of a larger group, with a window of `count` words each, which is also the arena, and LL slots for a
// unit.
struct Node {
  Node(int32_t size, int32_t num_channels, int64_t count, int32_t num_tags = 1)
      : counters(MakeCounters(memory, size, size, num_channels * num_tags)),
        slots(memory, size, num_channels, 1),
        reports(memory.Upload(std::vector<device::Report>(size))),
        window({memory.Take(size * count * 4), count * 4}) {
    for (int32_t r = 0; r < size; ++r) {
      device::Comm comm;
      comm.world = {2 + 4 * r, 4 * size, 0, 1};
      comm.local = {r, size, 2, 4};
      comm.signals.pad = {counters.pads, counters.pad_bytes};
      comm.signals.sent = counters.sent[r];
      comm.signals.received = counters.received[r];
      comm.signals.num_channels = num_channels;
      comm.signals.num_tags = num_tags;
      comm.ll_slots = slots.Of(r);
      comm.arena = window;
      comm.arena_bytes = count * 4;
      comm.timeout_ns = 10'000'000;
      comm.report = reports + r;
      comm.abort_flag = memory.Upload(std::vector<uint64_t>(1));
      comm.call_id = 7;
      comms.push_back(comm);
    }
  }
  uint32_t* At(int32_t rank) const { return window.At<uint32_t>(rank); }
  void CheckNoReports() const {
    for (size_t r = 0; r < comms.size(); ++r) CHECK(reports[r].state == device::Report::kNone);
  }

  HostMemory memory;
  Counters counters;
  VirtualSlots slots;
  device::Report* reports;
  device::Window window;
  std::vector<device::Comm> comms;
};

}  // namespace cuda
}  // namespace jaxcomm
