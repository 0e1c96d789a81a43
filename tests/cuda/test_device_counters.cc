// Counters of the device API in small kernels, emulated: tags, waits for any of several, values, and counters in an
// arena.
#include <algorithm>
#include <random>
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

// Each rank sends its peers a word per tag, in an order of tags of its own, and takes what comes in another one. Word
// [tag][sender] of the window; the next round overwrites it after a barrier.
void TestTags(uint64_t seed, int32_t size, int32_t channels) {
  const Node node(size, channels, int64_t{channels} * kTags * size, kTags);
  emulation::Launch(channels, size, 2, seed, [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y), channel = static_cast<int32_t>(blockIdx.x);
    const device::Comm& comm = node.comms[rank];
    const auto place = [&](int32_t tag, int32_t from) { return (channel * kTags + tag) * size + from; };
    const auto value = [&](int32_t round, int32_t tag, int32_t from) {
      return static_cast<uint32_t>(((round * 8 + channel) * 8 + tag) * 8 + from);
    };
    for (int32_t round = 1; round <= 4; ++round) {
      if (threadIdx.x == 0) {
        for (int32_t k = 0; k < kTags; ++k) {
          const int32_t tag = (k + rank) % kTags;
          for (int32_t peer = 0; peer < size; ++peer) {
            if (peer == rank) continue;
            node.At(peer)[place(tag, rank)] = value(round, tag, rank);
            device::Signal(comm, Channel(channel, tag), peer);
          }
        }
      } else {
        for (int32_t k = 0; k < kTags; ++k) {
          const int32_t tag = (2 * k + 1 + round) % kTags;
          for (int32_t peer = 0; peer < size; ++peer) {
            if (peer == rank) continue;
            CHECK(device::Wait(comm, Channel(channel, tag), peer));
            CHECK(node.At(rank)[place(tag, peer)] == value(round, tag, peer));
          }
        }
      }
      CHECK(device::Barrier(comm, Channel(channel, round % kTags)));
    }
  });
  node.CheckNoReports();
}

// Each rank sends four words to the next one with three signals, one of which counts for two. The next one waits for
// all at once, or for the first and then for the rest.
void TestCounts(uint64_t seed, int32_t size) {
  const Node node(size, 1, 8, 2);
  emulation::Launch(1, size, 1, seed, [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y);
    const device::Comm& comm = node.comms[rank];
    const int32_t next = (rank + 1) % size, prev = (rank + size - 1) % size;
    for (uint32_t round = 1; round <= 3; ++round) {
      for (uint32_t i = 0; i < 4; ++i) {
        node.At(next)[i] = 10 * round + i;
        if (i != 1) device::Signal(comm, 0, next, i == 2 ? 2 : 1);
      }
      if (round % 2 == 0) {
        CHECK(device::Wait(comm, 0, prev, 0, 4));
      } else {
        CHECK(device::Wait(comm, 0, prev) && node.At(rank)[0] == 10 * round);
        device::Polls polls;
        while (!device::TryWait(comm, 0, prev, 3)) CHECK(!device::MustStop(comm, 0, prev, 0, &polls));
      }
      for (uint32_t i = 0; i < 4; ++i) CHECK(node.At(rank)[i] == 10 * round + i);
      CHECK(!device::TryWait(comm, 0, prev));
      CHECK(device::Barrier(comm, Channel(0, 1)));
    }
  });
  node.CheckNoReports();
}

// Rank 0 takes items from all others as they come, each with its tag. A slot of a rank has one item at a time: rank 0
// signals that it has read it.
void TestAny(uint64_t seed, int32_t size) {
  constexpr uint32_t kItems = 5;
  const Node node(size, 1, 2 * size, 2);
  std::vector<uint32_t> num_taken(2 * size);
  emulation::Launch(1, size, 1, seed, [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y);
    const device::Comm& comm = node.comms[rank];
    if (rank != 0) {
      for (uint32_t item = 0; item < kItems; ++item) {
        for (const int32_t tag : {0, 1}) {
          if (item > 0) CHECK(device::Wait(comm, Channel(0, tag), 0));
          node.At(0)[2 * rank + tag] = 100 * item + 2 * static_cast<uint32_t>(rank) + static_cast<uint32_t>(tag);
          device::Signal(comm, Channel(0, tag), 0);
        }
      }
      return;
    }
    const auto source = [](int32_t i) { return device::Source{1 + i / 2, i % 2}; };
    const int32_t num = 2 * (size - 1);
    int32_t first = 0;
    for (uint32_t taken = 0; taken < kItems * static_cast<uint32_t>(num); ++taken) {
      const int32_t i = device::WaitAny(comm, 0, num, source, 0, first);
      CHECK(i >= 0 && i < num);
      const device::Source from = source(i);
      const int32_t slot = 2 * from.peer + from.tag;
      CHECK(node.At(0)[slot] == 100 * num_taken[slot] + static_cast<uint32_t>(slot));
      if (++num_taken[slot] < kItems) device::Signal(comm, Channel(0, from.tag), from.peer);
      first = (i + 1) % num;
    }
  });
  for (size_t slot = 2; slot < num_taken.size(); ++slot) CHECK(num_taken[slot] == kItems);
  node.CheckNoReports();
}

// Each rank writes a number of words to every peer and sets a value that contains the number and the round.
void TestValues(uint64_t seed, int32_t size) {
  constexpr uint64_t kMost = 4;
  const Node node(size, 1, size * static_cast<int64_t>(kMost), 2);
  const auto num_words = [](uint64_t round, int32_t from, int32_t to) {
    return (round * 3 + static_cast<uint64_t>(from) + 2 * static_cast<uint64_t>(to)) % (kMost + 1);
  };
  emulation::Launch(1, size, 1, seed, [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y);
    const device::Comm& comm = node.comms[rank];
    for (uint64_t round = 1; round <= 4; ++round) {
      for (int32_t peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        const uint64_t count = num_words(round, rank, peer);
        for (uint64_t i = 0; i < count; ++i) node.At(peer)[rank * kMost + i] = static_cast<uint32_t>(10 * round + i);
        device::SignalSet(comm, Channel(0, 1), peer, round << 32 | count);
      }
      for (int32_t peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        uint64_t value = 0;
        CHECK(device::WaitValue(comm, Channel(0, 1), peer, round << 32, &value));
        CHECK(value == (round << 32 | num_words(round, peer, rank)));
        for (uint64_t i = 0; i < (value & 0xffffffff); ++i) CHECK(node.At(rank)[peer * kMost + i] == 10 * round + i);
      }
      CHECK(device::Barrier(comm, 0));
    }
  });
  node.CheckNoReports();
}

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

template <typename F>
void ForAllSizes(F f) {
  uint64_t seed = FirstSeed();
  for (const int32_t size : {2, 3, 6}) {
    for (int repeat = 0; repeat < 5; ++repeat) f(seed += 10, size);
  }
}

TEST_CASE("several counters per peer") {
  ForAllSizes([](uint64_t seed, int32_t size) {
    for (const int32_t channels : {1, 3}) TestTags(seed + channels, size, channels);
  });
}

TEST_CASE("signals that add more than one") { ForAllSizes(TestCounts); }

TEST_CASE("any of several") { ForAllSizes(TestAny); }

TEST_CASE("signals that set a value") { ForAllSizes(TestValues); }

TEST_CASE("a missing rank") {
  for (const int32_t kind : {0, 1, 2}) TestMissingRank(FirstSeed() + static_cast<uint64_t>(kind), kind);
}

TEST_CASE("counters in an arena") { ForAllSizes(TestOwnSignals); }

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
