// Counters of the device API in small kernels, emulated: waits without a signal, and counters in an arena. Tags,
// counts, values and waits for any of several: test_litmus_groups.cc.
#include <algorithm>
#include <vector>

#include "../../ffi/include/jaxcomm/device.h"
#include "../check.h"
#include "fakes/device_node.h"
#include "fakes/seed.h"

namespace jaxcomm {
namespace cuda {
namespace {

using device::Channel;

constexpr int32_t kTags = 3;

// The last rank never signals. All waits end, and a channel that has aborted sends and takes nothing, with any tag.
void TestMissingRank(uint64_t seed, int32_t kind) {
  const Node node(2, 2, 1, kTags);
  const device::Comm& comm = node.comms[0];
  emulation::Launch(1, 1, 1, seed, [&] {
    const auto source = [](int32_t i) { return device::Source{1, i}; };
    device::Polls polls;
    uint64_t value = 0;
    switch (kind) {
      case 0:
        CHECK(device::WaitAny(comm, 0, kTags, source, 42, 2) == -1);
        break;
      case 1:
        while (!device::TryWait(comm, Channel(0, 2), 1)) {
          if (device::MustStop(comm, Channel(0, 2), 1, 42, &polls)) break;
        }
        break;
      default:
        CHECK(!device::WaitValue(comm, Channel(0, 2), 1, 1, &value, 42));
    }
    const device::Report& report = *comm.report;
    CHECK(report.state == device::Report::kComplete && report.step == 42 && report.peer == 6 && report.channel == 0);
    CHECK(report.expected == 1 && report.seen == 0);
    // From now on a signal comes too late.
    for (int32_t tag = 0; tag < kTags; ++tag) {
      node.counters.pads[0] = 0;
      reinterpret_cast<uint64_t*>(node.counters.pads)[tag * 2 + 1] = 1;
      CHECK(!device::TryWait(comm, Channel(0, tag), 1) && !device::Wait(comm, Channel(0, tag), 1));
      CHECK(!device::WaitValue(comm, Channel(0, tag), 1, 1, &value));
      device::Polls again;
      CHECK(device::MustStop(comm, Channel(0, tag), 1, 1, &again));
      device::Signal(comm, Channel(0, tag), 1);
      device::SignalSet(comm, Channel(0, tag), 1, 9);
    }
    CHECK(device::WaitAny(comm, 0, kTags, source) == -1);
    const auto* const pad_of_peer = reinterpret_cast<uint64_t*>(node.counters.pads + node.counters.pad_bytes);
    CHECK(std::all_of(pad_of_peer, pad_of_peer + 2 * 2 * kTags, [](uint64_t count) { return count == 0; }));
    // Another channel.
    device::Signal(comm, Channel(1, 2), 1);
    CHECK(pad_of_peer[(kTags + 2) * 2] == 1);
  });
}

// Channels in an arena, more than the communicator has, beside the communicator's. Signals that a kernel has left on
// one of them do not satisfy waits on the other.
void TestOwnSignals(uint64_t seed, int32_t size) {
  constexpr int32_t kChannels = 6;
  const int64_t bytes = device::SignalsBytes(size, kChannels, kTags);
  const Node node(size, 1, bytes / 4 + 8);
  const int64_t guard = bytes / 4;
  for (int32_t r = 0; r < size; ++r) {
    for (int64_t i = 0; i < 4; ++i) node.At(r)[i] = node.At(r)[guard + 4 + i] = 0x5a5a5a5a;
  }
  std::vector<device::Comm> own;
  for (const device::Comm& comm : node.comms) own.push_back(device::WithSignals(comm, 16, kChannels, kTags));
  for (int launch = 0; launch < 2; ++launch) {
    emulation::Launch(1, size, kChannels * device::kWarpThreads, ++seed, [&] {
      const auto rank = static_cast<int32_t>(blockIdx.y);
      const auto channel = static_cast<int32_t>(threadIdx.x) / device::kWarpThreads;
      const int32_t next = (rank + 1) % size, prev = (rank + size - 1) % size;
      const device::ThreadGroup warp = device::OfWarp();
      for (int32_t tag = 0; tag < kTags; ++tag) {
        CHECK(device::Barrier(own[rank], Channel(channel, tag), 0, warp));
        device::Signal(own[rank], Channel(channel, tag), next, warp, 1 + static_cast<uint64_t>(channel));
      }
      CHECK(device::Barrier(node.comms[rank], 0));
      for (int32_t tag = 0; tag < kTags; ++tag) {
        CHECK(device::Wait(own[rank], Channel(channel, tag), prev, warp, 0, 1 + static_cast<uint64_t>(channel)));
      }
    });
  }
  for (int32_t r = 0; r < size; ++r) {
    for (int64_t i = 0; i < 4; ++i) CHECK(node.At(r)[i] == 0x5a5a5a5a && node.At(r)[guard + 4 + i] == 0x5a5a5a5a);
  }
  node.CheckNoReports();
}

TEST_CASE("a missing rank") {
  for (const int32_t kind : {0, 1, 2}) TestMissingRank(FirstSeed() + static_cast<uint64_t>(kind), kind);
}

TEST_CASE("counters in an arena") {
  for (const int32_t size : {2, 3, 6}) TestOwnSignals(FirstSeed() + static_cast<uint64_t>(size), size);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
