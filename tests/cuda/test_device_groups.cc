// Thread groups of the device API in small kernels, emulated: warps, and several warps with a named barrier.
#include <random>
#include <vector>

#include "../../ffi/include/jaxcomm/device.h"
#include "../check.h"
#include "fakes/device_node.h"
#include "fakes/seed.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int32_t kWarp = device::kWarpThreads;

uint32_t Value(int32_t round, int32_t channel, int32_t rank, int64_t i) {
  return static_cast<uint32_t>(((round * 16 + channel) * 8 + rank) * 100 + i);
}

// A group of the kernel, and the number of its channel.
struct Part {
  device::ThreadGroup threads;
  int32_t channel = 0;
};

// Each warp.
struct Warps {
  static int32_t PerBlock(unsigned threads) { return (static_cast<int32_t>(threads) + kWarp - 1) / kWarp; }
  static Part Own() {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    return {device::OfWarp(), static_cast<int32_t>(blockIdx.x) * PerBlock(blockDim.x) + thread / kWarp};
  }
};

// The first warp, and all others.
struct TwoGroups {
  static int32_t PerBlock(unsigned) { return 2; }
  static Part Own() {
    const auto warps = static_cast<int32_t>(blockDim.x) / kWarp;
    const bool first = static_cast<int32_t>(threadIdx.x) < kWarp;
    return {first ? device::OfWarps(0, 1, 15) : device::OfWarps(1, warps - 1, 1),
            2 * static_cast<int32_t>(blockIdx.x) + (first ? 0 : 1)};
  }
};

// Each group is a channel. It puts to all peers and reads after a barrier; then it passes blocks along a ring. Groups
// of a block never wait for each other.
template <typename Parts>
void TestGroups(uint64_t seed, int32_t size, int32_t blocks, unsigned threads) {
  constexpr int64_t kCount = 9;
  const int32_t channels = blocks * Parts::PerBlock(threads);
  const Node node(size, channels, channels * size * kCount);
  emulation::Launch(blocks, size, threads, seed, [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y);
    const device::Comm& comm = node.comms[rank];
    const auto [group, channel] = Parts::Own();
    const int32_t next = (rank + 1) % size, prev = (rank + size - 1) % size;
    const auto place = [&, c = channel](int32_t block) { return (c * size + block) * kCount; };
    const auto check = [&, c = channel, g = group](int32_t round, int32_t block) {
      for (int64_t i = g.rank; i < kCount; i += g.size)
        CHECK(node.At(rank)[place(block) + i] == Value(round, c, block, i));
    };
    for (int32_t round = 0; round < 3; ++round) {
      uint32_t values[kCount];
      for (int64_t i = 0; i < kCount; ++i) values[i] = Value(round, channel, rank, i);
      for (int32_t peer = 0; peer < size; ++peer) {
        device::Put(node.window, peer, place(rank) * 4, values, sizeof(values), group);
      }
      CHECK(device::Barrier(comm, channel, 0, group));
      for (int32_t r = 0; r < size; ++r) check(round, r);
      CHECK(device::Barrier(comm, channel, 0, group));
    }
    for (int64_t i = group.rank; i < kCount; i += group.size)
      node.At(rank)[place(rank) + i] = Value(3, channel, rank, i);
    device::Sync(group);
    for (int32_t s = 0; s + 1 < size; ++s) {
      const int32_t block = (rank + size - s) % size;
      device::PutSignal(comm, channel, node.window, next, place(block) * 4, node.At(rank) + place(block), kCount * 4,
                        group);
      CHECK(device::Wait(comm, channel, prev, group));
      check(3, (prev + size - s) % size);
    }
  });
  node.CheckNoReports();
}

// The last rank is missing. All threads of all groups return false, and one of each rank reports.
template <typename Parts>
void TestMissingRank(uint64_t seed, int32_t size, int32_t blocks, unsigned threads) {
  const int32_t channels = blocks * Parts::PerBlock(threads);
  const Node node(size, channels, 1);
  for (const bool barrier : {true, false}) {
    emulation::Launch(blocks, size - 1, threads, ++seed, [&] {
      const device::Comm& comm = node.comms[blockIdx.y];
      const auto [group, channel] = Parts::Own();
      CHECK(!(barrier ? device::Barrier(comm, channel, 42, group) : device::Wait(comm, channel, size - 1, group, 42)));
    });
  }
  for (int32_t r = 0; r + 1 < size; ++r) {
    const device::Report& report = node.reports[r];
    CHECK(report.state == device::Report::kComplete && report.step == 42 && report.peer == 2 + 4 * (size - 1));
    CHECK(report.channel >= 0 && report.channel < channels && report.expected == 1 && report.seen == 0);
  }
}

TEST_CASE("groups of a block, each with a channel") {
  uint64_t seed = FirstSeed();
  for (const int32_t size : {2, 3}) {
    for (const int32_t blocks : {1, 2}) {
      for (const unsigned threads : {1u, 2u, 5u, 8u}) {
        for (int repeat = 0; repeat < 3; ++repeat) TestGroups<Warps>(++seed, size, blocks, threads);
      }
      for (const unsigned threads : {4u, 8u}) {
        for (int repeat = 0; repeat < 3; ++repeat) TestGroups<TwoGroups>(++seed, size, blocks, threads);
      }
    }
  }
}

TEST_CASE("a missing rank") {
  uint64_t seed = FirstSeed();
  for (const int32_t size : {2, 3}) {
    for (const unsigned threads : {1u, 5u}) TestMissingRank<Warps>(seed += 2, size, 2, threads);
    TestMissingRank<TwoGroups>(seed += 2, size, 2, 6);
  }
}

TEST_CASE("whether a value is true in a thread of the group") {
  emulation::Launch(1, 1, 9, FirstSeed(), [&] {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    for (int32_t k = 0; k < 9; ++k) {
      const bool own = thread == k;
      CHECK(device::AnyOf(device::OfThread(), own) == own);
      CHECK(device::AnyOf(device::OfWarp(), own) == (thread / kWarp == k / kWarp));
      CHECK(device::AnyOf(device::OfBlock(), own));
      // Of four warps, and one that is not full.
      if (thread >= 4 * kWarp) continue;
      const bool low = thread < kWarp;
      CHECK(device::AnyOf(low ? device::OfWarps(0, 1, 3) : device::OfWarps(1, 3, 2), own) ==
            (low ? k < kWarp : k >= kWarp && k < 4 * kWarp));
    }
  });
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
