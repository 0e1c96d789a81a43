// The engine agrees with the cost model where no link is shared, and keeps the properties of max-min fair sharing.
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/plan/staging.h"
#include "../../ffi/sim/engine.h"
#include "../../ffi/sim/rates.h"
#include "../../ffi/sim/simulate.h"
#include "../../ffi/sim/workload.h"
#include "../plan/written.h"
#include "levels.h"

namespace jaxcomm {
namespace {

constexpr int64_t kMaxSteps = 10'000'000;

Machine MachineFor(double self_overhead_s) {
  Machine machine;
  machine.links = {LinkModel{self_overhead_s, 5e10, 0}, LinkModel{3e-6, 2e9, 5e-6}, LinkModel{7e-6, 5e8, 2e-5}};
  machine.launch_s = 1e-5;
  return machine;
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
  for (int64_t concurrent_bytes : {0, 300, 400, 100'000}) {  // a chunk has 400 bytes
    Machine machine = MachineFor(1e-6);
    machine.concurrent_bytes = concurrent_bytes;
    machine.arena = concurrent_bytes == 400;
    ForEachAlgorithm(
        {{1, 8}, {8, 1}, {2, 4}, {3, 2}, {1, 7}}, 1680, 100, [&](const Algorithm& algorithm, const Request& request) {
          const double expected_s = CostOf(algorithm, request, 4, machine).time_s;
          const Simulation full = Run(algorithm, request, ClusterOf(machine, request.geometry), Fidelity::kFull);
          CheckClose(algorithm.name, full.time_s, expected_s, 1e-7);
        });
  }
}

TEST_CASE("the engine runs staged plans as the cost model does") {
  int staged_cases = 0;
  for (int64_t concurrent_bytes : {0, 400, 100'000}) {
    Machine machine = MachineFor(1e-6);
    machine.concurrent_bytes = concurrent_bytes;
    machine.arena = true;  // the plan itself has the copies
    ForEachAlgorithm({{1, 8}, {1, 7}}, 1680, 0, [&](const Algorithm& algorithm, Request request) {
      request.geometry.pull = true;
      request.block_count = 1 << 24;
      if (StagedCount(algorithm, request, 4) == 0) return;
      request.block_count = 1680;
      request.staged_count = 280;  // parts of equal size, one per rank
      const Cluster cluster = ClusterOf(machine, request.geometry);
      const double full_s = Run(algorithm, request, cluster, Fidelity::kFull).time_s;
      CheckClose(algorithm.name, full_s, CostOf(algorithm, request, 4, machine).time_s, 1e-7);
      CheckClose(algorithm.name, Run(algorithm, request, cluster, Fidelity::kFolded).time_s, full_s, 1e-7);
      ++staged_cases;
    });
  }
  CHECK(staged_cases >= 20);
}

Cluster MakeCluster(std::vector<Level> levels) {
  Cluster cluster;
  cluster.levels = std::move(levels);
  cluster.self = {3e-7, 1.5e12, 0};
  cluster.memory_bytes_per_s = 3e12;
  cluster.launch_s = 2e-6;
  cluster.concurrent_bytes = 20000;
  return cluster;
}

// One cluster of 16 ranks for each kind of level, 8 of them for the last.
std::vector<Cluster> Clusters() {
  const Level domain = MakeLevel("nvlink", LevelKind::kSwitch, 4, 4e11, 1e-6);
  std::vector<Cluster> clusters = {
      MakeCluster({MakeLevel("nvlink", LevelKind::kSwitch, 16, 4e11, 1e-6)}),
      MakeCluster({domain, MakeLevel("leaf", LevelKind::kRails, 16, 5e10, 2e-6)}),
      MakeCluster({domain, MakeLevel("leaf", LevelKind::kFatTree, 16, 5e10, 2e-6)}),
      MakeCluster({MakeLevel("nvlink", LevelKind::kSwitch, 2, 4e11, 1e-6),
                   MakeLevel("leaf", LevelKind::kRails, 4, 5e10, 2e-6),
                   MakeLevel("spine", LevelKind::kFatTree, 8, 1, 1.5e-6, 2),
                   MakeLevel("core", LevelKind::kFatTree, 16, 1, 1.5e-6, 3)}),
  };
  return clusters;
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

TEST_CASE("one rank for all of equal role gives the time of all ranks, with faults too") {
  const std::vector<LinkFault> none, domain = {{0, 3, true, true, 0.5}}, out = {{1, 9, true, false, 0.3}},
                                     two = {{2, 3, true, true, 0.1}, {1, 0, false, true, 0.7}},
                                     lost = {{1, 1, true, true, 0}};
  for (const auto& faults : {none, domain, out, two, lost}) {
    int folded_cases = 0;
    for (const auto& [block, chunk] : {std::pair{1600, 0}, {160000, 4000}, {3200000, 0}}) {
      ForEachAlgorithmOnGpus(
          block, chunk, [&](const Cluster& whole, const Algorithm& algorithm, const Request& request) {
            Cluster cluster = whole;
            cluster.faults = faults;
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
    CHECK(folded_cases > (faults.empty() ? 200 : 0));
  }
}

TEST_CASE("colour refinement folds what has no symmetry") {
  const Cluster flat = MakeCluster({MakeLevel("nvlink", LevelKind::kSwitch, 24, 4e11, 1e-6)});
  // 16 members; 8 of them stand for a rank outside. Ranks outside, those that stand for them, and the others are equal.
  for (const char* algorithm : {"recursive_doubling", "rabenseifner"}) {
    const Request request = OnGpus(Collective::kAllReduce, flat, 24, 24 * 100, 0);
    const Algorithm& found = *FindAlgorithm(Collective::kAllReduce, algorithm);
    const Simulation folded = Run(found, request, flat, Fidelity::kFolded);
    CHECK(folded.ranks_simulated == 3);
    CheckClose(algorithm, folded.time_s, Run(found, request, flat, Fidelity::kFull).time_s, 1e-9);
    // A timeline has the first entries, those of the first rank of each role.
    const auto timeline_of = [&](int64_t most) {
      return ValueOf(Simulate(found, request, 4, flat, Fidelity::kFolded, kMaxSteps, most)).timeline;
    };
    std::map<int32_t, int64_t> ranks;
    for (const TimelineEntry& entry : timeline_of(99)) ranks[entry.rank] = entry.ranks;
    CHECK((ranks == std::map<int32_t, int64_t>{{0, 8}, {1, 8}, {16, 8}}) && timeline_of(5).size() == 5);
  }
}

TEST_CASE("a block that no rank divides is not rounded up") {
  // log2(n) exchanges of one element over a switch: each puts, signals and adds. 4 bytes on every link in each round.
  const Cluster flat = MakeCluster({MakeLevel("nvlink", LevelKind::kSwitch, 64, 4e11, 1e-6)});
  const Request request = OnGpus(Collective::kAllReduce, flat, 64, 1, 0);
  const Algorithm& doubling = *FindAlgorithm(Collective::kAllReduce, "recursive_doubling");
  const Simulation folded = Run(doubling, request, flat, Fidelity::kFolded);
  CheckClose("one element", folded.time_s, Run(doubling, request, flat, Fidelity::kFull).time_s, 1e-9);
  CheckClose("bytes of six rounds", folded.bounds.beta_s * 4e11, 6 * 4, 1e-9);
}

TEST_CASE("lower bounds of any algorithm are below the bounds of each plan, and these below its time") {
  for (int64_t num_ranks : {2, 8, 16}) {
    for (const Cluster& cluster : Clusters()) {
      for (int i = 0; i <= static_cast<int>(Collective::kBarrier); ++i) {
        const Request request = OnGpus(static_cast<Collective>(i), cluster, num_ranks, 160000, 0);
        const Bounds least = ValueOf(BoundsOf(request, 4, cluster));
        for (const Algorithm& algorithm : Algorithms(request.collective)) {
          if (!algorithm.supports(request)) continue;
          const Simulation found = Run(algorithm, request, cluster, Fidelity::kFolded);
          CHECK(least.alpha_s <= found.bounds.alpha_s * (1 + 1e-9));
          CHECK(least.beta_s <= found.time_s);
          CHECK(found.bounds.alpha_s <= found.time_s && found.bounds.beta_s <= found.time_s);
          const bool reads_all = found.bounds.bottleneck != "memory" && cluster.levels[0].kind == LevelKind::kSwitch;
          if (reads_all && cluster.levels.size() == 1) CHECK(least.beta_s <= found.bounds.beta_s * (1 + 1e-9));
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxcomm
