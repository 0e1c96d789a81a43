// Small kernels that use only the device API, as users write them, emulated.
#include <cstdlib>
#include <random>
#include <vector>

#include "../../ffi/include/jaxcomm/device.h"
#include "../check.h"
#include "fakes/device_node.h"
#include "fakes/seed.h"

namespace jaxcomm {
namespace cuda {
namespace {

uint32_t Value(int32_t round, int32_t channel, int32_t rank, int64_t i) {
  return static_cast<uint32_t>(((round * 8 + channel) * 8 + rank) * 100 + i);
}

// Each rank writes to its place on all peers, then a barrier; each rank reads, then a barrier before the next round.
void TestBarrier(uint64_t seed, int32_t size, int32_t channels, unsigned threads) {
  constexpr int64_t kCount = 5;
  const Node node(size, channels, channels * size * kCount);
  emulation::Launch(channels, size, threads, seed, [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y), channel = static_cast<int32_t>(blockIdx.x);
    const device::Comm& comm = node.comms[rank];
    for (int32_t round = 0; round < 4; ++round) {
      uint32_t values[kCount];
      for (int64_t i = 0; i < kCount; ++i) values[i] = Value(round, channel, rank, i);
      for (int32_t peer = 0; peer < size; ++peer) {
        device::Put(node.window, peer, (channel * size + rank) * kCount * 4, values, sizeof(values));
      }
      CHECK(device::Barrier(comm, channel));
      for (int64_t i = threadIdx.x; i < size * kCount; i += blockDim.x) {
        const auto from = static_cast<int32_t>(i / kCount);
        CHECK(node.At(rank)[channel * size * kCount + i] == Value(round, channel, from, i % kCount));
      }
      CHECK(device::Barrier(comm, channel));
    }
  });
  for (int32_t r = 0; r < size; ++r) CHECK(node.reports[r].state == device::Report::kNone);
}

// A ring: each rank puts to the next rank, which forwards the data. Then each rank reads the first value of the next
// one.
void TestRing(uint64_t seed, int32_t size, int32_t channels, unsigned threads, int64_t count) {
  // A channel of a window has a place for the block of every rank, and one more.
  const Node node(size, channels, channels * (size + 1) * count);
  emulation::Launch(channels, size, threads, seed, [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y), channel = static_cast<int32_t>(blockIdx.x);
    const device::Comm& comm = node.comms[rank];
    const int32_t next = (rank + 1) % size, prev = (rank + size - 1) % size;
    const auto place = [&](int32_t block) { return (channel * (size + 1) + block) * count; };
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      node.At(rank)[place(rank) + i] = Value(0, channel, rank, i);
    }
    __syncthreads();
    for (int32_t s = 0; s + 1 < size; ++s) {
      const int32_t block = (rank + size - s) % size, coming = (prev + size - s) % size;
      device::PutSignal(comm, channel, node.window, next, place(block) * 4, node.At(rank) + place(block), count * 4);
      CHECK(__syncthreads_or(threadIdx.x == 0 && !device::Wait(comm, channel, prev)) == 0);
      for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
        CHECK(node.At(rank)[place(coming) + i] == Value(0, channel, coming, i));
      }
    }
    CHECK(device::Barrier(comm, channel));
    uint32_t* const copy = node.At(rank) + place(size);
    device::Get(copy, node.window, next, place(next) * 4, count * 4);
    __syncthreads();
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) CHECK(copy[i] == Value(0, channel, next, i));
  });
  for (int32_t r = 0; r < size; ++r) CHECK(node.reports[r].state == device::Report::kNone);
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
// again. Channel 0 begins to wait before the others, which end when channel 0 does.
void TestMissingRank(uint64_t seed, int32_t size, int32_t channels, unsigned threads) {
  const Node node(size, channels, 1);
  const uint64_t begin = emulation::NowNs(), timeout_ns = node.comms[0].timeout_ns;
  const auto kernel = [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y), channel = static_cast<int32_t>(blockIdx.x);
    while (channel > 0 && emulation::NowNs() < begin + timeout_ns / 2) emulation::Pause();
    CHECK(!device::Barrier(node.comms[rank], channel, 42));
  };
  emulation::Launch(channels, size - 1, threads, seed, kernel);
  CHECK(emulation::NowNs() - begin >= timeout_ns);
  for (int32_t again = 0; again < 2; ++again) {
    for (int32_t r = 0; r + 1 < size; ++r) {
      const device::Report& report = node.reports[r];
      CHECK(report.state == device::Report::kComplete && report.call_id == 7 && report.step == 42);
      CHECK(report.rank == 2 + 4 * r && report.peer == 2 + 4 * (size - 1));
      CHECK(report.channel >= 0 && report.channel < channels && report.expected == 1 && report.seen == 0);
    }
    for (int32_t channel = 0; channel < channels; ++channel) {
      for (int32_t r = 0; r + 1 < size; ++r) CHECK(node.counters.sent[r][channel * size + size - 1] == 1);
    }
    if (again == 0) emulation::Launch(channels, size - 1, threads, seed, kernel);
  }
  CHECK(emulation::NowNs() - begin < timeout_ns * 5 / 4);
}

// Integers, so that every order gives the same sum. Consecutive sums use the same memory.
void TestBlockSum(uint64_t seed, unsigned threads) {
  emulation::Launch(
      2, 1, threads, seed,
      [&] {
        for (unsigned k = 0; k < 3; ++k) {
          const auto value = static_cast<float>(threadIdx.x * (k + 1) + blockIdx.x);
          const float sum = device::BlockSum(value, static_cast<float*>(device::DynamicShared()));
          CHECK(sum == static_cast<float>(threads * (threads - 1) / 2 * (k + 1) + threads * blockIdx.x));
        }
      },
      device::BlockSumBytes(threads));
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

TEST_CASE("a barrier") {
  ForAllShapes([](uint64_t seed, int32_t size, int32_t channels, unsigned threads) {
    for (int repeat = 0; repeat < 5; ++repeat) TestBarrier(seed + repeat, size, channels, threads);
  });
}

TEST_CASE("puts along a ring") {
  ForAllShapes([](uint64_t seed, int32_t size, int32_t channels, unsigned threads) {
    for (const int64_t count : {1, 7, 300}) TestRing(++seed, size, channels, threads, count);
  });
}

TEST_CASE("a missing rank") { ForAllShapes(TestMissingRank); }

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

TEST_CASE("the sum over a block") {
  uint64_t seed = FirstSeed();
  for (const unsigned threads : {1u, 2u, 31u, 32u, 33u, 65u, 512u}) TestBlockSum(++seed, threads);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
