// The kernels of examples/all_gather_matmul, emulated, in a node and over nodes, whose network guarantees no more than
// GIN: products of rows that come along a ring are close to those in double precision, in consecutive calls on the same
// slots.
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "fakes/gin_cluster.h"
#include "../../examples/all_gather_matmul/node_ring.cuh"
// clang-format on
#include "../../examples/all_gather_matmul/all_gather_matmul.cuh"
#include "../check.h"
#include "fakes/seed.h"

namespace all_gather_matmul {
namespace {

using jaxcomm::cuda::GinCluster;
using jaxcomm::cuda::kGinTimeoutNs;

constexpr int64_t kMostHidden = 20;

template <typename Codec, bool kNodes>
int64_t BytesOfArena(const device::Comm& sizes) {
  if constexpr (kNodes) return NodeArenaBytes<Codec>(sizes, kMostHidden);
  return ArenaBytes<Codec>(sizes, kMostHidden);
}

template <typename Codec, bool kNodes>
std::unique_ptr<GinCluster> MakeCluster(int32_t num_nodes, int32_t ranks_per_node, int32_t num_channels, uint64_t seed,
                                        uint64_t timeout_ns = kGinTimeoutNs) {
  device::Comm sizes;
  sizes.local = {0, ranks_per_node, 0, 1};
  sizes.signals.num_channels = num_channels;
  return std::make_unique<GinCluster>(num_nodes, ranks_per_node, num_channels, BytesOfArena<Codec, kNodes>(sizes), seed,
                                      timeout_ns);
}

// One call: the data of the ranks and the places of the results. kNodes: of the kernel over nodes.
template <typename Codec, bool kNodes>
struct Call {
  using Storage = typename Codec::Storage;

  Call(const GinCluster& cluster, int64_t tokens, int64_t hidden, int64_t columns, std::mt19937_64& random) {
    std::uniform_real_distribution<float> values(-2, 2);
    const auto draw = [&](int64_t count) {
      std::vector<Storage> drawn(count);
      for (Storage& value : drawn) value = Codec::Encode(values(random));
      return drawn;
    };
    for (int32_t r = 0; r < cluster.n; ++r) {
      x.push_back(draw(tokens * hidden));
      w.push_back(draw(hidden * columns));
      if constexpr (kNodes) {
        args.push_back(WithArena<Codec>(cluster.comms[r], cluster.handles[r]));
      } else {
        args.push_back(WithArena<Codec>(cluster.comms[r]));
      }
      args[r].x = memory.Upload(x.back());
      args[r].w = memory.Upload(w.back());
      args[r].y = memory.Upload(std::vector<Storage>(static_cast<size_t>(cluster.n * tokens * columns)));
      args[r].tokens = tokens;
      args[r].hidden = hidden;
      args[r].columns = columns;
    }
  }

