// The kernel of examples/all_gather_matmul for several nodes, over a network that guarantees no more than GIN. Ranks
// are emulated. Values are small integers, so sums are exact.
#include <cstring>
#include <random>
#include <vector>

// clang-format off: in this order, as NCCL's headers go before it
#include "fakes/gin_cluster.h"
#include "../../examples/all_gather_matmul/node_ring.cuh"
// clang-format on
#include "../check.h"
#include "fakes/seed.h"

namespace all_gather_matmul {
namespace {

using jaxcomm::cuda::GinCluster;
using jaxcomm::cuda::kGinTimeoutNs;

// One call: the data of the ranks, and the places of the results.
struct Call {
  Call(const GinCluster& cluster, int64_t tokens, int64_t hidden, int64_t columns, std::mt19937_64& random) {
    const auto draw = [&](int64_t count) {
      std::vector<float> drawn(count);
      for (float& value : drawn) value = static_cast<float>(random() % 9) - 4;
      return drawn;
    };
    for (int32_t r = 0; r < cluster.n; ++r) {
      x.push_back(draw(tokens * hidden));
      w.push_back(draw(hidden * columns));
      NodeArgs<F32> rank = WithArena<F32>(cluster.comms[r], cluster.handles[r]);
      rank.x = memory.Upload(x.back());
      rank.w = memory.Upload(w.back());
      rank.y = memory.Upload(std::vector<float>(static_cast<size_t>(cluster.n * tokens * columns), -1));
      rank.tokens = tokens;
      rank.hidden = hidden;
      rank.columns = columns;
      args.push_back(rank);
    }
  }

  void Check() const {
    const int64_t tokens = args[0].tokens, hidden = args[0].hidden, columns = args[0].columns;
    for (size_t rank = 0; rank < args.size(); ++rank) {
      for (int64_t row = 0; row < tokens * static_cast<int64_t>(args.size()); ++row) {
        for (int64_t column = 0; column < columns; ++column) {
          float sum = 0;
          for (int64_t k = 0; k < hidden; ++k) {
            sum += x[row / tokens][row % tokens * hidden + k] * w[rank][k * columns + column];
          }
          CHECK(args[rank].y[row * columns + column] == sum);
        }
      }
    }
  }

  jaxcomm::cuda::HostMemory memory;
  std::vector<std::vector<float>> x, w;  // by rank
  std::vector<NodeArgs<F32>> args;       // by rank
};

constexpr int64_t kMostHidden = 8;

std::unique_ptr<GinCluster> MakeCluster(int32_t num_nodes, int32_t ranks_per_node, int32_t num_channels, uint64_t seed,
                                        uint64_t timeout_ns = kGinTimeoutNs) {
  device::Comm sizes;
  sizes.local.size = ranks_per_node;
  sizes.signals.num_channels = num_channels;
  return std::make_unique<GinCluster>(num_nodes, ranks_per_node, num_channels, NodeArenaBytes<F32>(sizes, kMostHidden),
                                      seed, timeout_ns);
}

// Calls of changing shape on one arena, one after the other without a break, so that ranks are in different calls.
void TestCalls(uint64_t seed, int32_t num_nodes, int32_t ranks_per_node) {
  std::mt19937_64 random(seed);
  constexpr int64_t kTokens[] = {0, 1, kTileRows, 3 * kTileRows + 5, 7 * kTileRows};
  constexpr int64_t kHidden[] = {1, 3, kMostHidden};
  const auto blocks = static_cast<int32_t>(1 + random() % 2);
  const auto cluster = MakeCluster(num_nodes, ranks_per_node, kNumKinds * blocks + static_cast<int32_t>(random() % 2),
                                   seed, 10 * kGinTimeoutNs);
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 3; ++i) {
    calls.push_back(std::make_unique<Call>(*cluster, kTokens[random() % std::size(kTokens)],
                                           kHidden[random() % std::size(kHidden)], random() % 4, random));
    CHECK(FindProblem(calls.back()->args[0], blocks) == nullptr);
  }
  cluster->Launch(blocks, 3, seed, [&](int32_t rank, const ncclDevComm& nccl_comm) {
    for (const auto& call : calls) {
      for (int i = static_cast<int>((seed + 7 * rank) % 5) * 20; i > 0; --i) emulation::Pause();  // late ranks
      RunOnNodes(call->args[rank], nccl_comm);
      __syncthreads();
    }
  });
  CHECK(cluster->all_well());
  for (const auto& call : calls) call->Check();
}

TEST_CASE("a ring over nodes") {
  uint64_t seed = jaxcomm::FirstSeed();
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (const auto& [num_nodes, ranks_per_node] :
         {std::pair{2, 2}, std::pair{3, 1}, std::pair{2, 4}, std::pair{2, 1}, std::pair{1, 3}, std::pair{1, 1}}) {
      TestCalls(++seed, num_nodes, ranks_per_node);
    }
  }
}

