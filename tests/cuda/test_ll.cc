// LL messages. Collectives have the same bits as on the CPU's executor, in long series of calls of all kinds and sizes
// on the same slots, mixed with plans of the executor. Kernels whose peers do not arrive end in time. Emulated, or
// compiled by nvcc for a GPU.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../ffi/plan/algorithms.h"
#include "../check.h"
#include "fakes/all_types.h"
#include "fakes/on_cpu.h"
#include "fakes/seed.h"
#if defined(__CUDACC__)
#include "gpu/gpu.cuh"
namespace jaxcomm::cuda {
using TestMemory = ManagedMemory;
}
#else
#include "fakes/emulated.h"
#endif
#include "fakes/virtual_ll.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr Collective kLl[] = {Collective::kAllToAll, Collective::kAllGather, Collective::kAllReduce,
                              Collective::kReduceScatter};
constexpr int32_t kUnits = 64;  // of slots: enough for all random cases below

bool Ordered(DType dtype) { return FindReduce(dtype, ReduceOp::kMax) != nullptr; }

#if defined(__CUDACC__)
constexpr uint64_t kDeadlineNs = 10'000'000'000;
constexpr unsigned kManyThreads = 8;
void Launch(const MixedCall* calls, int32_t num_calls, int32_t num_channels, int32_t num_ranks, unsigned threads,
            uint64_t) {
  int32_t repetitions = 1;
  void* parameters[] = {&calls, &num_calls, &repetitions};
  const dim3 grid(num_channels, num_ranks);
  CHECK_CUDA(cudaLaunchCooperativeKernel(RunCalls, grid, dim3(threads * 16), parameters, 0, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
}
#else
constexpr uint64_t kDeadlineNs = 1'000'000'000;
constexpr unsigned kManyThreads = 2 * kUnits;  // some have no slot to sweep
void Launch(const MixedCall* calls, int32_t num_calls, int32_t num_channels, int32_t num_ranks, unsigned threads,
            uint64_t seed) {
  emulation::Launch(num_channels, num_ranks, threads, seed, [&] {
    for (int32_t i = 0; i < num_calls; ++i) {
      RunMixed(calls[i], static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(blockIdx.x));
      __syncthreads();
    }
  });
}
#endif

// Random bits, except infinities and NaN.
void Randomize(char* values, DType dtype, int64_t bytes, std::mt19937_64& random) {
  for (int64_t i = 0; i < bytes; ++i) values[i] = static_cast<char>(dtype == DType::kBool ? random() % 2 : random());
  int64_t width = ItemBytes(dtype);
  if (dtype == DType::kC64 || dtype == DType::kC128) width /= 2;
  for (int64_t i = width - 1; dtype >= DType::kF16 && i < bytes; i += width) values[i] &= static_cast<char>(0xbf);
}

// A group of one node whose slots have been used before.
struct Group {
  Group(int32_t n, int32_t num_channels, uint64_t timeout_ns = kDeadlineNs)
      : n(n),
        num_channels(num_channels),
        ranks(memory, {1, n, true, true}, num_channels, timeout_ns),
        slots(memory, n, num_channels, kUnits) {}

  device::Report& report(int32_t rank) const { return ranks.reports()[rank]; }
  uint64_t& epoch(int32_t rank, int32_t channel) const { return slots.Of(rank).epochs[channel]; }

  TestMemory memory;
  const int32_t n, num_channels;
  const VirtualRanks ranks;
  const VirtualSlots slots;
};

struct Drawn {
  Request request;
  Operation operation;
  ContiguousCounts contiguous;
  bool two_shot = false;
  LlBuffers buffers;
  std::vector<Bytes> expected;
};

int num_calls = 0;

// An LL call whose blocks fit into the slots.
Drawn Draw(Group& group, Collective collective, Operation operation, std::mt19937_64& random) {
  Drawn drawn;
  drawn.request.collective = collective;
  drawn.request.geometry = {1, group.n, true, true};
  if (operation.op != ReduceOp::kSum && !Ordered(operation.dtype)) operation.op = ReduceOp::kSum;
  drawn.operation = operation;
  drawn.two_shot = collective == Collective::kAllReduce && random() % 2 == 0;
  const int64_t item = ItemBytes(operation.dtype);
  const int64_t most = kUnits * 8 / item * (drawn.two_shot ? group.n : 1);
  const int32_t num_channels = 1 + static_cast<int32_t>(random() % group.num_channels);
  const int64_t counts[] = {1, 2, 3, 7, 8, 21, most / 2, most - 1, most, most * num_channels};
  int64_t& count = drawn.request.block_count;
  count = std::max<int64_t>(counts[random() % std::size(counts)], 1);
  const auto contiguous_count = [&] {
    const int64_t all[] = {0, 1, count % 3 == 0 ? count / 3 : 0, count % 7 == 0 ? count / 7 : 0};
    return all[random() % 4];
  };
  const bool in = collective == Collective::kAllToAll || collective == Collective::kReduceScatter;
  const bool out = collective == Collective::kAllToAll || collective == Collective::kAllGather;
  if (random() % 2 == 0) drawn.contiguous = {in ? contiguous_count() : 0, out ? contiguous_count() : 0};
  const int64_t shift = random() % 2 == 0 && item < 16 ? item : 0;
  drawn.buffers = PrepareLl(group.memory, group.ranks, group.slots, drawn.request, drawn.contiguous, operation,
                            num_channels, shift, drawn.two_shot);
  for (char* input : drawn.buffers.inputs) Randomize(input, operation.dtype, InputCount(drawn.request) * item, random);
  drawn.expected =
      OnCpu(drawn.two_shot ? "ll_two_shot" : "ll", drawn.request, drawn.contiguous, operation, drawn.buffers.inputs);
  ++num_calls;
  return drawn;
}

// The same calls as plans of the executor, on the same communicator.
VirtualRanks::Call DrawPlanned(Group& group, std::mt19937_64& random) {
  const Algorithm* algorithm = FindAlgorithm(Collective::kAllReduce, random() % 2 == 0 ? "direct" : "ring");
  Request request;
  request.collective = Collective::kAllReduce;
  request.geometry = {1, group.n, true, true};
  request.block_count = 1 + static_cast<int64_t>(random() % 50);
  const auto num_channels = 1 + static_cast<int32_t>(random() % group.num_channels);
  return group.ranks.Prepare(group.memory, Choice(*algorithm, request), request.block_count, {},
                             {DType::kS32, ReduceOp::kSum}, num_channels);
}

void CheckDrawn(const Group& group, const Drawn& drawn, uint64_t seed, size_t place) {
  for (int32_t r = 0; r < group.n; ++r) {
    const Bytes& expected = drawn.expected[r];
    const bool same = std::memcmp(drawn.buffers.outputs[r], expected.data(), expected.size()) == 0;
    if (same && group.report(r).state == device::Report::kNone) continue;
    std::fprintf(
        stderr,
        "%s%s of %d ranks, %lld elements of type %d, operation %d, fragments of %lld and %lld, %d channels, seed %llu, "
        "call %zu: rank %d %s (report: state %llu, step %d, peer %d)\n",
        Name(drawn.request.collective), drawn.two_shot ? " (two-shot)" : "", group.n,
        static_cast<long long>(drawn.request.block_count), static_cast<int>(drawn.operation.dtype),
        static_cast<int>(drawn.operation.op), static_cast<long long>(drawn.contiguous.input),
        static_cast<long long>(drawn.contiguous.output), drawn.buffers.call.num_channels,
        static_cast<unsigned long long>(seed), place, r, same ? "aborted" : "has other bits than the CPU",
        static_cast<unsigned long long>(group.report(r).state), group.report(r).step, group.report(r).peer);
    std::exit(1);
  }
}

// Consecutive calls. In the emulation, ranks run ahead of each other as far as the slots allow.
void RunRow(Group& group, const std::vector<Drawn>& row, uint64_t seed, std::mt19937_64& random) {
  constexpr unsigned kThreadsOfBlocks[] = {1, 3, 8, 32};
  std::vector<MixedCall> calls;
  for (const Drawn& drawn : row) {
    calls.push_back(drawn.buffers.call);
    if (random() % 3 != 0) continue;
    const VirtualRanks::Call planned = DrawPlanned(group, random);
    calls.push_back({nullptr, planned.args, planned.network, planned.num_channels});
  }
  Launch(group.memory.Upload(calls), static_cast<int32_t>(calls.size()), group.num_channels, group.n,
         kThreadsOfBlocks[random() % 4], seed);
  for (size_t i = 0; i < row.size(); ++i) CheckDrawn(group, row[i], seed, i);
}

Operation DrawOperation(std::mt19937_64& random) {
  return {kTypes[random() % std::size(kTypes)], static_cast<ReduceOp>(random() % 3)};
}

void TestRows(uint64_t seed, int32_t n, int length) {
  std::mt19937_64 random(seed);
  Group group(n, 1 + static_cast<int32_t>(random() % 3));
  for (int launch = 0; launch < 2; ++launch) {
    std::vector<Drawn> row;
    for (int i = 0; i < length; ++i) row.push_back(Draw(group, kLl[random() % 4], DrawOperation(random), random));
    RunRow(group, row, seed + launch, random);
  }
}

void TestEveryType(uint64_t seed) {
  std::mt19937_64 random(seed);
  Group group(4, 2);
  for (const Collective collective : kLl) {
    std::vector<Drawn> row;
    for (const DType dtype : kTypes) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
        if (op != ReduceOp::kSum && (!Reduces(collective) || !Ordered(dtype))) continue;
        row.push_back(Draw(group, collective, {dtype, op}, random));
      }
    }
    RunRow(group, row, ++seed, random);
  }
}

