// Small kernels that use only the device API, as users write them, emulated. Tags, counts, values and waits for any of
// several: test_litmus_groups.cc.
#include <algorithm>
#include <cstdlib>
#include <random>
#include <vector>

#include "../../ffi/cuda/kernels/exchange_offsets.cuh"
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

// All threads.
struct Block {
  static int32_t PerBlock(unsigned) { return 1; }
  static Part Own() { return {device::OfBlock(), static_cast<int32_t>(blockIdx.x)}; }
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

// Each group is a channel, which puts to all peers, reads after a barrier, and gets the block of the next rank from
// there. It then signals around the ring. Groups of a block never wait for each other.
template <typename Parts>
void TestGroups(uint64_t seed, int32_t size, int32_t blocks, unsigned threads, int64_t count) {
  const int32_t channels = blocks * Parts::PerBlock(threads);
  // A channel of a window has a place for the block of every rank, and two more.
  const Node node(size, channels, channels * (size + 2) * count);
  emulation::Launch(blocks, size, threads, seed, [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y);
    const device::Comm& comm = node.comms[rank];
    const Part own = Parts::Own();
    const device::ThreadGroup& group = own.threads;
    const int32_t next = (rank + 1) % size, prev = (rank + size - 1) % size;
    const auto place = [&](int32_t block) { return (own.channel * (size + 2) + block) * count; };
    const auto each = [&](int32_t block, const auto& f) {
      for (int64_t i = group.rank; i < count; i += group.size) f(node.At(rank)[place(block) + i], i);
      device::Sync(group);
    };
    for (int32_t round = 0; round < 4; ++round) {
      const auto value = [&](int32_t r, int64_t i) { return Value(round, own.channel, r, i); };
      each(size, [&](uint32_t& word, int64_t i) { word = value(rank, i); });
      for (int32_t peer = 0; peer < size; ++peer) {
        device::Put(node.window, peer, place(rank) * 4, node.At(rank) + place(size), count * 4, group);
      }
      CHECK(device::Barrier(comm, own.channel, 0, group));
      for (int32_t r = 0; r < size; ++r) each(r, [&](uint32_t word, int64_t i) { CHECK(word == value(r, i)); });
      device::Get(node.At(rank) + place(size + 1), node.window, next, place(size) * 4, count * 4, group);
      device::Sync(group);
      each(size + 1, [&](uint32_t word, int64_t i) { CHECK(word == value(next, i)); });
      CHECK(device::Barrier(comm, own.channel, 0, group));
      device::PutSignal(comm, own.channel, node.window, next, place(size) * 4, node.At(rank) + place(rank), count * 4,
                        group);
      CHECK(device::Wait(comm, own.channel, prev, group));
      each(size, [&](uint32_t word, int64_t i) { CHECK(word == value(prev, i)); });
    }
  });
  node.CheckNoReports();
}

// Each rank sends a number to every other rank by LL messages, in many exchanges: the example of the documentation.
// Later the last rank is missing.
void TestNumbers(uint64_t seed, int32_t size, int32_t channels) {
  const Node node(size, channels, 1);
  const auto number_of = [](int32_t round, int32_t channel, int32_t rank) {
    return uint64_t{Value(round, channel, rank, 0)} << 32 | Value(round, channel, rank, 1);
  };
  const auto threads = static_cast<unsigned>(size) + 1;
  const auto give_numbers = [&](int32_t round) {
    const auto channel = static_cast<int32_t>(blockIdx.x);
    const device::Comm& comm = node.comms[blockIdx.y];
    auto* const numbers = static_cast<uint64_t*>(device::DynamicShared());
    const uint64_t number = number_of(round, channel, comm.local.rank);
    device::LlExchange exchange;
    if (!device::BeginLlExchange(comm, channel, &exchange)) return false;
    const int32_t rank = comm.local.rank, peer = static_cast<int32_t>(threadIdx.x);  // one thread per peer
    const bool mine = peer < comm.local.size && peer != rank;
    if (mine) device::SendUnit(comm, exchange, peer, 0, number);
    uint64_t payload = number;
    const auto units = [&](int) { return device::LlUnit{peer, 0}; };
    const bool received = !mine || device::ReceiveUnits<1>(comm, exchange, 1, units, &payload, 42);
    if (peer < comm.local.size) numbers[peer] = payload;  // in shared memory
    if (!device::EndLlExchange(comm, exchange, received)) return false;
    for (int32_t r = 0; r < size; ++r) CHECK(numbers[r] == number_of(round, channel, r));
    return true;
  };
  const size_t shared_bytes = size * sizeof(uint64_t);
  const auto rounds = [&] {
    for (int32_t round = 0; round < 5; ++round) CHECK(give_numbers(round));
  };
  emulation::Launch(channels, size, threads, seed, rounds, shared_bytes);
  emulation::Launch(channels, size - 1, threads, seed, [&] { CHECK(!give_numbers(5)); }, shared_bytes);
  for (int32_t r = 0; r + 1 < size; ++r) {
    const device::Report& report = node.reports[r];
    CHECK(report.state == device::Report::kComplete && report.step == 42 && report.expected == 6 && report.seen == 5);
    CHECK(report.rank == 2 + 4 * r && report.peer == 2 + 4 * (size - 1));
  }
}

