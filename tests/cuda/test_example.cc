// The kernel of examples/fused_rmsnorm, emulated or with virtual ranks on one GPU. All ranks get the same bits, close
// to the result in double precision, in consecutive calls on the same window.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../../examples/fused_rmsnorm/fused_rmsnorm.cuh"
#include "../check.h"
#include "fakes/seed.h"
#if defined(__CUDACC__)
#include "gpu/gpu.cuh"
#endif
#include "fakes/node_group.h"

namespace fused_rmsnorm {
namespace {

constexpr float kEpsilon = 1e-6F;

// XLA reuses the memory of x once the kernel has ended: here, this block's part of it.
template <typename Codec>
JAXCOMM_DEVICE void Spoil(const Args<Codec>& args) {
  if (args.out == args.x || threadIdx.x != 0) return;
  const int64_t channel = blockIdx.x, channels = gridDim.x;
  auto* const x = const_cast<typename Codec::Storage*>(args.x);
  const int64_t end = args.tokens * (channel + 1) / channels * args.hidden;
  for (int64_t i = args.tokens * channel / channels * args.hidden; i < end; ++i) x[i] = Codec::Encode(7);
}

#if defined(__CUDACC__)
constexpr uint64_t kTimeoutNs = 2'000'000'000;

using TestMemory = jaxcomm::cuda::ManagedMemory;

// args: [call][rank].
template <typename Codec>
__global__ void __launch_bounds__(kThreads, 1) RunRanks(const Args<Codec>* args, size_t num_calls, size_t num_ranks) {
  for (size_t call = 0; call < num_calls; ++call) {
    Run(args[call * num_ranks + blockIdx.y]);
    __syncthreads();
    Spoil(args[call * num_ranks + blockIdx.y]);
  }
}
#else
constexpr uint64_t kTimeoutNs = 50'000'000;
using TestMemory = jaxcomm::cuda::HostMemory;
#endif

// Runs the kernels of the first `num_coming` of `num_ranks` ranks, one call after the other, with all thread blocks
// resident at once. args: [call][rank].
template <typename Codec>
void RunAll(const std::vector<Args<Codec>>& args, int32_t num_ranks, int32_t num_coming, int32_t channels,
            unsigned threads, [[maybe_unused]] uint64_t seed) {
  size_t num_calls = args.size() / num_ranks;
#if defined(__CUDACC__)
  TestMemory memory;
  const Args<Codec>* uploaded = memory.Upload(args);
  size_t stride = num_ranks;
  void* parameters[] = {&uploaded, &num_calls, &stride};
  CHECK_CUDA(cudaLaunchCooperativeKernel(RunRanks<Codec>, dim3(channels, num_coming), dim3(threads), parameters,
                                         static_cast<size_t>(device::BlockSumBytes(threads)), nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
#else
  emulation::Launch(
      channels, num_coming, threads, seed,
      [&] {
        for (size_t call = 0; call < num_calls; ++call) {
          Run(args[call * num_ranks + blockIdx.y]);
          __syncthreads();  // the block has ended before that of the next kernel begins
          Spoil(args[call * num_ranks + blockIdx.y]);
        }
      },
      device::BlockSumBytes(threads));
#endif
}

// The state of a communicator's ranks, whose arena is the window, from one call to the next.
struct Node : jaxcomm::cuda::NodeGroupIn<TestMemory> {
  Node(int32_t size, int32_t num_channels, int64_t window_bytes)
      : NodeGroupIn(size, num_channels, kTimeoutNs, window_bytes) {
    std::memset(arena.base, 0xff, size * window_bytes);
    for (int32_t r = 0; r < size; ++r) rounds.push_back(memory.Upload(std::vector<uint64_t>(num_channels)));
  }

  template <typename Codec>
  Args<Codec> ArgsOf(int32_t rank) const {
    Args<Codec> args;
    args.comm = CommOf(rank);
    args.window = arena;
    args.window_bytes = arena.stride;
    args.rounds = rounds[rank];
    args.epsilon = kEpsilon;
    return args;
  }

  std::vector<uint64_t*> rounds;  // by rank
};

// One call: the data of the ranks and the places of the results.
template <typename Codec>
struct Call {
  using Storage = typename Codec::Storage;

  // `in_place`: out is x. `reads`: peers read x where it is.
  Call(const Node& node, int64_t tokens, int64_t hidden, bool in_place, bool reads, std::mt19937_64& random) {
    std::uniform_real_distribution<float> values(-2, 2);
    const auto draw = [&](int64_t count) {
      std::vector<Storage> drawn(count);
      for (Storage& value : drawn) value = Codec::Encode(values(random));
      return drawn;
    };
    residual = draw(tokens * hidden);
    weight = draw(hidden);
    for (int32_t r = 0; r < node.n; ++r) {
      x.push_back(draw(tokens * hidden));
      Args<Codec> rank = node.ArgsOf<Codec>(r);
      Storage* const own_x = memory.Upload(x[r]);
      Storage* const own_residual = memory.Upload(residual);
      rank.x = own_x;
      rank.residual = own_residual;
      rank.weight = memory.Upload(weight);
      rank.out = in_place ? own_x : memory.Upload(x[r]);
      rank.new_residual = in_place ? own_residual : memory.Upload(residual);
      rank.tokens = tokens;
      rank.hidden = hidden;
      args.push_back(rank);
    }
    if (in_place || !reads) return;
    const auto address = [&](int32_t r) { return reinterpret_cast<intptr_t>(args[r].x); };
    std::vector<int64_t> places;
    for (int32_t r = 0; r < node.n; ++r) places.push_back(address(r) - address(0) - 64 * r);
    char* const base = reinterpret_cast<char*>(address(0));
    for (Args<Codec>& rank : args) rank.x_of = {{base, 64}, memory.Upload(places)};
  }

  void Check() const {
    const Args<Codec>& first = args[0];
    const auto bytes = static_cast<size_t>(first.tokens * RowBytes(first));
    for (const Args<Codec>& rank : args) {
      CHECK(std::memcmp(rank.out, first.out, bytes) == 0);
      CHECK(std::memcmp(rank.new_residual, first.new_residual, bytes) == 0);
    }
    for (int64_t i = 0; i < first.tokens * first.hidden; ++i) CheckResidual(i);
    for (int64_t token = 0; token < first.tokens; ++token) CheckOut(token);
  }

  // In the order of the ranks.
  void CheckResidual(int64_t i) const {
    float sum = Codec::Decode(residual[i]);
    for (const std::vector<Storage>& part : x) sum += Codec::Decode(part[i]);
    CHECK(args[0].new_residual[i] == Codec::Encode(sum));
  }

  // From the new residual as it is stored. Relative errors: of the sum of `hidden` positive terms at most one rounding
  // per term and one for its square; the square root halves that. Then mean, epsilon, root, quotient and two products.
  void CheckOut(int64_t token) const {
    const Args<Codec>& first = args[0];
    const Storage* row = first.new_residual + token * first.hidden;
    double squares = 0;
    for (int64_t i = 0; i < first.hidden; ++i) squares += std::pow(Codec::Decode(row[i]), 2);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(first.hidden) + kEpsilon);
    const double tolerance = (static_cast<double>(first.hidden + 1) / 2 + 6) * kAddition + kStore;
    for (int64_t i = 0; i < first.hidden; ++i) {
      const double expected = Codec::Decode(row[i]) * scale * Codec::Decode(weight[i]);
      const double value = Codec::Decode(first.out[token * first.hidden + i]);
      CHECK(std::abs(value - expected) <= 1.01 * tolerance * std::abs(expected));
    }
  }

  static constexpr double kAddition = 0x1p-24;                               // f32, round to nearest
  static constexpr double kStore = sizeof(Storage) == 2 ? 0x1p-8 : 0x1p-24;  // bf16, round to nearest

  TestMemory memory;
  std::vector<Storage> residual, weight;
  std::vector<std::vector<Storage>> x;  // by rank
  std::vector<Args<Codec>> args;        // by rank
};

template <typename Codec>
void LaunchAll(const Node& node, const std::vector<Call<Codec>>& calls, int32_t channels, unsigned threads,
               uint64_t seed) {
  std::vector<Args<Codec>> args;
  for (const Call<Codec>& call : calls) {
    CHECK(FindProblem(call.args[0], channels) == nullptr);
    args.insert(args.end(), call.args.begin(), call.args.end());
  }
  RunAll(args, node.n, node.n, channels, threads, seed);
  for (int32_t r = 0; r < node.n; ++r) CHECK(node.report(r).state == device::Report::kNone);
  for (const Call<Codec>& call : calls) call.Check();
}

// Calls of changing shape on a window that holds two to seven of the widest rows per channel: calls take no, one or
// many rounds. Some calls follow each other without a break, so that ranks are in different calls.
template <typename Codec>
void TestCalls(uint64_t seed, int32_t size) {
  std::mt19937_64 random(seed);
  constexpr int64_t kHidden[] = {1, 7, 32, 61, 128, 130};
  constexpr int64_t kTokens[] = {0, 1, 2, 5, 16};
  constexpr unsigned kBlocks[] = {1, 2, 3, 8, 33, 70};
  const auto num_channels = static_cast<int32_t>(1 + random() % 3);
  const int64_t widest = kHidden[random() % std::size(kHidden)];
  const auto row_bytes = static_cast<int64_t>(widest * sizeof(typename Codec::Storage));
  const auto more_rows = static_cast<int64_t>(random() % 6);
  const int64_t window_bytes = num_channels * (2 * ((row_bytes + 15) / 16 * 16) + more_rows * row_bytes);
  const Node node(size, num_channels, window_bytes);
  for (int launch = 0; launch < 3; ++launch) {
    const auto channels = static_cast<int32_t>(1 + random() % num_channels);
    const unsigned threads = kBlocks[random() % std::size(kBlocks)];
    std::vector<Call<Codec>> calls;
    for (int i = 0; i < 4; ++i) {
      const int64_t hidden = random() % 2 == 0 ? widest : 1 + static_cast<int64_t>(random() % widest);
      const bool in_place = random() % 2 == 0, reads = random() % 2 == 0;
      calls.emplace_back(node, kTokens[random() % std::size(kTokens)], hidden, in_place, reads, random);
    }
    LaunchAll(node, calls, channels, threads, ++seed * 1000);
  }
}

// The last rank does not arrive. All others end and report the missing rank.
void TestMissingRank(uint64_t seed, int32_t size) {
  std::mt19937_64 random(seed);
  const Node node(size, 2, 1024);
  const bool reads = seed % 2 == 0;
  const Call<F32> call(node, 8, 16, false, reads, random);
  RunAll(call.args, size, size - 1, 2, 8, seed);
  for (int32_t r = 0; r + 1 < size; ++r) {
    const device::Report& report = node.report(r);
    CHECK(report.state == device::Report::kComplete && report.rank == r && report.peer == size - 1);
  }
  // Later runs leave the window unchanged, because a late rank may still read it.
  const auto bytes = static_cast<size_t>(size * node.arena.stride);
  const std::vector<char> before(node.arena.base, node.arena.base + bytes);
  const Call<F32> next(node, 8, 16, false, reads, random);
  RunAll(next.args, size, size - 1, 2, 8, seed);
  CHECK(std::memcmp(before.data(), node.arena.base, bytes) == 0);
}

TEST_CASE("invalid calls are refused") {
  const Node node(2, 3, 3 * 2 * 64);
  static const int64_t place = 0;
  static float data[2];
  using Change = void (*)(Args<F32>&);
  const auto problem = [&](int32_t channels, Change change = nullptr) {
    Args<F32> args = node.ArgsOf<F32>(0);
    args.tokens = 5;
    args.hidden = 16;
    if (change != nullptr) change(args);
    return FindProblem(args, channels) != nullptr;
  };
  CHECK(!problem(3) && problem(0) && problem(4));
  for (const Change change :
       {Change{[](Args<F32>& args) { args.comm.local.size = 1; }}, Change{[](Args<F32>& args) { args.tokens = -1; }},
        Change{[](Args<F32>& args) { args.hidden = 0; }}, Change{[](Args<F32>& args) { args.hidden = 17; }}}) {
    CHECK(problem(3, change));
  }
  // Peers read x in place: the window is not used, and out is other memory.
  const auto in_place = [](Args<F32>& args) { args.hidden = 17, args.x_of.places = &place, args.x = args.out = data; };
  CHECK(problem(3, in_place));
  CHECK(!problem(
      3, [](Args<F32>& args) { args.hidden = 17, args.x_of.places = &place, args.x = data, args.out = data + 1; }));
}

TEST_CASE("calls of f32 and bf16") {
  uint64_t seed = jaxcomm::FirstSeed();
  for (int32_t size = 1; size <= 8; ++size) {
    for (int repeat = 0; repeat < 4; ++repeat) TestCalls<F32>(seed += 10, size), TestCalls<BF16>(seed + 1000, size);
  }
}

TEST_CASE("a missing rank") {
  uint64_t seed = jaxcomm::FirstSeed();
  for (const int32_t size : {2, 3, 8, 2}) TestMissingRank(++seed, size);
}

}  // namespace
}  // namespace fused_rmsnorm
