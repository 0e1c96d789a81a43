// Relays of lost adapters. tests/simulate/test_faults.py has the times of exchanges.
#include <utility>
#include <vector>

#include "../../ffi/sim/simulate.h"
#include "../plan/written.h"
#include "levels.h"

namespace jaxcomm {
namespace {

// 16 ranks: domains of 4 on rails, two leaves of 8.
Cluster Rails() {
  Cluster cluster;
  cluster.levels = {MakeLevel("nvlink", LevelKind::kSwitch, 4, 4e11, 1e-6),
                    MakeLevel("leaf", LevelKind::kRails, 8, 5e10, 2e-6),
                    MakeLevel("spine", LevelKind::kFatTree, 16, 1, 1e-6)};
  cluster.self = {3e-7, 1.5e12, 0};
  return cluster;
}

TEST_CASE("a relay adds the latency of the domain on both sides") {
  Cluster rails = Rails();
  rails.faults = {{1, 5, true, true, 0}};
  const Topology topology = ValueOf(Topology::Make(rails, 16)), healthy = ValueOf(Topology::Make(Rails(), 16));
  CheckClose("source", topology.LatencyS(5, 9), healthy.LatencyS(5, 9) + 2e-6);  // rank 6, and rank 10 to rank 9
  CheckClose("target", topology.LatencyS(1, 5), healthy.LatencyS(1, 5) + 2e-6);
  CheckClose("others", topology.LatencyS(4, 8), healthy.LatencyS(4, 8));

  rails.faults = {{1, 5, true, true, 0}, {1, 10, true, true, 0}};  // no relay of rank 5 is on the rail of rank 10
  std::vector<LinkId> links;
  ValueOf(Topology::Make(rails, 16)).Route(5, 9, &links);
  for (const LinkId& link : links) CHECK(link.level != 1 || link.owner % 4 == 3);

  rails.faults = {{1, 5, true, true, 0.5, 3e-6}};  // the relay is not among these ranks
  const Topology apart = ValueOf(Topology::Make(rails, 16));
  CheckClose("to a relay", apart.LatencyS(5, 9), healthy.LatencyS(5, 9) + 3e-6);
  CheckClose("from a relay", apart.LatencyS(13, 5), healthy.LatencyS(13, 5) + 3e-6);
  CheckClose("no relay", apart.LatencyS(4, 8), healthy.LatencyS(4, 8));
  rails.faults.push_back({1, 13, true, true, 0.5, 4e-6});
  CheckClose("to and from", ValueOf(Topology::Make(rails, 16)).LatencyS(5, 13), healthy.LatencyS(5, 13) + 7e-6);
  CheckClose("in the domain", apart.LatencyS(5, 6), healthy.LatencyS(5, 6));
}

}  // namespace
}  // namespace jaxcomm