// The last rank is missing. All threads of all other ranks detect it, one of them reports it, and no kernel signals
// again. The first block begins to wait before the others, which end when it does.
template <typename Parts>
void TestMissingRank(uint64_t seed, int32_t size, int32_t blocks, unsigned threads) {
  const int32_t channels = blocks * Parts::PerBlock(threads);
  const Node node(size, channels, 1);
  const uint64_t begin = emulation::NowNs(), timeout_ns = node.comms[0].timeout_ns;
  for (const bool barrier : {true, true, false}) {
    emulation::Launch(blocks, size - 1, threads, ++seed, [&] {
      const device::Comm& comm = node.comms[blockIdx.y];
      const auto [group, channel] = Parts::Own();
      while (blockIdx.x > 0 && emulation::NowNs() < begin + timeout_ns / 2) emulation::Pause();
      CHECK(!(barrier ? device::Barrier(comm, channel, 42, group) : device::Wait(comm, channel, size - 1, group, 42)));
    });
    CHECK(emulation::NowNs() - begin >= timeout_ns);
    for (int32_t r = 0; r + 1 < size; ++r) {
      const device::Report& report = node.reports[r];
      CHECK(report.state == device::Report::kComplete && report.call_id == 7 && report.step == 42);
      CHECK(report.rank == 2 + 4 * r && report.peer == 2 + 4 * (size - 1));
      CHECK(report.channel >= 0 && report.channel < channels && report.expected == 1 && report.seen == 0);
      CHECK(report.time_ns >= begin + timeout_ns && report.time_ns <= emulation::NowNs());
      for (int32_t channel = 0; channel < channels; ++channel) {
        CHECK(node.counters.sent[r][channel * size + size - 1] == 1);
      }
    }
  }
  CHECK(emulation::NowNs() - begin < timeout_ns * 5 / 4);
}

// A sum over all ranks: each rank reduces an equal part and puts it to all ranks. Integers, so that the order does not
// matter.
template <typename Codec>
void TestMultimem(uint64_t seed, int32_t size, int32_t channels, unsigned threads) {
  using Storage = typename Codec::Storage;
  constexpr int64_t kPartBytes = 48;
  constexpr auto kPartCount = static_cast<int64_t>(kPartBytes / sizeof(Storage));
  const int64_t bytes = channels * size * kPartBytes;
  const Node node(size, channels, 2 * bytes / 4);  // operands, then sums
  emulation::Multicast& multicast = emulation::TheMulticast();
  multicast.base = reinterpret_cast<char*>(uintptr_t{0x1000});  // not the address of any memory
  multicast.bytes = 2 * bytes;
  multicast.replicas.clear();
  for (int32_t r = 0; r < size; ++r) multicast.replicas.push_back(node.window.At(r));
  const device::Multicast window = {multicast.base};
  const auto value = [](int32_t rank, int64_t i) { return static_cast<float>((rank * 5 + i) % 13 - 6); };
  emulation::Launch(channels, size, threads, seed, [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y), channel = static_cast<int32_t>(blockIdx.x);
    const device::Comm& comm = node.comms[rank];
    const int64_t begin = channel * size * kPartBytes;
    auto* const own = node.window.At<Storage>(rank, begin);
    for (int64_t i = threadIdx.x; i < size * kPartCount; i += blockDim.x) own[i] = Codec::Encode(value(rank, i));
    CHECK(device::Barrier(comm, channel));
    alignas(16) static char sums[8][4][kPartBytes];  // by rank and channel
    char* const sum = sums[rank][channel];
    __syncthreads();  // so that the fence of the barrier above does not count
    device::MultimemReduce<Codec>(sum, window, begin + rank * kPartBytes, kPartBytes);
    __syncthreads();
    device::MultimemPut(window, bytes + begin + rank * kPartBytes, sum, kPartBytes);
    __syncthreads();
    CHECK(device::Barrier(comm, channel));
    const auto* const all = node.window.At<const Storage>(rank, bytes + begin);
    for (int64_t i = threadIdx.x; i < size * kPartCount; i += blockDim.x) {
      float expected = 0;
      for (int32_t r = 0; r < size; ++r) expected += value(r, i);
      CHECK(Codec::Decode(all[i]) == expected);
    }
  });
}

