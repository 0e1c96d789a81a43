// Plans written by hand, for orders of steps that no algorithm has.
#include <vector>

#include "../../ffi/sim/simulate.h"
#include "../plan/written.h"
#include "levels.h"

namespace jaxcomm {
namespace {

// Rank 0 sums 1000 elements of both ranks, waits for rank 1, and reads 500 elements of rank 1. Rank 1 sends the signal.
Plan SumsThenReads(const Request&, int32_t rank) {
  if (rank == 1) return Group({{}, {Signal(0)}})[1];
  std::vector<Plan> plans =
      Group({{Reduce(Output(0), 0, 2, 1000), Wait(1), Get(Output(0, 1000), Input(1, 1000), 500)}});
  plans[0].num_ranks = 2;
  plans[0].sources = {Input(0), Input(1)};
  return plans[0];
}

TEST_CASE("steps after a wait go on with a row and do not repeat its bytes") {
  Machine machine;
  machine.links = {LinkModel{1e-6, 5e10, 0}, LinkModel{3e-6, 2e9, 0}, LinkModel{}};
  machine.concurrent_bytes = 4000;
  const Algorithm algorithm = {"written", "this test", FindAlgorithm(Collective::kAllGather, "direct")->supports,
                               SumsThenReads};
  const Request request = Ask(Collective::kAllGather, 1, 2, 1000);
  Cluster cluster = ClusterOf(machine, request.geometry);
  cluster.levels[0].bytes_per_s = 4e9;  // of the links; a transfer has 2 GB/s
  const Simulation found = ValueOf(Simulate(algorithm, request, 4, cluster, Fidelity::kFull, 100));
  for (const LinkLoad& load : found.links) {
    if (load.name == "node out") CheckClose("bytes", load.bytes, 4 * (1000 + 500));
  }
  // The sum takes one overhead, and the read another one. The signal arrives during the sum, so nobody waits.
  CHECK(found.wait_s == 0);
  CheckClose("time", found.time_s, 1e-6 + 2 * 3e-6 + 4 * 1500 / 2e9);
}

}  // namespace
}  // namespace jaxcomm
