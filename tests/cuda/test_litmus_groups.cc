// Thread groups and further counters of the device API, in all executions that a relaxed memory model allows.
#define LITMUS_WARP_THREADS 2

#include <cstdint>
#include <string>
#include <tuple>

#include "../../ffi/include/jaxcomm/device.h"
#include "../check.h"
#include "fakes/litmus_ranks.h"

namespace jaxcomm {
namespace cuda {
namespace {

using device::Channel;
using memory_model::Program;
using memory_model::Require;

// A word of the window per thread.
uint64_t* At(const device::Window& window, int32_t rank, unsigned thread) { return window.At<uint64_t>(rank) + thread; }

enum Kind { kBlockGroup, kWarpGroup, kWarpsGroup };
device::ThreadGroup Group(Kind kind) {
  if (kind == kBlockGroup) return device::OfBlock();
  return kind == kWarpsGroup ? device::OfWarps(0, 1, 1) : device::OfWarp();
}

// The window of a rank holds new data of every thread in each round. Barriers lie between its writes and its peer's
// reads by another thread of the group. Warps have channels of their own; the last one has one thread.
TEST_CASE("barriers") {
  const std::tuple<int32_t, unsigned, Kind> cases[] = {
      {2, 2, kBlockGroup}, {3, 1, kBlockGroup}, {2, 3, kWarpGroup}, {2, 2, kWarpsGroup}};
  for (const auto& [n, threads, kind] : cases) {
    Program program;
    LitmusRanks ranks(program, n, 2);
    const device::Window window = ranks.Window(program, 24, "window");
    ranks.AddBlocks(program, 1, threads, [=, n = n, kind = kind](const device::Comm& comm) {
      const device::ThreadGroup group = Group(kind);
      const auto rank = static_cast<unsigned>(group.rank), size = static_cast<unsigned>(group.size);
      const unsigned first = threadIdx.x - rank;
      const auto channel = static_cast<int32_t>(first / 2);
      for (uint64_t round = 1; round <= 2; ++round) {
        *At(window, comm.local.rank, threadIdx.x) = round;
        Require(device::Barrier(comm, channel, 0, group), "no signal");
        Require(*At(window, (comm.local.rank + 1) % n, first + size - 1 - rank) == round, "stale data");
        if (round == 1) Require(device::Barrier(comm, channel, 0, group), "no signal");
      }
    });
    ExpectSound(program);
  }
}

// Each rank puts a unit of each thread to the other, twice: a put of the second round must wait for the signal that the
// first has been read, by another thread than that which waits for it.
TEST_CASE("puts, signals and waits of groups") {
  for (const Kind kind : {kBlockGroup, kWarpGroup, kWarpsGroup}) {
    Program program;
    LitmusRanks ranks(program, 2, 1);
    const device::Window window = ranks.Window(program, 32, "window");
    auto* const sources = program.Words<uint64_t>(8, "sources");
    ranks.AddBlocks(program, 1, 2, [=](const device::Comm& comm) {
      const device::ThreadGroup group = Group(kind);
      const int32_t rank = comm.local.rank, peer = 1 - rank;
      for (uint64_t round = 1; round <= 2; ++round) {
        sources[4 * rank + 2 * threadIdx.x] = round * 10 + threadIdx.x;
        device::Sync(group);
        device::PutSignal(comm, 0, window, peer, 0, sources + 4 * rank, 32, group);
        Require(device::Wait(comm, 0, peer, group), "no signal");
        Require(*At(window, rank, 2 - 2 * threadIdx.x) == round * 10 + 1 - threadIdx.x, "stale data");
        if (round == 2) break;
        device::Signal(comm, 0, peer, group);
        Require(device::Wait(comm, 0, peer, group), "no signal");
      }
    });
    ExpectSound(program);
  }
}

LitmusRanks WithTags(Program& program, int32_t num_ranks, int32_t num_tags) {
  LitmusRanks ranks(program, num_ranks, num_tags);  // one channel
  for (int32_t r = 0; r < num_ranks; ++r) {
    ranks.comm(r).signals.num_channels = 1;
    ranks.comm(r).signals.num_tags = num_tags;
  }
  return ranks;
}

// Rank 0 writes words with two tags, in another order than that in which the other rank waits. A word is there with the
// last of several signals.
TEST_CASE("tags and counts") {
  Program program;
  LitmusRanks ranks = WithTags(program, 2, 2);
  const device::Window window = ranks.Window(program, 24, "window");
  ranks.AddBlocks(program, 1, 1, [=](const device::Comm& comm) {
    if (comm.local.rank == 0) {
      device::Signal(comm, Channel(0, 1), 1);
      *At(window, 1, 0) = 10;
      device::Signal(comm, Channel(0, 0), 1);
      device::Signal(comm, Channel(0, 0), 1);
      *At(window, 1, 2) = 12;
      device::Signal(comm, Channel(0, 0), 1);
      *At(window, 1, 1) = 11;
      device::Signal(comm, Channel(0, 1), 1);
      return;
    }
    Require(device::Wait(comm, Channel(0, 0), 0) && *At(window, 1, 0) == 10, "stale data");
    device::Polls polls;
    while (!device::TryWait(comm, Channel(0, 0), 0, 2)) {
      Require(!device::MustStop(comm, Channel(0, 0), 0, 0, &polls), "an early end");
    }
    Require(*At(window, 1, 2) == 12 && !device::TryWait(comm, Channel(0, 0), 0), "stale data");
    Require(device::Wait(comm, Channel(0, 1), 0, 0, 2) && *At(window, 1, 1) == 11, "stale data");
    Require(!device::TryWait(comm, Channel(0, 1), 0), "a signal counts twice");
  });
  ExpectSound(program);
}

// A rank sends two words with tags, another one a word; a third takes them in the order in which they come, one twice.
TEST_CASE("any of several") {
  for (const int32_t first : {0, 2}) {
    Program program;
    LitmusRanks ranks = WithTags(program, 3, 2);
    const device::Window window = ranks.Window(program, 24, "window");
    ranks.AddBlocks(program, 1, 1, [=](const device::Comm& comm) {
      const auto source = [](int32_t s) { return s == 2 ? device::Source{2, 0} : device::Source{1, 1 - s}; };
      const auto send = [&](int32_t s, uint64_t value) {
        *At(window, 0, static_cast<unsigned>(s)) = value;
        device::Signal(comm, Channel(0, source(s).tag), 0);
      };
      if (comm.local.rank == 1) {
        send(0, 10);
        send(1, 11);
      } else if (comm.local.rank == 2) {
        send(2, 12);
        Require(device::Wait(comm, 0, 0), "no signal");
        send(2, 22);
      } else {
        uint64_t taken[3] = {0, 0, 0};
        for (int k = 0; k < 4; ++k) {
          const int32_t i = device::WaitAny(comm, 0, 3, source, 0, first);
          Require(i >= 0 && i < 3, "nothing");
          Require(*At(window, 0, static_cast<unsigned>(i)) == 10 + 10 * taken[i] + static_cast<uint64_t>(i), "stale");
          if (++taken[i] == 1 && i == 2) device::Signal(comm, 0, 2);
        }
      }
    });
    ExpectSound(program);
  }
}

// The value says how many words there are. A value that comes later replaces the first.
TEST_CASE("values") {
  Program program;
  LitmusRanks ranks = WithTags(program, 2, 2);
  const device::Window window = ranks.Window(program, 16, "window");
  ranks.AddBlocks(program, 1, 1, [=](const device::Comm& comm) {
    if (comm.local.rank == 0) {
      for (unsigned i = 0; i < 2; ++i) {
        *At(window, 1, i) = 5 + i;
        device::SignalSet(comm, Channel(0, 1), 1, i + 1);
      }
      return;
    }
    uint64_t value = 0;
    Require(device::WaitValue(comm, Channel(0, 1), 0, 1, &value), "no value");
    Require(value == 1 || value == 2, "no value of the sender");
    for (unsigned i = 0; i < value; ++i) Require(*At(window, 1, i) == 5 + i, "stale data");
    for (const uint64_t least : {2, 1}) {
      Require(device::WaitValue(comm, Channel(0, 1), 0, least, &value) && value == 2, "no second value");
    }
    Require(*At(window, 1, 1) == 6, "stale data");
  });
  ExpectSound(program);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
