#include "sim/simulate.h"

#include <algorithm>
#include <map>

#include "plan/partition.h"
#include "sim/engine.h"
#include "sim/fold.h"
#include "sim/workload.h"

namespace jaxcomm {
namespace {

// The latency of the last message of a rank, which follows its data, to the other nodes.
double LastMessage(const Topology& topology, const Geometry& geometry) {
  if (geometry.num_nodes == 1 || geometry.all_addressable) return 0;
  return topology.LatencyS(0, static_cast<int32_t>(topology.num_ranks() - 1));
}

std::vector<LinkLoad> Loads(const Topology& topology, const Workload& workload, const std::vector<double>& bytes) {
  std::map<std::string, LinkLoad> by_name;
  for (size_t i = 0; i < bytes.size(); ++i) {
    LinkLoad& load = by_name[topology.Name(workload.links[i].id)];
    load.total_bytes += bytes[i] * static_cast<double>(workload.links[i].count);
    if (load.capacity > 0 && bytes[i] / workload.links[i].capacity <= load.bytes / load.capacity) continue;
    load.bytes = bytes[i];
    load.capacity = workload.links[i].capacity;
  }
  std::vector<LinkLoad> loads;
  for (auto& [name, load] : by_name) {
    load.name = name;
    loads.push_back(load);
  }
  std::stable_sort(loads.begin(), loads.end(),
                   [](const LinkLoad& a, const LinkLoad& b) { return a.bytes / a.capacity > b.bytes / b.capacity; });
  return loads;
}

}  // namespace

StatusOr<Simulation> Simulate(const Algorithm& algorithm, Request request, double item_bytes, const Cluster& cluster,
                              Fidelity fidelity, int64_t max_steps) {
  if (!algorithm.supports(request)) {
    return InvalidArgumentError(std::string("algorithm \"") + algorithm.name + "\" needs " +
                                algorithm.supports.requirement);
  }
  const int64_t n = request.geometry.num_ranks();
  auto made = Topology::Make(cluster, n);
  if (!made.ok()) return made.status();
  const Topology topology = *std::move(made);
  Fold fold(topology);
  if (fidelity == Fidelity::kFolded) {
    const bool cuts = request.collective == Collective::kAllReduce || request.collective == Collective::kBroadcast;
    if (cuts) request.block_count = CeilDiv(request.block_count, n) * n;
    fold = Fold::Find(topology, algorithm, request);
  }
  WorkloadBuilder builder(topology, fold, request.geometry, item_bytes);
  int64_t num_steps = 0;
  const std::vector<int32_t> ranks = fold.Representatives();
  for (int32_t rank : ranks) {
    const Plan plan = algorithm.build(request, rank);
    num_steps += static_cast<int64_t>(plan.steps.size());
    if (num_steps > max_steps) {
      return InvalidArgumentError("more than " + std::to_string(max_steps) + " steps of " +
                                  std::to_string(ranks.size()) + " ranks would have to be simulated");
    }
    builder.Add(plan);
  }
  const Workload workload = std::move(builder).Finish();
  auto result = RunEngine(workload, true);
  if (!result.ok()) return result.status();
  auto empty = RunEngine(workload, false);
  if (!empty.ok()) return empty.status();

  Simulation simulation;
  const double last_s = LastMessage(topology, request.geometry);
  const double work_s = result->mean_work_s * cluster.ranks_per_processor;
  const double end_s = std::max(static_cast<double>(result->time_ps) * 1e-12, work_s);
  simulation.time_s = cluster.launch_s + cluster.sync_overhead_s + end_s + last_s;
  simulation.bounds.alpha_s = static_cast<double>((*empty).time_ps) * 1e-12 + last_s;
  simulation.work_s = result->mean_work_s;
  simulation.wait_s = result->mean_wait_s;
  simulation.ranks_simulated = static_cast<int64_t>(ranks.size());
  simulation.num_ops = result->num_ops;
  simulation.links = Loads(topology, workload, result->bytes_on);
  if (!simulation.links.empty()) {
    simulation.bounds.beta_s = simulation.links[0].bytes / simulation.links[0].capacity;
    simulation.bounds.bottleneck = simulation.links[0].name;
  }
  return simulation;
}

}  // namespace jaxcomm
