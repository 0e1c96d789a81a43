// LL messages, and sums through the switch ("multimem"). Collectives have the same bits as on the CPU's executor, in
// long series of calls of all kinds and sizes on the same slots or on the same arena, mixed with plans of the executor.
// Kernels whose peers do not arrive end in time. Emulated, or, without the switch, compiled by nvcc for a GPU. Sums
// through the switch are of integers, so that its order does not matter.
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
#include "../../ffi/cuda/kernels/multimem.cuh"
#include "fakes/emulated.h"
#endif
#include "fakes/node_group.h"
#include "fakes/virtual_ll.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr Collective kLl[] = {Collective::kAllToAll, Collective::kAllGather, Collective::kAllReduce,
                              Collective::kReduceScatter};  // the switch has all but the first
constexpr int32_t kUnits = 64;                              // of slots: enough for all random cases below

bool Ordered(DType dtype) { return FindReduce(dtype, ReduceOp::kMax) != nullptr; }

#if defined(__CUDACC__)
constexpr uint64_t kLimitNs = 10'000'000'000;
constexpr unsigned kManyThreads = 8;
struct MultimemArgs {};
#else
constexpr uint64_t kLimitNs = 1'000'000'000;
constexpr unsigned kManyThreads = 2 * kUnits;  // some have no slot to sweep
#endif
constexpr int64_t kMaxCount = 5003, kMultimemBytes = 8 * (kMaxCount + 1) * 16;  // of multimem calls

// A group of one node whose slots or arena have been used before.
struct Group : NodeGroupIn<TestMemory> {
  Group(int32_t n, int32_t num_channels, uint64_t timeout_ns = kLimitNs, bool multimem = false)
      : NodeGroupIn(n, num_channels, timeout_ns, multimem ? kMultimemBytes : 0, kUnits), multimem(multimem) {
#if !defined(__CUDACC__)
    if (!multimem) return;
    // Not the address of any memory.
    emulation::TheMulticast() = {reinterpret_cast<char*>(uintptr_t{0x10000}), kMultimemBytes, {}};
    for (int32_t r = 0; r < n; ++r) emulation::TheMulticast().replicas.push_back(arena.At(r));
#endif
  }

  uint64_t& epoch(int32_t rank, int32_t channel) const { return slots.Of(rank).epochs[channel]; }
  // The memory that peers write.
  Bytes Shared() const {
    if (multimem) return Bytes(arena.base, arena.base + n * arena.stride);
    return Bytes(slots.pads(), slots.pads() + n * slots.pad_bytes());
  }

  const bool multimem;
};

// One of several consecutive calls: of LL messages, through the switch, or a plan of the executor.
struct Drawn {
  Request request;
  Operation operation;
  ContiguousCounts contiguous;
  bool two_shot = false;
  LlBuffers buffers;
  std::vector<MultimemArgs> multimem;  // by rank
  std::vector<Bytes> expected;         // by rank; none of a plan

  bool IsPlan() const { return expected.empty(); }
};

