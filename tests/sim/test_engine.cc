// The engine agrees with the cost model where no link is shared, and keeps the properties of max-min fair sharing.
#include <cmath>
#include <cstdio>
#include <utility>
#include <vector>

#include "../../ffi/sim/simulate.h"
#include "../plan/written.h"

namespace jaxcomm {
namespace {

constexpr int64_t kMaxSteps = 10'000'000;

Machine MachineFor(double self_overhead_s) {
  Machine machine;
  machine.links = {LinkModel{self_overhead_s, 5e10, 0}, LinkModel{3e-6, 2e9, 5e-6}, LinkModel{7e-6, 5e8, 2e-5}};
  machine.launch_s = 1e-5;
  return machine;
}

void CheckClose(const char* what, double got, double expected, double relative) {
  const bool close = std::abs(got - expected) <= relative * std::abs(expected);
  if (!close) std::fprintf(stderr, "%s: %.12g, expected %.12g\n", what, got, expected);
  CHECK(close);
}

Simulation Run(const Algorithm& algorithm, const Request& request, const Cluster& cluster, Fidelity fidelity) {
  return ValueOf(Simulate(algorithm, request, 4, cluster, fidelity, kMaxSteps));
}

// Calls visit(algorithm, request) for all algorithms on these shapes.
template <typename Visit>
void ForEachAlgorithm(const std::vector<std::pair<int, int>>& shapes, int64_t block_count, int64_t chunk_count,
                      Visit visit) {
  for (int i = 0; i <= static_cast<int>(Collective::kBarrier); ++i) {
    for (const Algorithm& algorithm : Algorithms(static_cast<Collective>(i))) {
      for (const auto& [nodes, locals] : shapes) {
        for (const bool apart : {false, true}) {
          const auto collective = static_cast<Collective>(i);
          const Request request = apart ? AskApart(collective, nodes, locals, block_count, chunk_count)
                                        : Ask(collective, nodes, locals, block_count, chunk_count);
          if (algorithm.supports(request)) visit(algorithm, request);
        }
      }
    }
  }
}

TEST_CASE("without shared links the engine is the cost model") {
  const Machine machine = MachineFor(1e-6);
  ForEachAlgorithm(
      {{1, 8}, {8, 1}, {2, 4}, {3, 2}, {1, 7}}, 1680, 100, [&](const Algorithm& algorithm, const Request& request) {
        const double expected_s = CostOf(algorithm, request, 4, machine).time_s;
        const Simulation full = Run(algorithm, request, ClusterOf(machine, request.geometry), Fidelity::kFull);
        CheckClose(algorithm.name, full.time_s, expected_s, 1e-7);
      });
}

Level MakeLevel(const char* name, LevelKind kind, int64_t ranks, double bytes_per_s, double latency_s,
                double taper = 1) {
  Level level;
  level.name = name;
  level.kind = kind;
  level.ranks = ranks;
  level.bytes_per_s = bytes_per_s;
  level.latency_s = latency_s;
  level.overhead_s = 4e-7;
  level.taper = taper;
  return level;
}

Cluster MakeCluster(std::vector<Level> levels) {
  Cluster cluster;
  cluster.levels = std::move(levels);
  cluster.self = {3e-7, 1.5e12, 0};
  cluster.memory_bytes_per_s = 3e12;
  cluster.launch_s = 2e-6;
  return cluster;
}

// One cluster of 16 ranks for each kind of level, 8 of them for the last.
std::vector<Cluster> Clusters() {
  const Level domain = MakeLevel("nvlink", LevelKind::kSwitch, 4, 4e11, 1e-6);
  std::vector<Cluster> clusters = {
      MakeCluster({MakeLevel("nvlink", LevelKind::kSwitch, 16, 4e11, 1e-6)}),
      MakeCluster({MakeLevel("mesh", LevelKind::kMesh, 16, 4e11, 1e-6)}),
      MakeCluster({domain, MakeLevel("leaf", LevelKind::kRails, 16, 5e10, 2e-6)}),
      MakeCluster({domain, MakeLevel("leaf", LevelKind::kFatTree, 16, 5e10, 2e-6)}),
      MakeCluster({MakeLevel("nvlink", LevelKind::kSwitch, 2, 4e11, 1e-6),
                   MakeLevel("leaf", LevelKind::kRails, 8, 5e10, 2e-6),
                   MakeLevel("spine", LevelKind::kFatTree, 16, 1, 1.5e-6, 2)}),
      MakeCluster({MakeLevel("nvlink", LevelKind::kSwitch, 2, 4e11, 1e-6),
                   MakeLevel("router", LevelKind::kSwitch, 4, 5e10, 1e-6),
                   MakeLevel("global", LevelKind::kDragonfly, 16, 1, 1.5e-6, 1.5)}),
  };
  Cluster torus = MakeCluster({MakeLevel("torus", LevelKind::kTorus, 16, 9e10, 1e-6)});
  torus.levels[0].dims = {4, 2, 2};
  clusters.push_back(torus);
  Cluster valiant = clusters[5];
  valiant.levels[2].valiant = true;
  clusters.push_back(valiant);
  return clusters;
}

// The request of a call on GPUs whose nodes are the groups of level 0.
Request OnGpus(Collective collective, const Cluster& cluster, int64_t num_ranks, int64_t block_count,
               int64_t chunk_count) {
  const int64_t locals = std::min(cluster.levels[0].ranks, num_ranks);
  Request request =
      Ask(collective, static_cast<int32_t>(num_ranks / locals), static_cast<int32_t>(locals), block_count, chunk_count);
  request.geometry.all_addressable = request.geometry.num_nodes == 1;
  request.geometry.pull = true;
  return request;
}

template <typename Visit>
void ForEachAlgorithmOnGpus(int64_t block_count, int64_t chunk_count, Visit visit) {
  for (const Cluster& cluster : Clusters()) {
    for (int i = 0; i <= static_cast<int>(Collective::kBarrier); ++i) {
      const Request request = OnGpus(static_cast<Collective>(i), cluster, 16, block_count, chunk_count);
      for (const Algorithm& algorithm : Algorithms(static_cast<Collective>(i))) {
        if (algorithm.supports(request)) visit(cluster, algorithm, request);
      }
    }
  }
}

TEST_CASE("one rank for all of equal role gives the time of all ranks") {
  int folded_cases = 0;
  for (const auto& [block, chunk] : {std::pair{1600, 0}, {160000, 1000}, {3200000, 0}}) {
    ForEachAlgorithmOnGpus(
        block, chunk, [&](const Cluster& cluster, const Algorithm& algorithm, const Request& request) {
          const Simulation full = Run(algorithm, request, cluster, Fidelity::kFull);
          const Simulation folded = Run(algorithm, request, cluster, Fidelity::kFolded);
          const std::string what =
              std::string(Name(request.collective)) + " " + algorithm.name + " " + cluster.levels.back().name;
          CheckClose(what.c_str(), folded.time_s, full.time_s, 1e-9);
          CheckClose(what.c_str(), folded.bounds.alpha_s, full.bounds.alpha_s, 1e-9);
          CheckClose(what.c_str(), folded.bounds.beta_s, full.bounds.beta_s, 1e-9);
          CHECK(full.bounds.alpha_s <= full.time_s && full.bounds.beta_s <= full.time_s);
          folded_cases += folded.ranks_simulated < 16;
        });
  }
  CHECK(folded_cases > 200);
}

}  // namespace
}  // namespace jaxcomm