constexpr int32_t kTags = 3;

// The last rank never signals. All waits end, and a channel that has aborted sends and takes nothing, with any tag.
TEST_CASE("a missing signal with a tag") {
  const auto source = [](int32_t i) { return device::Source{1, i}; };
  for (uint64_t kind = 0; kind < 3; ++kind) {
    const Node node(2, 2, 1, kTags);
    const device::Comm& comm = node.comms[0];
    emulation::Launch(1, 1, 1, FirstSeed() + kind, [&] {
      device::Polls polls;
      uint64_t value = 0;
      // One signal with the last tag has come.
      reinterpret_cast<uint64_t*>(node.counters.pads)[(kTags - 1) * 2 + 1] = 1;
      CHECK(device::TryWait(comm, device::Channel(0, kTags - 1), 1));
      // On another channel, each signal is found, with whichever source the search begins.
      for (int32_t i = 0; i < kTags * kTags; ++i) {
        ++reinterpret_cast<uint64_t*>(node.counters.pads)[(kTags + i % kTags) * 2 + 1];
        CHECK(device::WaitAny(comm, 1, kTags, source, 42, i / kTags) == i % kTags);
      }
      ++reinterpret_cast<uint64_t*>(node.counters.pads)[kTags * 2 + 1];
      CHECK(!device::TryWait(comm, device::Channel(1, 0), 1, 2) && device::TryWait(comm, device::Channel(1, 0), 1));
      if (kind == 0) CHECK(device::WaitAny(comm, 0, kTags, source, 42, 2) == -1);
      if (kind == 1) CHECK(!device::WaitValue(comm, device::Channel(0, 2), 1, 2, &value, 42));
      while (kind == 2 && !device::TryWait(comm, device::Channel(0, 2), 1)) {
        if (device::MustStop(comm, device::Channel(0, 2), 1, 42, &polls)) break;
      }
      const device::Report& report = *comm.report;
      CHECK(report.state == device::Report::kComplete && report.step == 42 && report.peer == 6 && report.channel == 0);
      CHECK(report.expected == 2 && report.seen == 1);
      // From now on a signal comes too late.
      for (int32_t tag = 0; tag < kTags; ++tag) {
        const device::Channel channel(0, tag);
        reinterpret_cast<uint64_t*>(node.counters.pads)[tag * 2 + 1] = 2;
        CHECK(!device::TryWait(comm, channel, 1) && !device::Wait(comm, channel, 1));
        CHECK(!device::WaitValue(comm, channel, 1, 1, &value));
        device::Polls again;
        CHECK(device::MustStop(comm, channel, 1, 1, &again));
        device::Signal(comm, channel, 1);
        device::SignalSet(comm, channel, 1, 9);
      }
      CHECK(device::WaitAny(comm, 0, kTags, source) == -1);
      const auto* const pad_of_peer = reinterpret_cast<uint64_t*>(node.counters.pads + node.counters.pad_bytes);
      CHECK(std::count(pad_of_peer, pad_of_peer + 2 * 2 * kTags, 0) == 2 * 2 * kTags);
      // Another channel.
      device::Signal(comm, device::Channel(1, 2), 1);
      CHECK(pad_of_peer[(kTags + 2) * 2] == 1);
    });
  }
}