  void Run(int32_t rank, const ncclDevComm& nccl_comm) const {
    if constexpr (kNodes) {
      RunOnNodes(args[rank], nccl_comm);
    } else {
      all_gather_matmul::Run(args[rank]);
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
  std::vector<std::vector<Storage>> x, w;
  std::vector<std::conditional_t<kNodes, NodeArgs<Codec>, Args<Codec>>> args;  // by rank
};

bool Failed(const GinCluster& cluster, int32_t rank) {
  return cluster.reports[rank].state == device::Report::kComplete;
}

// Calls of changing shape on one arena, one after the other without a break, so that ranks are in different calls.
template <typename Codec, bool kNodes>
void TestCalls(uint64_t seed, int32_t num_nodes, int32_t ranks_per_node) {
  std::mt19937_64 random(seed);
  constexpr int64_t kTokens[] = {0, 1, kTileRows, kTileRows + 1, 3 * kTileRows + 5, 7 * kTileRows};
  constexpr int64_t kHidden[] = {1, 3, 8, kMostHidden};
  constexpr int64_t kColumns[] = {0, 1, 5, 9};
  constexpr unsigned kWarps[] = {2, 3, 4, 8};
  const auto most_blocks = static_cast<int32_t>(1 + random() % (kNodes ? 2 : 3));
  const int32_t num_channels = kNodes ? kNumKinds * most_blocks + static_cast<int32_t>(random() % 2) : most_blocks;
  const auto cluster = MakeCluster<Codec, kNodes>(num_nodes, ranks_per_node, num_channels, seed, 10 * kGinTimeoutNs);
  for (int launch = 0; launch < 2; ++launch) {
    const auto blocks = static_cast<int32_t>(1 + random() % most_blocks);
    std::vector<std::unique_ptr<Call<Codec, kNodes>>> calls;
    for (int i = 0; i < 3; ++i) {
      calls.push_back(std::make_unique<Call<Codec, kNodes>>(*cluster, kTokens[random() % 6], kHidden[random() % 4],
                                                            kColumns[random() % 4], random));
      CHECK(FindProblem(calls.back()->args[0], blocks) == nullptr);
    }
    const unsigned threads = kNodes ? 3 : kWarps[random() % 4] * device::kWarpThreads;
    cluster->Launch(blocks, threads, ++seed, [&](int32_t rank, const ncclDevComm& nccl_comm) {
      for (const auto& call : calls) {
        for (int i = static_cast<int>((seed + 7 * rank) % 5) * 20; i > 0; --i) emulation::Pause();  // late ranks
        call->Run(rank, nccl_comm);
        __syncthreads();  // the block has ended before that of the next kernel begins
      }
    });
    CHECK(cluster->all_well());
    for (const auto& call : calls) call->Check();
  }
  // No signal is left: each has had its wait.
  for (const device::Comm& comm : cluster->comms) {
    if constexpr (!kNodes) {
      const device::Signals signals = WithArena<Codec>(comm).comm.signals;
      const int64_t count = int64_t{num_channels} * kNumTags * comm.local.size;
      for (int64_t i = 0; i < count; ++i) {
        const bool own = i % comm.local.size == comm.local.rank;  // the state of the channel
        CHECK(own || signals.pad.At<uint64_t>(comm.local.rank)[i] == signals.received[i]);
      }
    }
  }
}

TEST_CASE("calls of f32 and bf16") {
  uint64_t seed = jaxcomm::FirstSeed();
  for (const int32_t size : {1, 2, 3, 4, 8}) {
    for (int repeat = 0; repeat < 4; ++repeat) TestCalls<F32, false>(seed += 10, 1, size);
    for (int repeat = 0; repeat < 2; ++repeat) TestCalls<BF16, false>(seed += 10, 1, size);
  }
}

TEST_CASE("calls over nodes") {
  uint64_t seed = jaxcomm::FirstSeed();
  for (int repeat = 0; repeat < 12; ++repeat) {
    for (const auto& [num_nodes, ranks_per_node] :
         {std::pair{2, 2}, std::pair{3, 1}, std::pair{2, 4}, std::pair{2, 1}, std::pair{1, 3}, std::pair{1, 1}}) {
      TestCalls<F32, true>(seed += 2, num_nodes, ranks_per_node);
    }
  }
}

// A rank does not arrive, or the network stops before the call or in it. All others end, in time; at least one of them
// names the missing rank: others may wait longest for one of its neighbours. Later kernels do not begin: none puts its
// rows, which differ.
template <bool kNodes>
void TestTrouble(uint64_t seed, int32_t num_nodes, int32_t ranks_per_node, int32_t missing) {
  std::mt19937_64 random(seed);
  const auto cluster = MakeCluster<F32, kNodes>(num_nodes, ranks_per_node, 2, seed);
  const Call<F32, kNodes> call(*cluster, 40 * kTileRows, 4, 3, random), later(*cluster, 40 * kTileRows, 4, 3, random);
  const int32_t blocks = kNodes ? 1 : 2;
  const uint64_t begin = emulation::NowNs();
  cluster->Launch(blocks, 4, seed, [&](int32_t rank, const ncclDevComm& nccl_comm) {
    if (rank == missing) return;
    if (missing < 0 && rank == 0 && threadIdx.x == 0) {
      for (uint64_t i = 0; i < 40 * (seed - 1); ++i) emulation::Pause();
      cluster->network.Stall();
    }
    call.Run(rank, nccl_comm);
  });
  const auto bytes = static_cast<size_t>(cluster->n * cluster->arenas.stride);
  const std::vector<char> before(cluster->arenas.base, cluster->arenas.base + bytes);
  cluster->Launch(blocks, 4, seed, [&](int32_t rank, const ncclDevComm& nccl_comm) {
    if (rank != missing) later.Run(rank, nccl_comm);
  });
  CHECK(std::memcmp(before.data(), cluster->arenas.base, bytes) == 0);
  CHECK(emulation::NowNs() - begin < 4 * kGinTimeoutNs);
  int32_t num_named = missing < 0 ? 1 : 0;
  for (int32_t r = 0; r < cluster->n; ++r) {
    if (r == missing) continue;
    CHECK(Failed(*cluster, r) && *cluster->comms[r].abort_flag == 1);
    num_named += cluster->reports[r].peer == missing ? 1 : 0;
  }
  CHECK(num_named > 0);
}

TEST_CASE("a missing rank") {
  for (const int32_t size : {2, 3, 5}) TestTrouble<false>(jaxcomm::FirstSeed() + size, 1, size, size - 1);
  for (int32_t rank = 0; rank < 4; ++rank) TestTrouble<true>(jaxcomm::FirstSeed() + rank, 2, 2, rank);
}

TEST_CASE("the ring ends when the network stops") {
  for (uint64_t seed = 1; seed <= 6; ++seed) TestTrouble<true>(seed, 2, 2, -1);
}

TEST_CASE("invalid calls are refused") {
  std::mt19937_64 random(1);
  const auto node = MakeCluster<F32, false>(1, 2, 3, 1);
  const Call<F32, false> call(*node, 5, 16, 2, random);
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
  CHECK(problem([](Args<F32>& args) { args.hidden = kMostHidden + 1; }));
  const auto nodes = MakeCluster<F32, true>(2, 1, 3, 1);  // half as many blocks as channels
  const Call<F32, true> over_nodes(*nodes, 5, 4, 2, random);
  CHECK(FindProblem(over_nodes.args[0], 1) == nullptr && FindProblem(over_nodes.args[0], 2) != nullptr);
}

}  // namespace
}  // namespace all_gather_matmul