// Flags repeat after 2^32 exchanges: flags of that age must be gone.
void TestFlagsThatComeAgain(uint64_t seed) {
  constexpr uint64_t kSwept = device::kExchangesBetweenSweeps / 2;
  std::mt19937_64 random(seed);
  Group group(3, 2);
  // First smaller messages, which leave some slots unchanged; then messages that use all slots.
  for (int32_t r = 0; r < group.n; ++r) {
    for (int32_t channel = 0; channel < group.num_channels; ++channel) group.epoch(r, channel) = kSwept - 3;
  }
  const uint64_t left = kSwept + 4;
  auto* slots = reinterpret_cast<device::LlLine*>(group.slots.pads());
  for (int64_t i = 0; i < group.n * group.slots.pad_bytes() / 16; ++i) {
    slots[i].halves[0] = slots[i].halves[1] = left << 32 | 0x5c5c;
  }
  std::vector<Drawn> row;
  for (int i = 0; i < 10; ++i) {
    Drawn drawn = Draw(group, Collective::kAllReduce, {DType::kF32, ReduceOp::kSum}, random);
    // Exchanges kSwept - 2, ...; the third and the fourth are swept, the seventh is `left`.
    const int64_t count = i == 2 || i == 3 ? 200 : i < 6 ? 1 : 256;
    drawn.request.block_count = count;
    drawn.buffers = PrepareLl(group.memory, group.ranks, group.slots, drawn.request, {}, drawn.operation, 2, 0);
    for (char* input : drawn.buffers.inputs) Randomize(input, DType::kF32, count * 4, random);
    drawn.contiguous = {};
    drawn.two_shot = false;
    drawn.expected = OnCpu("ll", drawn.request, {}, drawn.operation, drawn.buffers.inputs);
    row.push_back(drawn);
  }
  std::vector<MixedCall> calls;
  for (const Drawn& drawn : row) calls.push_back(drawn.buffers.call);
  Launch(group.memory.Upload(calls), static_cast<int32_t>(calls.size()), group.num_channels, group.n, kManyThreads,
         seed);
  for (size_t i = 0; i < row.size(); ++i) CheckDrawn(group, row[i], seed, i);
  CHECK(group.epoch(0, 0) == kSwept + 7);
}