// The network stops before the call, or in it. All kernels end, and a report of each rank says why; later kernels do
// nothing.
TEST_CASE("the ring ends when the network stops") {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    std::mt19937_64 random(seed);
    const auto cluster = MakeCluster(2, 2, 2, seed);
    const Call call(*cluster, 40 * kTileRows, 4, 2, random);
    const uint64_t begin = emulation::NowNs();
    cluster->Launch(1, 3, seed, [&](int32_t rank, const ncclDevComm& nccl_comm) {
      if (rank == 0 && threadIdx.x == 0) {
        for (uint64_t i = 0; i < 40 * (seed - 1); ++i) emulation::Pause();
        cluster->network.Stall();
      }
      RunOnNodes(call.args[rank], nccl_comm);
    });
    const Call later(*cluster, 40 * kTileRows, 4, 2, random);
    const auto bytes = static_cast<size_t>(cluster->n * cluster->arenas.stride);
    const std::vector<char> before(cluster->arenas.base, cluster->arenas.base + bytes);
    cluster->Launch(1, 3, seed,
                    [&](int32_t rank, const ncclDevComm& nccl_comm) { RunOnNodes(later.args[rank], nccl_comm); });
    CHECK(std::memcmp(before.data(), cluster->arenas.base, bytes) == 0);
    CHECK(emulation::NowNs() - begin < 4 * kGinTimeoutNs);
    for (int32_t r = 0; r < cluster->n; ++r) {
      CHECK(cluster->reports[r].state == device::Report::kComplete && *cluster->comms[r].abort_flag == 1);
    }
  }
}

// A rank never starts. All others end, and the rank behind it names it or one of its neighbours.
TEST_CASE("a missing rank of the ring") {
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    std::mt19937_64 random(seed);
    const auto cluster = MakeCluster(2, 2, 2, seed);
    const Call call(*cluster, 6 * kTileRows, 4, 2, random);
    const auto missing = static_cast<int32_t>(seed % 4);
    cluster->Launch(1, 3, seed, [&](int32_t rank, const ncclDevComm& nccl_comm) {
      if (rank != missing) RunOnNodes(call.args[rank], nccl_comm);
    });
    int32_t num_named = 0;
    for (int32_t r = 0; r < cluster->n; ++r) {
      if (r == missing) continue;
      CHECK(cluster->reports[r].state == device::Report::kComplete);
      num_named += cluster->reports[r].peer == missing ? 1 : 0;
    }
    CHECK(num_named > 0);
  }
}

TEST_CASE("half as many blocks as channels") {
  std::mt19937_64 random(1);
  const auto cluster = MakeCluster(2, 1, 3, 1);
  const Call call(*cluster, 5, 4, 2, random);
  CHECK(FindProblem(call.args[0], 1) == nullptr && FindProblem(call.args[0], 2) != nullptr);
}

}  // namespace
}  // namespace all_gather_matmul
