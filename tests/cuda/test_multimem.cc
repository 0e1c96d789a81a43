// Multimem calls, emulated: results of long series of calls of all kinds and sizes on the same arena, mixed with
// planned plans. Kernels whose peers do not arrive end in time. The data are integers, so that the switch's order does
// not matter.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "../../ffi/cuda/kernels/multimem.cuh"
#include "../../ffi/cuda/program/call_program.h"
#include "../../ffi/plan/algorithms.h"
#include "../check.h"
#include "fakes/all_types.h"
#include "fakes/emulated.h"
#include "fakes/on_cpu.h"
#include "fakes/seed.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr Collective kCollectives[] = {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather};
constexpr DType kSums[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr int64_t kMaxCount = 5003;
constexpr uint64_t kDeadlineNs = 1'000'000'000;

// A group of one node, with an arena that has a multicast address.
struct Group {
  Group(int32_t n, int32_t num_channels, uint64_t timeout_ns = kDeadlineNs)
      : n(n), num_channels(num_channels), ranks(memory, {1, n, true, true}, num_channels, timeout_ns) {
    arena_bytes = n * (kMaxCount + 1) * 16;
    arena = {memory.Take(n * arena_bytes), arena_bytes};
    emulation::Multicast& multicast = emulation::TheMulticast();
    multicast.base = reinterpret_cast<char*>(uintptr_t{0x10000});  // not the address of any memory
    multicast.bytes = arena_bytes;
    multicast.replicas.clear();
    for (int32_t r = 0; r < n; ++r) multicast.replicas.push_back(arena.At(r));
  }

  device::Report& report(int32_t rank) const { return ranks.reports()[rank]; }
  Bytes Arena(int32_t rank) const { return Bytes(arena.At(rank), arena.At(rank) + arena_bytes); }

  HostMemory memory;
  const int32_t n, num_channels;
  const VirtualRanks ranks;
  device::Window arena;
  int64_t arena_bytes = 0;
};

// One of several consecutive calls: a multimem call or a plan of the executor.
struct Drawn {
  Request request;
  Operation operation;
  ContiguousCounts contiguous;
  std::vector<MultimemArgs> args;  // by rank
  std::vector<char*> inputs, outputs;
  std::vector<Bytes> expected;
  VirtualRanks::Call planned;
};

void RunCall(const Drawn& drawn, int32_t rank, int32_t channel) {
  if (drawn.args.empty()) {
    if (channel >= drawn.planned.num_channels) return;
    PeerNetwork network(drawn.planned.network[rank]);
    ChannelExecutor<PeerNetwork>(drawn.planned.args[rank], network, channel).Run();
  } else if (channel < drawn.args[rank].num_channels) {
    MultimemCall(drawn.args[rank], channel).Run();
  }
}

// A rank's kernels in sequence: each begins when all thread blocks of the previous one have ended.
class Stream {
 public:
  Stream(const Group& group, const std::vector<Drawn>& row) : row_(row), ended_(group.n) {}

  void Run(int32_t rank, int32_t channel) {
    uint64_t due = 0;
    for (const Drawn& drawn : row_) {
      RunCall(drawn, rank, channel);
      __syncthreads();
      due += gridDim.x;
      if (threadIdx.x == 0) {
        __atomic_fetch_add(&ended_[rank], 1, __ATOMIC_ACQ_REL);
        while (device::LoadAcquire(&ended_[rank]) < due) emulation::Pause();
      }
      __syncthreads();
    }
  }

 private:
  const std::vector<Drawn>& row_;
  std::vector<uint64_t> ended_;  // thread blocks, by rank
};

// Sums of up to 8 ranks are exact in all types.
void FillWithWholeNumbers(char* values, DType dtype, int64_t count, std::mt19937_64& random) {
  for (int64_t i = 0; i < count; ++i) {
    const auto number = static_cast<float>(random() % 17) - 8;
    if (dtype == DType::kF32) std::memcpy(values + 4 * i, &number, 4);
    const uint16_t half = dtype == DType::kBF16 ? BFloat16::Encode(number) : Float16::Encode(number);
    if (dtype != DType::kF32) std::memcpy(values + 2 * i, &half, 2);
  }
}

Drawn Draw(Group& group, Collective collective, DType dtype, std::mt19937_64& random) {
  Drawn drawn;
  drawn.request.collective = collective;
  drawn.request.geometry = {1, group.n, true, true, true};
  drawn.operation = {dtype, ReduceOp::kSum};
  const int64_t item = ItemBytes(dtype);
  const int64_t counts[] = {1, 2, 3, 7, 8, 9, 21, 64, 130, 1000, 1024, kMaxCount};
  const int64_t count = counts[random() % std::size(counts)];
  drawn.request.block_count = count;
  const auto contiguous_count = [&] {
    const int64_t all[] = {0, 1, count % 3 == 0 ? count / 3 : 0, count % 8 == 0 ? count / 8 : 0};
    return all[random() % std::size(all)];
  };
  drawn.contiguous.input = collective == Collective::kReduceScatter ? contiguous_count() : 0;
  drawn.contiguous.output = collective == Collective::kAllGather ? contiguous_count() : 0;
  const int64_t shift = random() % 2 == 0 ? item : 0;
  const int64_t input_count = InputCount(drawn.request), output_count = OutputCount(drawn.request);
  for (int32_t r = 0; r < group.n; ++r) {
    drawn.inputs.push_back(group.memory.Take(input_count * item + shift) + shift);
    drawn.outputs.push_back(group.memory.Take(output_count * item + shift) + shift);
    std::memset(drawn.outputs[r], 0x5c, output_count * item);
    if (Reduces(collective)) {
      FillWithWholeNumbers(drawn.inputs[r], dtype, input_count, random);
    } else {
      for (int64_t i = 0; i < input_count * item; ++i) drawn.inputs[r][i] = static_cast<char>(random());
    }
  }
  const auto num_channels = 1 + static_cast<int32_t>(random() % group.num_channels);
  for (int32_t r = 0; r < group.n; ++r) {
    MultimemArgs args = MakeMultimemArgs(drawn.request, drawn.contiguous, dtype, num_channels);
    args.comm = group.ranks.CommOfNode(r);
    args.comm.arena = group.arena;
    args.comm.arena_bytes = group.arena_bytes;
    args.comm.arena_multicast = {emulation::TheMulticast().base};
    CHECK(MultimemBytes(args) <= group.arena_bytes);
    drawn.args.push_back(WithBuffers(args, drawn.inputs[r], drawn.outputs[r]));
  }
  drawn.expected = OnCpu("multimem", drawn.request, drawn.contiguous, drawn.operation, drawn.inputs);
  return drawn;
}

Drawn DrawAny(Group& group, std::mt19937_64& random) {
  const Collective collective = kCollectives[random() % std::size(kCollectives)];
  const DType dtype = Reduces(collective) ? kSums[random() % std::size(kSums)] : kTypes[random() % std::size(kTypes)];
  return Draw(group, collective, dtype, random);
}

// A plan of the executor on the same communicator.
Drawn DrawPlanned(Group& group, std::mt19937_64& random) {
  const Algorithm* algorithm = FindAlgorithm(Collective::kAllReduce, random() % 2 == 0 ? "direct" : "ring");
  Request request;
  request.collective = Collective::kAllReduce;
  request.geometry = {1, group.n, true, true};
  request.block_count = 1 + static_cast<int64_t>(random() % 50);
  const auto num_channels = 1 + static_cast<int32_t>(random() % group.num_channels);
  Drawn drawn;
  drawn.planned = group.ranks.Prepare(group.memory, Choice(*algorithm, request), request.block_count, {},
                                      {DType::kF32, ReduceOp::kSum}, num_channels);
  return drawn;
}

void CheckDrawn(const Group& group, const Drawn& drawn, uint64_t seed, size_t place) {
  for (int32_t r = 0; r < group.n && !drawn.args.empty(); ++r) {
    const Bytes& expected = drawn.expected[r];
    const bool same = std::memcmp(drawn.outputs[r], expected.data(), expected.size()) == 0;
    if (same && group.report(r).state == device::Report::kNone) continue;
    std::fprintf(
        stderr,
        "%s of %d ranks, %lld elements of type %d, fragments of %lld and %lld, %d channels, seed %llu, call %zu: rank "
        "%d %s\n",
        Name(drawn.request.collective), group.n, static_cast<long long>(drawn.request.block_count),
        static_cast<int>(drawn.operation.dtype), static_cast<long long>(drawn.contiguous.input),
        static_cast<long long>(drawn.contiguous.output), drawn.args[r].num_channels,
        static_cast<unsigned long long>(seed), place, r, same ? "aborted" : "has another result");
    std::exit(1);
  }
}

// Ranks run ahead of each other, as far as the entry and exit barriers allow.
void RunRow(const Group& group, const std::vector<Drawn>& row, uint64_t seed, unsigned threads) {
  Stream stream(group, row);
  emulation::Launch(static_cast<unsigned>(group.num_channels), static_cast<unsigned>(group.n), threads, seed,
                    [&] { stream.Run(static_cast<int32_t>(blockIdx.y), static_cast<int32_t>(blockIdx.x)); });
  for (size_t i = 0; i < row.size(); ++i) CheckDrawn(group, row[i], seed, i);
}

void TestRows(uint64_t seed, int32_t n, int length) {
  constexpr unsigned kThreadsOfBlocks[] = {1, 3, 8, 32};
  std::mt19937_64 random(seed);
  Group group(n, 1 + static_cast<int32_t>(random() % 3));
  for (int launch = 0; launch < 2; ++launch) {
    std::vector<Drawn> row;
    for (int i = 0; i < length; ++i) {
      row.push_back(random() % 4 == 0 ? DrawPlanned(group, random) : DrawAny(group, random));
    }
    RunRow(group, row, seed + launch, kThreadsOfBlocks[random() % std::size(kThreadsOfBlocks)]);
  }
}

void TestEveryType(uint64_t seed) {
  std::mt19937_64 random(seed);
  Group group(4, 2);
  std::vector<Drawn> row;
  for (const DType dtype : kTypes) row.push_back(Draw(group, Collective::kAllGather, dtype, random));
  for (const DType dtype : kSums) {
    row.push_back(Draw(group, Collective::kAllReduce, dtype, random));
    row.push_back(Draw(group, Collective::kReduceScatter, dtype, random));
  }
  RunRow(group, row, seed, 8);
}

// The fault of a run: a missing or late rank, or a host that aborts.
struct Trouble {
  int32_t missing = -1;
  uint64_t late_ns = 0;  // 0: never
  uint64_t abort_ns = 0;
};

void RunInTrouble(const Group& group, const std::vector<Drawn>& row, uint64_t seed, Trouble trouble) {
  Stream stream(group, row);
  const uint64_t begin = emulation::NowNs();
  const auto wait_until = [](uint64_t end) {
    while (emulation::NowNs() < end) emulation::Pause();
  };
  emulation::Launch(static_cast<unsigned>(group.num_channels), static_cast<unsigned>(group.n) + 1, 4, seed, [&] {
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
    stream.Run(rank, channel);
  });
}

std::vector<Drawn> DrawRow(Group& group, int length, std::mt19937_64& random) {
  std::vector<Drawn> row;
  for (int i = 0; i < length; ++i) {
    row.push_back(DrawAny(group, random));
    for (int32_t r = 0; r < group.n; ++r) {
      row[i].args[r].num_channels = group.num_channels;
      row[i].args[r].comm.call_id = i;
    }
  }
  return row;
}

// One rank does not arrive, or arrives too late. All others report it, copy no result, and access nothing afterwards.
void TestMissingRank(uint64_t seed, bool late) {
  constexpr uint64_t kTimeoutNs = 20'000'000;
  std::mt19937_64 random(seed);
  Group group(2 + static_cast<int32_t>(random() % 4), 1 + static_cast<int32_t>(random() % 3), kTimeoutNs);
  RunInTrouble(group, DrawRow(group, 3, random), seed, {});
  const auto missing = static_cast<int32_t>(random() % group.n);
  const std::vector<Drawn> row = DrawRow(group, 3, random);
  const uint64_t begin = emulation::NowNs();
  RunInTrouble(group, row, seed + 1, {missing, late ? 2 * kTimeoutNs : 0, 0});
  CHECK(emulation::NowNs() - begin >= kTimeoutNs && emulation::NowNs() - begin < (late ? 4 : 2) * kTimeoutNs);
  for (int32_t r = 0; r < group.n; ++r) {
    const device::Report& report = group.report(r);
    if (r == missing && !late) {
      CHECK(report.state == device::Report::kNone);
      continue;
    }
    // Three calls of two barriers come first. The late rank finds that all others have passed the entry barrier, and
    // waits for them in vain in the exit barrier.
    CHECK(report.state == device::Report::kComplete && report.rank == r && report.call_id == 0);
    CHECK(report.step == (r == missing ? kExitBarrier : kEntryBarrier));
    CHECK(r == missing ? report.peer != r : report.peer == missing);
    CHECK(report.expected == (r == missing ? 8 : 7) && report.seen == report.expected - 1);
    CHECK(report.channel < group.num_channels);
    const Bytes untouched(OutputCount(row[0].request) * ItemBytes(row[0].operation.dtype), 0x5c);
    CHECK(std::memcmp(row[0].outputs[r], untouched.data(), untouched.size()) == 0);
  }
  std::vector<Bytes> arenas;
  for (int32_t r = 0; r < group.n; ++r) arenas.push_back(group.Arena(r));
  const std::vector<Drawn> more = DrawRow(group, 2, random);
  const uint64_t again = emulation::NowNs();
  RunInTrouble(group, more, seed + 2, {missing, 0, 0});
  CHECK(emulation::NowNs() - again < kTimeoutNs / 2);
  for (int32_t r = 0; r < group.n; ++r) CHECK(group.Arena(r) == arenas[r]);
}

// The host aborts long before the kernels would.
void TestAbort(uint64_t seed) {
  constexpr uint64_t kTimeoutNs = 100'000'000;
  std::mt19937_64 random(seed);
  Group group(3, 2, kTimeoutNs);
  const uint64_t begin = emulation::NowNs();
  RunInTrouble(group, DrawRow(group, 2, random), seed, {1, 0, kTimeoutNs / 10});
  CHECK(emulation::NowNs() - begin < kTimeoutNs / 2);
  for (int32_t r = 0; r < group.n; ++r) {
    CHECK((group.report(r).state == device::Report::kComplete) == (r != 1));
    if (r != 1) CHECK(group.report(r).peer == 1 || group.report(r).peer == 2 - r);
  }
}

void TestSizes(uint64_t seed, const std::vector<int32_t>& sizes, int repeats) {
  for (const int32_t n : sizes) {
    for (int repeat = 0; repeat < repeats; ++repeat) TestRows(seed += 2, n, 8);
  }
}

TEST_CASE("calls in a row") { TestSizes(FirstSeed(), {2, 5}, 3); }

TEST_CASE("every type") { TestEveryType(FirstSeed() + 1000); }

TEST_CASE("a missing or late rank") {
  for (int repeat = 0; repeat < 10; ++repeat) TestMissingRank(FirstSeed() + 2000 + 3 * repeat, repeat % 2 == 1);
}

TEST_CASE("the host aborts") {
  for (int repeat = 0; repeat < 3; ++repeat) TestAbort(FirstSeed() + 3000 + repeat);
}

TEST_CASE("calls in a row, groups of all sizes [full]") { TestSizes(FirstSeed() + 4000, {1, 2, 3, 4, 5, 6, 7, 8}, 10); }

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