#if !defined(__CUDACC__)
void Run(const Group& group, const std::vector<Drawn>& row, uint64_t seed, int32_t missing, uint64_t late_ns = 0,
         uint64_t abort_ns = 0) {
  const uint64_t begin = emulation::NowNs();
  emulation::Launch(group.num_channels, group.n + 1, 4, seed, [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y), channel = static_cast<int32_t>(blockIdx.x);
    if (rank == group.n) {  // the host
      if (abort_ns == 0 || channel != 0 || threadIdx.x != 0) return;
      while (emulation::NowNs() < begin + abort_ns) emulation::Pause();
      for (int32_t r = 0; r < group.n; ++r) device::StoreRelease(&group.report(r).abort, 1);
      return;
    }
    if (rank == missing) {
      if (late_ns == 0) return;
      while (emulation::NowNs() < begin + late_ns) emulation::Pause();
    }
    for (const Drawn& drawn : row) {
      RunMixed(drawn.buffers.call, rank, channel);
      __syncthreads();
    }
  });
}

std::vector<Drawn> DrawRow(Group& group, int length, std::mt19937_64& random) {
  std::vector<Drawn> row;
  for (int i = 0; i < length; ++i) {
    row.push_back(Draw(group, kLl[random() % 4], {DType::kF32, ReduceOp::kSum}, random));
    for (int32_t r = 0; r < group.n; ++r) row.back().buffers.args[r].comm.call_id = i;
  }
  return row;
}