// Channels in an arena, more than the communicator has, beside the communicator's. Signals that a kernel has left on
// one of them do not satisfy waits on the other.
TEST_CASE("counters in an arena") {
  constexpr int32_t kChannels = 6;
  CHECK(device::SignalsBytes(1, 1) == 32);  // three words, in whole units of 16 bytes
  for (const int32_t size : {2, 3, 6}) {
    const int64_t words = device::SignalsBytes(size, kChannels, kTags) / 4;
    const Node node(size, 1, words + 8);  // four words around the counters stay as they are
    for (int32_t r = 0; r < size; ++r) {
      for (uint32_t* const around : {node.At(r), node.At(r) + words + 4}) std::fill_n(around, 4, 0x5a5a5a5a);
    }
    for (uint64_t launch = 0; launch < 2; ++launch) {
      emulation::Launch(1, size, kChannels * kWarp, FirstSeed() + static_cast<uint64_t>(size) + launch, [&] {
        const auto rank = static_cast<int32_t>(blockIdx.y), number = static_cast<int32_t>(threadIdx.x) / kWarp;
        const device::Comm own = device::WithSignals(node.comms[rank], 16, kChannels, kTags);
        const device::ThreadGroup warp = device::OfWarp();
        const auto count = 1 + static_cast<uint64_t>(number);
        for (int32_t tag = 0; tag < kTags; ++tag) {
          CHECK(device::Barrier(own, device::Channel(number, tag), 0, warp) && own.signals.num_channels == kChannels);
          device::Signal(own, device::Channel(number, tag), (rank + 1) % size, warp, count);
        }
        CHECK(device::Barrier(node.comms[rank], 0));
        for (int32_t tag = 0; tag < kTags; ++tag) {
          CHECK(device::Wait(own, device::Channel(number, tag), (rank + size - 1) % size, warp, 0, count));
        }
      });
    }
    for (int32_t r = 0; r < size; ++r) {
      for (const uint32_t* around : {node.At(r), node.At(r) + words + 4})
        CHECK(std::count(around, around + 4, 0x5a5a5a5a) == 4);
    }
    node.CheckNoReports();
    for (int32_t world = -10; world < 4 * size + 10; ++world) {
      const bool inside = world >= 2 && world < 4 * size && world % 4 == 2;
      CHECK(node.comms[0].local.Member(world) == (inside ? world / 4 : -1));
    }
  }
}

// Calls `f` with a seed for each group, number of channels and number of threads.
template <typename F>
void ForAllShapes(F f) {
  uint64_t seed = FirstSeed();
  for (const int32_t size : {2, 3, 6}) {
    for (const int32_t channels : {1, 3}) {
      for (const unsigned threads : {1u, 2u, 8u}) f(seed += 10, size, channels, threads);
    }
  }
}

TEST_CASE("puts, gets, barriers and signals of blocks, warps, and several warps") {
  ForAllShapes([](uint64_t seed, int32_t size, int32_t blocks, unsigned threads) {
    for (const int64_t count : {1, 9, 60}) {
      TestGroups<Block>(++seed, size, blocks, threads, count);
      TestGroups<Warps>(++seed, size, blocks, threads == 2 ? 5 : threads, count);
      if (threads > 2) TestGroups<TwoGroups>(++seed, size, blocks, threads, count);
    }
  });
}

// The host sees which call runs, and the wait in it, before the wait ends.
TEST_CASE("how far calls have come") {
  const Node node(3, 2, 4);
  const auto progress = [&](int32_t r) -> const device::Progress& { return node.reports[r].progress; };
  const auto call = [&](int32_t missing) {
    emulation::Launch(2, 3, kWarp, FirstSeed(), [&] {
      const auto rank = static_cast<int32_t>(blockIdx.y);
      if (rank == missing) return;
      device::BeginCall(node.comms[rank]);
      if (!device::Barrier(node.comms[rank], static_cast<int32_t>(blockIdx.x), 5)) return;
      device::EndCall(node.comms[rank]);
    });
  };
  for (uint64_t number = 1; number <= 3; ++number) {
    call(-1);
    for (int32_t r = 0; r < 3; ++r) {
      CHECK(progress(r).begun == (number << 32 | 7) && progress(r).ended == number);
    }
  }
  const uint64_t begin_ns = emulation::NowNs();
  call(1);
  CHECK(progress(1).begun == (uint64_t{3} << 32 | 7));
  for (const int32_t r : {0, 2}) {
    CHECK(progress(r).begun == (uint64_t{4} << 32 | 7) && progress(r).ended == 3);
    CHECK(progress(r).waits_for == (uint64_t{2 + 4} << 32 | 5));  // the rank of the larger group
    CHECK(progress(r).waits_ns > begin_ns && progress(r).waits_ns <= emulation::NowNs());
  }
}

