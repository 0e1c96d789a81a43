// Degraded and lost links, and slow ranks: closed forms of exchanges in which one link or rank decides.
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/sim/simulate.h"
#include "../plan/written.h"
#include "levels.h"

namespace jaxcomm {
namespace {

constexpr double kBytes = 4.0 * (1 << 20);
constexpr double kNvlink = 4e11, kAdapter = 5e10, kOverhead = 4e-7;

// 16 ranks: domains of 4 on rails, two leaves of 8.
Cluster Rails() {
  Cluster cluster;
  cluster.levels = {MakeLevel("nvlink", LevelKind::kSwitch, 4, kNvlink, 1e-6),
                    MakeLevel("leaf", LevelKind::kRails, 8, kAdapter, 2e-6),
                    MakeLevel("spine", LevelKind::kFatTree, 16, 1, 1e-6)};
  cluster.self = {3e-7, 1.5e12, 0};
  return cluster;
}

Cluster Domain() {
  Cluster cluster;
  cluster.levels = {MakeLevel("nvlink", LevelKind::kSwitch, 8, kNvlink, 1e-6)};
  cluster.self = {3e-7, 1.5e12, 0};
  return cluster;
}

// Every rank sends kBytes to the rank `shift` later.
Request Shift(const Cluster& cluster, int32_t shift) {
  const auto locals = static_cast<int32_t>(cluster.levels[0].ranks);
  const auto ranks = static_cast<int32_t>(cluster.levels.back().ranks);
  Request request = Ask(Collective::kPermute, ranks / locals, locals, 1 << 20, 0);
  request.geometry.all_addressable = request.geometry.num_nodes == 1;
  request.source_of.clear();
  for (int32_t rank = 0; rank < ranks; ++rank) request.source_of.push_back((rank + ranks - shift) % ranks);
  return request;
}

// The time of the direct plan. Both fidelities agree.
double Time(const Cluster& cluster, const Request& request, const char* algorithm = "direct") {
  const Algorithm& found = *FindAlgorithm(request.collective, algorithm);
  const double full_s = ValueOf(Simulate(found, request, 4, cluster, Fidelity::kFull, 1 << 20)).time_s;
  const double folded_s = ValueOf(Simulate(found, request, 4, cluster, Fidelity::kFolded, 1 << 20)).time_s;
  CheckClose("folded", folded_s, full_s, 1e-9);
  return full_s;
}

TEST_CASE("a degraded link slows the transfers that cross it") {
  const Request inside = Shift(Domain(), 1), between = Shift(Rails(), 4), far = Shift(Rails(), 8);
  for (const auto& [out, in] : {std::pair{true, true}, {true, false}, {false, true}}) {
    Cluster domain = Domain();
    domain.faults = {{0, 3, out, in, 0.25}};
    CheckClose("nvlink", Time(domain, inside) - Time(Domain(), inside), 3 * kBytes / kNvlink);
    Cluster rails = Rails();
    rails.faults = {{1, 5, out, in, 0.5}};
    CheckClose("leaf", Time(rails, between) - Time(Rails(), between), kBytes / kAdapter);
    // Four switches, one for each rail: rail 1 of leaf 1 has two adapters and as many uplinks.
    rails.faults = {{2, 5, out, in, 0.5}};
    CheckClose("spine", Time(rails, far) - Time(Rails(), far), kBytes / kAdapter);
    CheckClose("not crossed", Time(rails, Shift(Rails(), 16)), Time(Rails(), Shift(Rails(), 16)));
  }
  // A rank that only receives.
  Request receives = inside;
  receives.source_of[4] = -1;
  Cluster domain = Domain();
  domain.faults = {{0, 3, true, false, 0.25}};
  CheckClose("out", Time(domain, receives), Time(Domain(), receives));
  domain.faults = {{0, 3, false, true, 0.25}};
  CheckClose("in", Time(domain, receives) - Time(Domain(), receives), 3 * kBytes / kNvlink);
  // A fault on links that do not limit changes nothing: the adapters have half of the bandwidth of these.
  Cluster rails = Rails();
  rails.faults = {{0, 2, true, true, 0.5}};
  CheckClose("no limit", Time(rails, between), Time(Rails(), between));
}

TEST_CASE("another adapter carries the transfers of a lost one") {
  // The adapter of rank 6 carries those of rank 5 too, in both directions. NVLink is eight times as fast.
  const Request between = Shift(Rails(), 4);
  Cluster rails = Rails();
  rails.faults = {{1, 5, true, true, 0}};
  const double healthy_s = Time(Rails(), between);
  CheckClose("one", Time(rails, between) - healthy_s, kBytes / kAdapter);
  // Three of a domain: one adapter carries the transfers of four ranks.
  rails.faults = {{1, 4, true, true, 0}, {1, 5, true, true, 0}, {1, 7, true, true, 0}};
  CheckClose("three", Time(rails, between) - healthy_s, 3 * kBytes / kAdapter);
  // One lost in each domain: no relay of rank 5 may be on the rail of rank 10.
  rails.faults = {{1, 5, true, true, 0}, {1, 10, true, true, 0}};
  std::vector<LinkId> links;
  ValueOf(Topology::Make(rails, 16)).Route(5, 9, &links);
  for (const LinkId& link : links) CHECK(link.level != 1 || link.owner % 4 == 3);
  // Transfers inside a domain need no adapter.
  rails.faults = {{1, 5, true, true, 0}};
  Request inside = Shift(Rails(), 16);
  for (int32_t rank = 0; rank < 16; ++rank) inside.source_of[static_cast<size_t>(rank)] = rank ^ 1;
  CheckClose("inside", Time(rails, inside), Time(Rails(), inside));
}

TEST_CASE("a relay adds the latency of the domain on both sides") {
  Cluster rails = Rails();
  rails.faults = {{1, 5, true, true, 0}};
  const Topology topology = ValueOf(Topology::Make(rails, 16)), healthy = ValueOf(Topology::Make(Rails(), 16));
  CheckClose("source", topology.LatencyS(5, 9), healthy.LatencyS(5, 9) + 2e-6);  // rank 6, and rank 10 to rank 9
  CheckClose("target", topology.LatencyS(1, 5), healthy.LatencyS(1, 5) + 2e-6);
  CheckClose("others", topology.LatencyS(4, 8), healthy.LatencyS(4, 8));

  rails.faults = {{1, 5, true, true, 0.5, 3e-6}};  // the relay is not among these ranks
  const Topology apart = ValueOf(Topology::Make(rails, 16));
  CheckClose("to a relay", apart.LatencyS(5, 9), healthy.LatencyS(5, 9) + 3e-6);
  CheckClose("from a relay", apart.LatencyS(13, 5), healthy.LatencyS(13, 5) + 3e-6);
  CheckClose("no relay", apart.LatencyS(4, 8), healthy.LatencyS(4, 8));
  CheckClose("in the domain", apart.LatencyS(5, 6), healthy.LatencyS(5, 6));
}

TEST_CASE("a slow rank takes longer for its own steps only") {
  const Request inside = Shift(Domain(), 1);
  for (double slow : {1.5, 3.0}) {
    Cluster domain = Domain();
    domain.levels[0].flow_bytes_per_s = 1e11;  // of its thread blocks
    const double healthy_s = Time(domain, inside);
    CheckClose("healthy", healthy_s, kOverhead + kBytes / 1e11);
    domain.slow_ranks = {{2, slow}};
    CheckClose("slow", Time(domain, inside), slow * (kOverhead + kBytes / 1e11));
  }
}

TEST_CASE("with faults, one rank for all of equal role gives the time of all ranks") {
  int64_t folded_cases = 0;
  const std::vector<std::vector<LinkFault>> faults = {
      {{0, 3, true, true, 0.5}}, {{1, 9, true, false, 0.3}}, {{2, 6, true, true, 0.1}, {1, 0, false, true, 0.7}}};
  for (const std::vector<LinkFault>& some : faults) {
    for (int i = 0; i <= static_cast<int>(Collective::kBarrier); ++i) {
      Cluster cluster = Rails();
      cluster.faults = some;
      Request request = Ask(static_cast<Collective>(i), 4, 4, 160000, 10000);
      request.geometry.all_addressable = false;
      for (const Algorithm& algorithm : Algorithms(request.collective)) {
        if (!algorithm.supports(request)) continue;
        const auto run = [&](Fidelity fidelity) {
          return ValueOf(Simulate(algorithm, request, 4, cluster, fidelity, 1 << 20));
        };
        const Simulation full = run(Fidelity::kFull), folded = run(Fidelity::kFolded);
        CheckClose(algorithm.name, folded.time_s, full.time_s, 1e-9);
        CHECK(full.bounds.alpha_s <= full.time_s && full.bounds.beta_s <= full.time_s);
        folded_cases += folded.ranks_simulated < 16;
      }
    }
  }
  CHECK(folded_cases > 0);
}

TEST_CASE("faults that cannot be") {
  const auto reason = [](const LinkFault& fault) {
    Cluster cluster = Rails();
    cluster.faults = {fault};
    return Topology::Make(cluster, 16).status().message();
  };
  CHECK(reason({1, 16, true, true, 0.5}).find("fault leaf[16]: the index must be below 16") != std::string::npos);
  CHECK(reason({2, 8, true, true, 0.5}).find("fault spine[8]: the index must be below 8") != std::string::npos);
  CHECK(reason({2, 7, true, true, 0.5}).empty());
  for (const LinkFault& fault : {LinkFault{0, 1, true, true, 0}, {2, 1, true, true, 0}, {1, 1, true, false, 0}}) {
    CHECK(reason(fault).find("would be cut off") != std::string::npos);
  }
  Cluster cluster = Rails();
  for (int64_t rank : {4, 5, 6, 7}) cluster.faults.push_back({1, rank, true, true, 0});
  CHECK(Topology::Make(cluster, 16).status().message().find("all adapters of the domain of rank") != std::string::npos);
  cluster = Rails();
  cluster.slow_ranks = {{16, 2}};
  CHECK(Topology::Make(cluster, 16).status().message().find("slow rank 16: must be below 16") != std::string::npos);
}

}  // namespace
}  // namespace jaxcomm