// One rank does not arrive, or arrives too late. All others report it and take part in nothing afterwards.
void TestMissingRank(uint64_t seed, bool late) {
  constexpr uint64_t kTimeoutNs = 20'000'000;
  std::mt19937_64 random(seed);
  Group group(2 + static_cast<int32_t>(random() % 4), 1 + static_cast<int32_t>(random() % 3), kTimeoutNs);
  const auto missing = static_cast<int32_t>(random() % group.n);
  Run(group, DrawRow(group, 3, random), seed, -1);
  std::vector<uint64_t> before;
  for (int32_t c = 0; c < group.num_channels; ++c) before.push_back(group.epoch(missing, c));
  const std::vector<Drawn> row = DrawRow(group, 3, random);
  const uint64_t begin = emulation::NowNs();
  Run(group, row, seed + 1, missing, late ? 2 * kTimeoutNs : 0);
  CHECK(emulation::NowNs() - begin >= kTimeoutNs && emulation::NowNs() - begin < (late ? 4 : 2) * kTimeoutNs);
  for (int32_t r = 0; r < group.n; ++r) {
    const device::Report& report = group.report(r);
    if (r == missing && !late) {
      CHECK(report.state == device::Report::kNone);
      continue;
    }
    // The late rank receives all messages of the others' last exchange, and none in the next one.
    const uint64_t expected = before[report.channel] + (r == missing ? 2 : 1);
    CHECK(report.state == device::Report::kComplete && report.step == kLlExchange && report.rank == r);
    CHECK(r == missing ? report.peer != r : report.peer == missing);
    CHECK(report.expected == expected && report.seen == expected - 1);
    CHECK(report.channel < group.num_channels && report.call_id < row.size());
  }
  // An aborted channel neither sends nor counts, in any call.
  const Bytes slots(group.slots.pads(), group.slots.pads() + group.n * group.slots.pad_bytes());
  for (int32_t c = 0; c < group.num_channels; ++c) {
    for (int32_t r = 0; r < group.n; ++r) {
      if (r != missing) device::AbortChannel(group.ranks.CommOfNode(r), c);  // the channels that no call had used
    }
  }
  std::vector<uint64_t> epochs;
  for (int32_t r = 0; r < group.n; ++r) epochs.push_back(group.epoch(r, 0));
  const uint64_t again = emulation::NowNs();
  Run(group, row, seed + 2, missing);
  CHECK(emulation::NowNs() - again < kTimeoutNs / 2);
  CHECK(std::memcmp(slots.data(), group.slots.pads(), slots.size()) == 0);
  for (int32_t r = 0; r < group.n; ++r) CHECK(group.epoch(r, 0) == epochs[r]);
}