TEST_CASE("a missing rank") {
  ForAllShapes([](uint64_t seed, int32_t size, int32_t blocks, unsigned threads) {
    TestMissingRank<Block>(seed, size, blocks, threads);
    TestMissingRank<Warps>(seed + 3, size, blocks, threads);
    if (threads > 2) TestMissingRank<TwoGroups>(seed + 6, size, blocks, threads);
  });
}

TEST_CASE("sums through a switch") {
  ForAllShapes([](uint64_t seed, int32_t size, int32_t channels, unsigned threads) {
    TestMultimem<arithmetic::Plain<float>>(seed, size, channels, threads);
    TestMultimem<arithmetic::Widened<BFloat16>>(seed + 1, size, channels, threads);
    TestMultimem<arithmetic::Widened<Float16>>(seed + 2, size, channels, threads);
  });
}

TEST_CASE("numbers in LL messages") {
  uint64_t seed = FirstSeed();
  for (const int32_t size : {2, 3, 6}) {
    for (const int32_t channels : {1, 3}) TestNumbers(++seed, size, channels);
  }
}

// Loads from different peers are in flight at once: no warp begins where another one does.
TEST_CASE("warps begin with different ranges") {
  constexpr int32_t kNum = 5;
  std::vector<char> src(kNum * 100), dst(kNum * 100);
  std::vector<int32_t> first(kNum, -1);  // by warp: the range that it copies first
  emulation::Launch(1, 1, kNum * kWarp, 1, [&] {
    device::CopyRanges(kNum, 100, [&](int32_t i) {
      int32_t& of_warp = first[threadIdx.x / kWarp];
      if (of_warp < 0) of_warp = i;
      return device::CopyRange{dst.data() + i * 100, src.data() + i * 100, 100};
    });
  });
  CHECK((first == std::vector<int32_t>{0, 1, 2, 3, 4}));
}

// A peer is missing when ranks exchange the offsets of their buffers. The exchange itself: test_litmus.cc, and in calls
// test_device_call.cc and test_user_windows.cc.
TEST_CASE("an exchange of offsets with a missing peer") {
  constexpr int32_t kBuffers = 2, kChannel = 3;
  const Node node(3, kChannel + 1, 2 * 3 * 2 * kMostBuffers);
  std::vector<BufferPlace> own(kBuffers, {5, 0});
  std::vector<std::vector<int64_t>> at(3, std::vector<int64_t>(kBuffers * 3, -1));
  const auto exchange = [&](int32_t rank) {
    ExchangeOffsets({node.comms[rank], node.window, own.data(), at[rank].data(), kBuffers});
  };
  emulation::Launch(1, 3, 2, 1, [&] {  // fewer threads than ranks
    if (blockIdx.y != 1) exchange(static_cast<int32_t>(blockIdx.y));
  });
  own[0].in_window = 77;
  for (const int32_t r : {0, 2}) {
    const device::Report& report = node.reports[r];
    CHECK(report.state == device::Report::kComplete && report.step == kOffsetExchange && report.peer == 2 + 4);
    CHECK(report.channel == kChannel && report.rank == 2 + 4 * r && at[r][2 - r] == 5);
    // Otherwise the plan would use the buffers of another run.
    CHECK(*node.comms[r].abort_flag != 0);
    // A CUDA graph may be replayed: it writes nothing and signals nobody.
    const uint64_t& sent = node.counters.sent[r][kChannel * 3 + (r + 1) % 3];
    const uint64_t before = sent;
    emulation::Launch(1, 1, 4, 1, [&] { exchange(r); });
    CHECK(sent == before && at[r][r] != 77);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
