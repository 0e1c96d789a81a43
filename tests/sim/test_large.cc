// Groups of more ranks: routes by role, and rings whose rounds repeat.
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/sim/simulate.h"
#include "../plan/written.h"
#include "levels.h"

namespace jaxcomm {
namespace {

const Collective kRings[] = {Collective::kAllReduce, Collective::kAllGather, Collective::kReduceScatter};

TEST_CASE("long rings of random levels take the time of all rounds") {
  // In a few, the rounds change after more groups than are simulated; the error stays below a thousandth.
  std::mt19937_64 random(7);
  const auto between = [&](double low, double high) {
    return low * std::pow(high / low, std::uniform_real_distribution<double>(0, 1)(random));
  };
  const auto whole = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  int extended = 0, inexact = 0;
  for (int number = 0; number < 120; ++number) {
    Cluster cluster;
    const int64_t inner = whole(2, 8), leaf = inner * whole(1, 4), groups = whole(17, 28);
    const LevelKind second = whole(0, 1) == 0 ? LevelKind::kRails : LevelKind::kSwitch;
    cluster.levels = {MakeLevel("nvlink", LevelKind::kSwitch, inner, between(1e10, 1e12), between(1e-8, 2e-5)),
                      MakeLevel("leaf", second, leaf, between(1e10, 1e12), between(1e-8, 2e-5)),
                      MakeLevel("spine", LevelKind::kFatTree, leaf * groups, 1, between(1e-8, 2e-5), between(0.5, 20))};
    for (Level& level : cluster.levels) level.overhead_s = between(1e-8, 5e-6);
    cluster.self = {between(1e-8, 1e-6), between(1e10, 1e12), 0};
    cluster.memory_bytes_per_s = between(5e10, 5e12);
    cluster.arena = whole(0, 1) == 0;
    const Collective collective = kRings[whole(0, 2)];
    const Algorithm& ring = *FindAlgorithm(collective, "ring");
    const int64_t ranks = leaf * groups, block = static_cast<int64_t>(between(1, 3e5));
    const Request request =
        OnGpus(collective, cluster, ranks, collective == Collective::kAllReduce ? block * ranks : block, 0);
    const auto run = [&](int64_t entries) {  // a timeline needs all rounds
      return ValueOf(Simulate(ring, request, 4, cluster, Fidelity::kFolded, 10'000'000, entries));
    };
    const Simulation found = run(0), all = run(1);
    extended += found.num_ops != all.num_ops ? 1 : 0;
    CheckClose("random ring", found.time_s, all.time_s, 1e-3);
    CheckClose("alpha", found.bounds.alpha_s, all.bounds.alpha_s, 1e-3);
    CheckClose("beta", found.bounds.beta_s, all.bounds.beta_s, 1e-9);
    CheckClose("wait", found.wait_s, all.wait_s, 1e-2);
    CHECK(found.bounds.bottleneck == all.bounds.bottleneck && found.links.size() == all.links.size());
    for (size_t i = 0; i < all.links.size(); ++i) CheckClose("link", found.links[i].bytes, all.links[i].bytes, 1e-9);
    inexact += std::abs(found.time_s - all.time_s) > 1e-6 * all.time_s ? 1 : 0;
  }
  CHECK(extended > 60);
  CHECK(inexact <= 2);  // a wrong slope would change all that are extended
}

TEST_CASE("a ring of 131072 ranks takes the time of its rounds") {
  // Over a switch, each round moves 128 KiB: a put, and a sum in the first half.
  Cluster flat;
  flat.levels = {MakeLevel("nvlink", LevelKind::kSwitch, 1 << 20, 4e11, 1e-6)};
  flat.self = {3e-7, 1.5e12, 0};
  const Algorithm& ring = *FindAlgorithm(Collective::kAllReduce, "ring");
  int64_t steps = 0;
  for (int64_t ranks : {1 << 10, 1 << 17, 1 << 18}) {
    const Request request = OnGpus(Collective::kAllReduce, flat, ranks, ranks * 64, 0);
    const Simulation found = ValueOf(Simulate(ring, request, 2048, flat, Fidelity::kFolded, 100'000));
    const double bytes = 2048.0 * 64;
    const double send_s = 4e-7 + bytes / 4e11, sum_s = 3e-7 + 2 * bytes / 1.5e12, signal_s = 4e-7 + 1e-6;
    const auto rounds = static_cast<double>(ranks - 1);
    // The last round sends no signal.
    CheckClose("ring", found.time_s, 2 * rounds * (send_s + signal_s) + rounds * sum_s - signal_s, 1e-7);
    CheckClose("bytes", found.bounds.beta_s, 2 * rounds * bytes / 4e11, 1e-9);
    CHECK(steps == 0 || found.num_ops == steps);  // the cost is the same
    steps = found.num_ops;
  }
}

}  // namespace
}  // namespace jaxcomm
