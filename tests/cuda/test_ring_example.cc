// The kernel of examples/all_gather_matmul, emulated: products of rows that come along a ring are close to those in
// double precision, in consecutive calls on the same slots.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "../../examples/all_gather_matmul/all_gather_matmul.cuh"
#include "../check.h"
#include "fakes/seed.h"
#include "fakes/virtual_ranks.h"

namespace all_gather_matmul {
namespace {

// The state of a communicator's ranks with an arena, from one call to the next.
struct Node {
  Node(int32_t size, int32_t num_channels, int64_t arena_bytes)
      : reports(memory.Upload(std::vector<device::Report>(size))),
        arena({memory.Take(size * arena_bytes), arena_bytes}) {
    for (int32_t r = 0; r < size; ++r) {
      device::Comm comm;
      comm.world = comm.local = {r, size, 0, 1};
      comm.signals.num_channels = num_channels;  // those of the communicator are not used
      comm.timeout_ns = 50'000'000;
      comm.report = reports + r;
      comm.abort_flag = memory.Upload(std::vector<uint64_t>(1));
      comm.arena = arena;
      comm.arena_bytes = arena_bytes;
      comms.push_back(comm);
    }
  }

  jaxcomm::cuda::HostMemory memory;
  device::Report* const reports;
  const device::Window arena;
  std::vector<device::Comm> comms;
};

device::Comm CommOf(int32_t size, int32_t num_channels) {
  device::Comm comm;
  comm.local = {0, size, 0, 1};
  comm.signals.num_channels = num_channels;
  return comm;
}

// One call: the data of the ranks and the places of the results.
template <typename Codec>
struct Call {
  using Storage = typename Codec::Storage;

  Call(const Node& node, int64_t tokens, int64_t hidden, int64_t columns, std::mt19937_64& random) {
    std::uniform_real_distribution<float> values(-2, 2);
    const auto draw = [&](int64_t count) {
      std::vector<Storage> drawn(count);
      for (Storage& value : drawn) value = Codec::Encode(values(random));
      return drawn;
    };
    for (const device::Comm& comm : node.comms) {
      x.push_back(draw(tokens * hidden));
      w.push_back(draw(hidden * columns));
      Args<Codec> rank = WithArena<Codec>(comm);
      rank.x = memory.Upload(x.back());
      rank.w = memory.Upload(w.back());
      rank.y = memory.Upload(std::vector<Storage>(static_cast<size_t>(comm.local.size * tokens * columns)));
      rank.tokens = tokens;
      rank.hidden = hidden;
      rank.columns = columns;
      args.push_back(rank);
    }
  }

  // One rounding per product and one per addition, and one for the store.
  void Check() const {
    constexpr double kOperation = 0x1p-24, kStore = sizeof(Storage) == 2 ? 0x1p-8 : 0x1p-24;
    const int64_t tokens = args[0].tokens, hidden = args[0].hidden, columns = args[0].columns;
    for (size_t rank = 0; rank < args.size(); ++rank) {
      for (int64_t row = 0; row < tokens * static_cast<int64_t>(args.size()); ++row) {
        const Storage* const from = x[row / tokens].data() + row % tokens * hidden;
        for (int64_t column = 0; column < columns; ++column) {
          double sum = 0, magnitude = 0;
          for (int64_t k = 0; k < hidden; ++k) {
            const double product = double{Codec::Decode(from[k])} * Codec::Decode(w[rank][k * columns + column]);
            sum += product;
            magnitude += std::abs(product);
          }
          const double error = static_cast<double>(hidden + 1) * kOperation * magnitude;
          const double value = Codec::Decode(args[rank].y[row * columns + column]);
          CHECK(std::abs(value - sum) <= error + kStore * (std::abs(sum) + error));
        }
      }
    }
  }

  jaxcomm::cuda::HostMemory memory;
  std::vector<std::vector<Storage>> x, w;  // by rank
  std::vector<Args<Codec>> args;           // by rank
};

// Runs the kernels of the first `num_coming` ranks, one call after the other. args: [call][rank].
template <typename Codec>
void RunAll(const std::vector<const Call<Codec>*>& calls, int32_t num_coming, int32_t channels, unsigned threads,
            uint64_t seed) {
  emulation::Launch(channels, num_coming, threads, seed, [&] {
    for (const Call<Codec>* call : calls) {
      Run(call->args[blockIdx.y]);
      __syncthreads();  // the block has ended before that of the next kernel begins
    }
  });
}

// Calls of changing shape on one arena. Some follow each other without a break, so that ranks are in different calls.
template <typename Codec>
void TestCalls(uint64_t seed, int32_t size) {
  std::mt19937_64 random(seed);
  constexpr int64_t kTokens[] = {0, 1, kTileRows, kTileRows + 1, 3 * kTileRows + 5, 7 * kTileRows};
  constexpr int64_t kHidden[] = {1, 3, 8, 20};
  constexpr int64_t kColumns[] = {0, 1, 5, 9};
  constexpr unsigned kBlocks[] = {2, 3, 4, 8};  // warps
  const auto num_channels = static_cast<int32_t>(1 + random() % 3);
  const Node node(size, num_channels, ArenaBytes<Codec>(CommOf(size, num_channels), 20));
  for (int launch = 0; launch < 2; ++launch) {
    const auto channels = static_cast<int32_t>(1 + random() % num_channels);
    const unsigned threads = kBlocks[random() % std::size(kBlocks)] * device::kWarpThreads;
    std::vector<std::unique_ptr<Call<Codec>>> calls;
    std::vector<const Call<Codec>*> all;
    for (int i = 0; i < 3; ++i) {
      calls.push_back(std::make_unique<Call<Codec>>(node, kTokens[random() % std::size(kTokens)],
                                                    kHidden[random() % std::size(kHidden)],
                                                    kColumns[random() % std::size(kColumns)], random));
      all.push_back(calls.back().get());
      CHECK(FindProblem(calls.back()->args[0], channels) == nullptr);
    }
    RunAll(all, size, channels, threads, ++seed * 1000);
    for (int32_t r = 0; r < size; ++r) CHECK(node.reports[r].state == device::Report::kNone);
    for (const Call<Codec>* call : all) call->Check();
  }
  // No signal is left: each has had its wait. A rank's counts of itself are the states of its channels.
  for (const device::Comm& comm : node.comms) {
    const device::Signals signals = WithArena<Codec>(comm).comm.signals;
    const int64_t count = int64_t{num_channels} * kNumTags * size;
    for (int64_t i = 0; i < count; ++i) {
      if (i % size == comm.local.rank) continue;
      CHECK(signals.pad.At<uint64_t>(comm.local.rank)[i] == signals.received[i]);
    }
  }
}

// The last rank does not arrive. All others end, and at least one of them reports the missing rank.
void TestMissingRank(uint64_t seed, int32_t size) {
  std::mt19937_64 random(seed);
  const Node node(size, 2, ArenaBytes<F32>(CommOf(size, 2), 4));
  const Call<F32> call(node, 5 * kTileRows, 4, 3, random);
  RunAll<F32>({&call}, size - 1, 2, 4, seed);
  for (int32_t r = 0; r + 1 < size; ++r) CHECK(node.reports[r].state == device::Report::kComplete);
  int32_t num_reports = 0;  // about the missing rank; other ranks may wait longest for one of its neighbours
  for (int32_t r = 0; r + 1 < size; ++r) num_reports += node.reports[r].peer == size - 1 ? 1 : 0;
  CHECK(num_reports > 0);
  // Later kernels do not begin: none puts its rows, which differ.
  const Call<F32> later(node, 5 * kTileRows, 4, 3, random);
  const auto bytes = static_cast<size_t>(size * node.arena.stride);
  const std::vector<char> before(node.arena.base, node.arena.base + bytes);
  RunAll<F32>({&later}, size - 1, 2, 4, seed);
  CHECK(std::memcmp(before.data(), node.arena.base, bytes) == 0);
}

TEST_CASE("invalid calls are refused") {
  const Node node(2, 3, ArenaBytes<F32>(CommOf(2, 3), 16));
  std::mt19937_64 random(1);
  const Call<F32> call(node, 5, 16, 2, random);
  const auto problem = [&](void (*spoil)(Args<F32>&), int32_t channels = 3) {
    Args<F32> args = call.args[0];
    spoil(args);
    return FindProblem(args, channels) != nullptr;
  };
  CHECK(!problem([](Args<F32>&) {}));
  CHECK(problem([](Args<F32>&) {}, 0) && problem([](Args<F32>&) {}, 4));
  CHECK(problem([](Args<F32>& args) { args.comm.local.size = 1; }));
  CHECK(problem([](Args<F32>& args) { args.tokens = -1; }));
  CHECK(problem([](Args<F32>& args) { args.hidden = 0; }));
  CHECK(problem([](Args<F32>& args) { args.columns = -1; }));
  CHECK(problem([](Args<F32>& args) { args.hidden = 17; }));
}

TEST_CASE("calls of f32 and bf16") {
  uint64_t seed = jaxcomm::FirstSeed();
  for (const int32_t size : {1, 2, 3, 4, 8}) {
    for (int repeat = 0; repeat < 4; ++repeat) TestCalls<F32>(seed += 10, size);
    for (int repeat = 0; repeat < 2; ++repeat) TestCalls<BF16>(seed += 10, size);
  }
}

TEST_CASE("a missing rank") {
  for (const int32_t size : {2, 3, 5}) TestMissingRank(jaxcomm::FirstSeed() + static_cast<uint64_t>(size), size);
}

}  // namespace
}  // namespace all_gather_matmul