// The host aborts long before the kernels would.
void TestAbort(uint64_t seed) {
  constexpr uint64_t kTimeoutNs = 100'000'000;
  std::mt19937_64 random(seed);
  Group group(3, 2, kTimeoutNs);
  const uint64_t begin = emulation::NowNs();
  Run(group, DrawRow(group, 2, random), seed, 1, 0, kTimeoutNs / 10);
  CHECK(emulation::NowNs() - begin < kTimeoutNs / 2);
  for (int32_t r = 0; r < group.n; ++r) {
    CHECK((group.report(r).state == device::Report::kComplete) == (r != 1));
    if (r != 1) CHECK(group.report(r).peer == 1 || group.report(r).peer == 2 - r);
  }
}

// All threads of two blocks wait for a rank that does not arrive. A block reads the host's words once per interval, and
// at most once per thread at the end.
void TestHostReads(uint64_t seed) {
  constexpr uint64_t kTimeoutNs = 2'000'000;
  constexpr uint64_t kReadsPerBlock = kTimeoutNs / device::kHostReadIntervalNs + 1;
  std::mt19937_64 random(seed);
  Group group(2, 2, kTimeoutNs);
  Drawn drawn = Draw(group, Collective::kAllReduce, {DType::kF32, ReduceOp::kSum}, random);
  drawn.request.block_count = int64_t{2} * 2 * kUnits;  // a unit per thread
  drawn.buffers =
      PrepareLl(group.memory, group.ranks, group.slots, drawn.request, {}, drawn.operation, group.num_channels, 0);
  emulation::Machine& machine = emulation::TheMachine();
  const uint64_t switch_ns = machine.switch_ns;
  machine.switch_ns = 10;
  machine.counted = &group.report(0).abort;
  machine.num_loads = 0;
  emulation::Launch(2, 1, kUnits, seed, [&] { RunMixed(drawn.buffers.call, 0, static_cast<int32_t>(blockIdx.x)); });
  machine.counted = nullptr;
  machine.switch_ns = switch_ns;
  CHECK(group.report(0).state == device::Report::kComplete);
  CHECK(machine.num_loads >= kReadsPerBlock / 4 && machine.num_loads <= 2 * (kReadsPerBlock + kUnits));
}
#endif

void TestSizes(uint64_t seed, const std::vector<int32_t>& sizes, int repeats) {
  for (const int32_t n : sizes) {
    for (int repeat = 0; repeat < repeats; ++repeat) TestRows(seed += 2, n, n < 9 ? 12 : 4);
  }
}

TEST_CASE("calls in a row") { TestSizes(FirstSeed(), {2, 4, 9}, 3); }

TEST_CASE("flags that repeat") {
  for (int repeat = 0; repeat < 3; ++repeat) TestFlagsThatComeAgain(FirstSeed() + 1000 + repeat);
}

#if !defined(__CUDACC__)
TEST_CASE("a missing or late rank") {
  for (int repeat = 0; repeat < 10; ++repeat) TestMissingRank(FirstSeed() + 2000 + 3 * repeat, repeat % 2 == 1);
}

TEST_CASE("waiting threads read the host's words by the clock") {
  for (int repeat = 0; repeat < 3; ++repeat) TestHostReads(FirstSeed() + 3100 + repeat);
}

TEST_CASE("the host aborts") {
  for (int repeat = 0; repeat < 3; ++repeat) TestAbort(FirstSeed() + 3000 + repeat);
}
#endif

TEST_CASE("calls in a row, groups of all sizes [full]") {
  TestSizes(FirstSeed() + 4000, {1, 2, 3, 4, 5, 6, 7, 8, 9, 17}, 10);
}

TEST_CASE("every type and operation [full]") { TestEveryType(FirstSeed() + 5000); }

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