#if defined(__CUDACC__)
void Launch(const Group& group, const std::vector<Drawn>& row, unsigned threads, uint64_t) {
  std::vector<MixedCall> all;
  for (const Drawn& drawn : row) all.push_back(drawn.buffers.call);
  ManagedMemory memory;
  const MixedCall* calls = memory.Upload(all);
  auto num_calls = static_cast<int32_t>(all.size());
  int32_t repetitions = 1;
  void* parameters[] = {&calls, &num_calls, &repetitions};
  const dim3 grid(group.num_channels, group.n);
  CHECK_CUDA(cudaLaunchCooperativeKernel(RunCalls, grid, dim3(threads * 16), parameters, 0, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
}
#else
// The fault of a run: a missing or late rank, or a host that aborts.
struct Trouble {
  int32_t missing = -1;
  uint64_t late_ns = 0;  // 0: never
  uint64_t abort_ns = 0;
};

// Ranks run ahead of each other as far as the slots, or the entry and exit barriers, allow. Multimem calls of a rank
// begin when all thread blocks of the previous one have ended.
void Launch(const Group& group, const std::vector<Drawn>& row, unsigned threads, uint64_t seed, Trouble trouble = {}) {
  std::vector<uint64_t> ended(group.n);  // thread blocks, by rank
  const uint64_t begin = emulation::NowNs();
  const auto wait_until = [](uint64_t end) {
    while (emulation::NowNs() < end) emulation::Pause();
  };
  emulation::Launch(group.num_channels, group.n + 1, threads, seed, [&] {
    const auto rank = static_cast<int32_t>(blockIdx.y), channel = static_cast<int32_t>(blockIdx.x);
    if (rank == group.n) {  // the host
      if (trouble.abort_ns == 0 || channel != 0 || threadIdx.x != 0) return;
      wait_until(begin + trouble.abort_ns);
      for (int32_t r = 0; r < group.n; ++r) device::StoreRelease(&group.report(r).abort, 1);
      return;
    }
    if (rank == trouble.missing) {
      if (trouble.late_ns == 0) return;
      wait_until(begin + trouble.late_ns);
    }
    uint64_t due = 0;
    for (const Drawn& drawn : row) {
      if (drawn.multimem.empty()) {
        RunMixed(drawn.buffers.call, rank, channel);
      } else if (channel < drawn.multimem[rank].num_channels) {
        MultimemCall(drawn.multimem[rank], channel).Run();
      }
      __syncthreads();
      if (!group.multimem) continue;
      due += gridDim.x;
      if (threadIdx.x == 0) {
        __atomic_fetch_add(&ended[rank], 1, __ATOMIC_ACQ_REL);
        while (device::LoadAcquire(&ended[rank]) < due) emulation::Pause();
      }
      __syncthreads();
    }
  });
}
#endif

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
  return drawn;
}

#if !defined(__CUDACC__)
constexpr DType kSums[] = {DType::kF32, DType::kBF16, DType::kF16};

Drawn DrawMultimem(Group& group, Collective collective, DType dtype, std::mt19937_64& random) {
  Drawn drawn;
  drawn.request.collective = collective;
  drawn.request.geometry = {1, group.n, true, true, true};
  drawn.operation = {dtype, ReduceOp::kSum};
  const int64_t item = ItemBytes(dtype);
  const int64_t counts[] = {1, 2, 3, 7, 8, 9, 21, 64, 130, 1000, 1024, kMaxCount};
  const int64_t count = drawn.request.block_count = counts[random() % std::size(counts)];
  const auto contiguous_count = [&] {
    const int64_t all[] = {0, 1, count % 3 == 0 ? count / 3 : 0, count % 8 == 0 ? count / 8 : 0};
    return all[random() % std::size(all)];
  };
  drawn.contiguous.input = collective == Collective::kReduceScatter ? contiguous_count() : 0;
  drawn.contiguous.output = collective == Collective::kAllGather ? contiguous_count() : 0;
  const int64_t shift = random() % 2 == 0 ? item : 0;
  const auto num_channels = 1 + static_cast<int32_t>(random() % group.num_channels);
  const int64_t input_count = InputCount(drawn.request), output_count = OutputCount(drawn.request);
  std::vector<char*>&inputs = drawn.buffers.inputs, &outputs = drawn.buffers.outputs;
  for (int32_t r = 0; r < group.n; ++r) {
    inputs.push_back(group.memory.Take(input_count * item + shift) + shift);
    outputs.push_back(group.memory.Take(output_count * item + shift) + shift);
    std::memset(outputs[r], 0x5c, output_count * item);
    Randomize(inputs[r], DType::kU8, input_count * item, random);
    for (int64_t i = 0; Reduces(collective) && i < input_count; ++i) {
      const auto number = static_cast<float>(random() % 17) - 8;  // sums of up to 8 ranks are exact in all types
      const uint16_t half = dtype == DType::kBF16 ? BFloat16::Encode(number) : Float16::Encode(number);
      std::memcpy(inputs[r] + item * i, item == 4 ? static_cast<const void*>(&number) : &half, item);
    }
    MultimemArgs args = MakeMultimemArgs(drawn.request, drawn.contiguous, dtype, num_channels);
    args.comm = group.CommOf(r);
    args.comm.arena_multicast = {emulation::TheMulticast().base};
    CHECK(MultimemBytes(args) <= kMultimemBytes);
    drawn.multimem.push_back(WithBuffers(args, inputs[r], outputs[r]));
  }
  drawn.expected = OnCpu("multimem", drawn.request, drawn.contiguous, drawn.operation, inputs);
  return drawn;
}
#endif

// A call of the group's kind, with random collective and type; or of f32 only.
Drawn DrawAny(Group& group, bool of_any_type, std::mt19937_64& random) {
#if !defined(__CUDACC__)
  if (group.multimem) {
    const Collective collective = kLl[1 + random() % 3];
    const DType dtype = Reduces(collective) ? kSums[random() % std::size(kSums)] : kTypes[random() % std::size(kTypes)];
    return DrawMultimem(group, collective, dtype, random);
  }
#endif
  const Operation any = {kTypes[random() % std::size(kTypes)], static_cast<ReduceOp>(random() % 3)};
  return Draw(group, kLl[random() % 4], of_any_type ? any : Operation{DType::kF32, ReduceOp::kSum}, random);
}

// A plan of the executor on the same communicator.
Drawn DrawPlanned(Group& group, std::mt19937_64& random) {
  const Algorithm* algorithm = FindAlgorithm(Collective::kAllReduce, random() % 2 == 0 ? "direct" : "ring");
  Request request;
  request.collective = Collective::kAllReduce;
  request.geometry = {1, group.n, true, true};
  request.block_count = 1 + static_cast<int64_t>(random() % 50);
  const auto num_channels = 1 + static_cast<int32_t>(random() % group.num_channels);
  const VirtualRanks::Call planned = group.ranks.Prepare(group.memory, Choice(*algorithm, request), request.block_count,
                                                         {}, {DType::kS32, ReduceOp::kSum}, num_channels);
  Drawn drawn;
  drawn.buffers.call = {nullptr, planned.args, planned.network, planned.num_channels};
  return drawn;
}

// Runs consecutive calls and compares their results.
void RunRow(Group& group, const std::vector<Drawn>& row, uint64_t seed, unsigned threads) {
  Launch(group, row, threads, seed);
  for (size_t i = 0; i < row.size(); ++i) {
    const Drawn& drawn = row[i];
    for (int32_t r = 0; r < group.n && !drawn.IsPlan(); ++r) {
      const Bytes& expected = drawn.expected[r];
      const bool same = std::memcmp(drawn.buffers.outputs[r], expected.data(), expected.size()) == 0;
      const std::string what = std::string(Name(drawn.request.collective)) +
                               (drawn.two_shot ? " (two-shot) of " : " of ") + std::to_string(group.n) + " ranks";
      CheckRank(same, group.report(r), what, r, seed, i);
    }
  }
}

// Flags repeat after 2^32 exchanges: flags of that age must be gone.
TEST_CASE("flags that repeat") {
  const uint64_t seed = FirstSeed() + 1000;
  constexpr uint64_t kSwept = device::kExchangesBetweenSweeps / 2;
  std::mt19937_64 random(seed);
  Group group(3, 2);
  // First smaller messages, which leave some slots unchanged; then messages that use all slots.
  for (int32_t r = 0; r < group.n; ++r) {
    for (int32_t channel = 0; channel < group.num_channels; ++channel) group.epoch(r, channel) = kSwept - 3;
  }
  auto* slots = reinterpret_cast<device::LlLine*>(group.slots.pads());
  for (int64_t i = 0; i < group.n * group.slots.pad_bytes() / 16; ++i) {
    const uint64_t left = kSwept + 4 + i / (group.n * kUnits) % 2;  // in the sets of even and odd epochs
    slots[i].halves[0] = slots[i].halves[1] = left << 32 | 0x5c5c;
  }
  std::vector<Drawn> row;
  for (int i = 0; i < 10; ++i) {
    Drawn drawn = Draw(group, Collective::kAllReduce, {DType::kF32, ReduceOp::kSum}, random);
    // Exchanges kSwept - 2, ...; the third and the fourth are swept, the flags of the seventh and eighth are left.
    const int64_t count = i == 2 || i == 3 ? 200 : i < 6 ? 1 : 256;
    drawn.request.block_count = count;
    drawn.buffers = PrepareLl(group.memory, group.ranks, group.slots, drawn.request, {}, drawn.operation, 2, 0);
    for (char* input : drawn.buffers.inputs) Randomize(input, DType::kF32, count * 4, random);
    drawn.contiguous = {};
    drawn.two_shot = false;
    drawn.expected = OnCpu("ll", drawn.request, {}, drawn.operation, drawn.buffers.inputs);
    row.push_back(drawn);
  }
  RunRow(group, row, seed, kManyThreads);
  CHECK(group.epoch(0, 0) == kSwept + 7);
}

#if !defined(__CUDACC__)
std::vector<Drawn> DrawRow(Group& group, int length, std::mt19937_64& random) {
  std::vector<Drawn> row;
  for (int i = 0; i < length; ++i) {
    row.push_back(DrawAny(group, false, random));
    for (int32_t r = 0; r < group.n; ++r) {
      if (!group.multimem) row[i].buffers.args[r].comm.call_id = i;
      if (group.multimem) row[i].multimem[r].num_channels = group.num_channels;
      if (group.multimem) row[i].multimem[r].comm.call_id = i;
    }
  }
  return row;
}

// One rank does not arrive, or arrives too late. All others report it, and access nothing afterwards.
void TestMissingRank(uint64_t seed, bool late, bool multimem) {
  constexpr uint64_t kTimeoutNs = 20'000'000;
  std::mt19937_64 random(seed);
  Group group(2 + static_cast<int32_t>(random() % 4), 1 + static_cast<int32_t>(random() % 3), kTimeoutNs, multimem);
  const auto missing = static_cast<int32_t>(random() % group.n);
  Launch(group, DrawRow(group, 3, random), 4, seed);
  std::vector<uint64_t> before;
  for (int32_t c = 0; c < group.num_channels; ++c) before.push_back(group.epoch(missing, c));
  const std::vector<Drawn> row = DrawRow(group, 3, random);
  const uint64_t begin = emulation::NowNs();
  Launch(group, row, 4, seed + 1, {missing, late ? 2 * kTimeoutNs : 0, 0});
  CHECK(emulation::NowNs() - begin >= kTimeoutNs && emulation::NowNs() - begin < (late ? 4 : 2) * kTimeoutNs);
  for (int32_t r = 0; r < group.n; ++r) {
    const device::Report& report = group.report(r);
    if (r == missing && !late) {
      CHECK(report.state == device::Report::kNone);
      continue;
    }
    CHECK(report.state == device::Report::kComplete && report.rank == r);
    CHECK(r == missing ? report.peer != r : report.peer == missing);
    CHECK(report.channel < group.num_channels && report.call_id < row.size());
    // The late rank receives all messages of the others' last exchange, and none in the next one. Through the switch,
    // three calls of two barriers come first; the late rank finds that all others have passed the entry barrier, and
    // waits for them in vain in the exit barrier. No result is copied.
    const uint64_t expected = (multimem ? 6 : before[report.channel]) + (r == missing ? 2 : 1);
    CHECK(report.expected == expected && report.seen == expected - 1);
    CHECK(report.step == (!multimem ? kLlExchange : r == missing ? kExitBarrier : kEntryBarrier));
    if (!multimem) continue;
    const Bytes untouched(OutputCount(row[0].request) * ItemBytes(row[0].operation.dtype), 0x5c);
    CHECK(report.call_id == 0 && std::memcmp(row[0].buffers.outputs[r], untouched.data(), untouched.size()) == 0);
  }
  // An aborted channel neither sends nor counts, in any call.
  const Bytes shared = group.Shared();
  for (int32_t c = 0; c < group.num_channels; ++c) {
    for (int32_t r = 0; r < group.n; ++r) {
      if (!multimem && r != missing)
        device::AbortChannel(group.ranks.CommOfNode(r), c);  // the channels that no call had used
    }
  }
  std::vector<uint64_t> epochs;
  for (int32_t r = 0; r < group.n; ++r) epochs.push_back(group.epoch(r, 0));
  const uint64_t again = emulation::NowNs();
  Launch(group, multimem ? DrawRow(group, 2, random) : row, 4, seed + 2, {missing});
  CHECK(emulation::NowNs() - again < kTimeoutNs / 2);
  CHECK(group.Shared() == shared);
  for (int32_t r = 0; r < group.n; ++r) CHECK(group.epoch(r, 0) == epochs[r]);
}

// The host aborts long before the kernels would.
void TestAbort(uint64_t seed, bool multimem) {
  constexpr uint64_t kTimeoutNs = 100'000'000;
  std::mt19937_64 random(seed);
  Group group(3, 2, kTimeoutNs, multimem);
  const uint64_t begin = emulation::NowNs();
  Launch(group, DrawRow(group, 2, random), 4, seed, {1, 0, kTimeoutNs / 10});
  CHECK(emulation::NowNs() - begin < kTimeoutNs / 2);
  for (int32_t r = 0; r < group.n; ++r) {
    CHECK((group.report(r).state == device::Report::kComplete) == (r != 1));
    if (r != 1) CHECK(group.report(r).peer == 1 || group.report(r).peer == 2 - r);
  }
}

// All threads of two blocks wait for a rank that does not arrive. A block reads the host's words once per interval, and
// at most once per thread at the end.
TEST_CASE("waiting threads read the host's words by the clock") {
  const uint64_t seed = FirstSeed() + 3100;
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

void TestSizes(uint64_t seed, const std::vector<int32_t>& sizes, int repeats, bool multimem = false) {
  constexpr unsigned kThreadsOfBlocks[] = {1, 3, 8, 32};
  for (size_t i = 0; i < sizes.size() * repeats; ++i) {
    std::mt19937_64 random(seed += 2);
    const int32_t n = sizes[i / repeats];
    Group group(n, 1 + static_cast<int32_t>(random() % 3), kLimitNs, multimem);
    for (int launch = 0; launch < 2; ++launch) {
      std::vector<Drawn> row;
      for (int call = 0; call < (multimem ? 6 : n < 9 ? 12 : 4); ++call) {
        row.push_back(DrawAny(group, true, random));
        if (random() % 3 == 0) row.push_back(DrawPlanned(group, random));
      }
      RunRow(group, row, seed + launch, kThreadsOfBlocks[random() % 4]);
    }
  }
}

TEST_CASE("calls in a row") { TestSizes(FirstSeed(), {2, 4, 9}, 3); }

#if !defined(__CUDACC__)
// Also infinities, NaN and large numbers, which no random operand has.
TEST_CASE("sums of all pairs of 8-bit floats") {
  for (const DType dtype : kTypes) {
    if (dtype < DType::kF16 || ItemBytes(dtype) != 1) continue;
    const AnyFloat8 codec(dtype);
    for (int pair = 0; pair < 1 << 16; ++pair) {
      const auto a = static_cast<uint8_t>(pair >> 8), b = static_cast<uint8_t>(pair);
      const void* const sources[] = {&a, &b};
      uint8_t expected;
      FindReduce(dtype, ReduceOp::kSum)(&expected, sources, 2, 1);
      CHECK(codec.Encode(codec.Decode(a) + codec.Decode(b)) == expected);
    }
  }
}

TEST_CASE("calls through the switch in a row") { TestSizes(FirstSeed(), {2, 5}, 3, true); }

TEST_CASE("a missing or late rank") {
  for (int i = 0; i < 20; ++i) TestMissingRank(FirstSeed() + 2000 + 3 * i, i % 2 == 1, i >= 10);
}

TEST_CASE("the host aborts") {
  for (int i = 0; i < 6; ++i) TestAbort(FirstSeed() + 3000 + i, i >= 3);
}

TEST_CASE("calls through the switch in a row, groups of all sizes [full]") {
  TestSizes(FirstSeed() + 4000, {1, 2, 3, 4, 5, 6, 7, 8}, 10, true);
}
#endif

TEST_CASE("calls in a row, groups of all sizes [full]") {
  TestSizes(FirstSeed() + 4000, {1, 2, 3, 4, 5, 6, 7, 8, 9, 17}, 10);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
