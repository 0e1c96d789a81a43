#include "sim/simulate.h"

#include <algorithm>
#include <map>
#include <optional>

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

// The link with the least bandwidth for a transfer.
std::string LimitOf(const Topology& topology, const Workload& workload, const Op& op) {
  const TransferRoute& route = workload.routes[static_cast<size_t>(op.route)];
  double least = kUnlimited;
  std::string name = "memory";
  for (int32_t i = route.first; i < route.first + route.count; ++i) {
    const ClassUse& use = workload.uses[static_cast<size_t>(i)];
    const LinkClass& link = workload.links[static_cast<size_t>(use.link)];
    if (link.capacity / use.weight >= least) continue;
    least = link.capacity / use.weight;
    name = topology.Name(link.id);
  }
  return name;
}

std::vector<TimelineEntry> TimelineOf(const Topology& topology, const Workload& workload,
                                      const std::vector<int32_t>& ranks, const std::vector<Interval>& slices) {
  std::vector<TimelineEntry> timeline;
  for (const Interval& slice : slices) {
    const Op& op = workload.ops[static_cast<size_t>(slice.op)];
    TimelineEntry entry;
    entry.rank = ranks[static_cast<size_t>(slice.program)];
    entry.ranks = workload.programs[static_cast<size_t>(slice.program)].ranks;
    entry.queued = slice.queued;
    if (op.kind == OpKind::kTransfer) {
      entry.name = LimitOf(topology, workload, op);
      entry.bytes = op.bytes;
    }
    entry.start_s = static_cast<double>(slice.start_ps) * 1e-12;
    entry.end_s = static_cast<double>(slice.end_ps) * 1e-12;
    timeline.push_back(entry);
  }
  return timeline;
}

// Whether a plan divides the block of an all_reduce or of a broadcast, which may give pieces of different sizes.
bool Cuts(const Algorithm& algorithm, const Request& request) {
  if (request.collective != Collective::kAllReduce && request.collective != Collective::kBroadcast) return false;
  const Plan plan = algorithm.build(request, request.root);
  return std::any_of(plan.steps.begin(), plan.steps.end(), [&](const Step& step) {
    return step.kind != StepKind::kSignal && step.kind != StepKind::kWait && step.count != request.block_count;
  });
}

}  // namespace

StatusOr<Simulation> Simulate(const Algorithm& algorithm, Request request, double item_bytes, const Cluster& cluster,
                              Fidelity fidelity, int64_t max_steps, int64_t max_entries) {
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
    if (Cuts(algorithm, request)) {
      request.block_count = CeilDiv(request.block_count, n) * n;
      request.staged_count = CeilDiv(request.staged_count, n) * n;
    }
    fold = Fold::Find(topology, algorithm, request);
  }
  const ArenaCopies copies = cluster.arena ? CopiesOf(algorithm, request) : ArenaCopies();
  std::optional<WorkloadBuilder> builder(std::in_place, topology, fold, request.geometry, item_bytes, copies);
  int64_t num_steps = 0;
  const std::vector<int32_t> ranks = fold.Representatives();
  for (int32_t rank : ranks) {
    const Plan plan = BuildPlan(algorithm, request, rank);
    num_steps += static_cast<int64_t>(plan.steps.size());
    if (num_steps > max_steps) {
      return InvalidArgumentError("more than " + std::to_string(max_steps) + " steps of " +
                                  std::to_string(ranks.size()) + " ranks would have to be simulated");
    }
    builder->Add(plan);
  }
  const Workload workload = std::move(*builder).Finish();
  builder.reset();  // frees its tables
  auto result = RunEngine(workload, true, static_cast<size_t>(std::max<int64_t>(max_entries, 0)));
  if (!result.ok()) return result.status();
  auto empty = RunEngine(workload, false);
  if (!empty.ok()) return empty.status();

  Simulation simulation;
  const double last_s = LastMessage(topology, request.geometry);
  const double work_s = result->mean_work_s * cluster.ranks_per_processor;
  double late_s = 0;  // until the last rank arrives
  for (double start_s : cluster.start_s) late_s = std::max(late_s, start_s);
  const double entry_s = topology.StartsTogether() ? late_s : 0;
  const double end_s = std::max(static_cast<double>(result->time_ps) * 1e-12, work_s) + entry_s;
  simulation.time_s = cluster.launch_s + cluster.sync_overhead_s + end_s + last_s;
  simulation.bounds.alpha_s = static_cast<double>((*empty).time_ps) * 1e-12 + last_s + entry_s;
  simulation.work_s = result->mean_work_s;
  simulation.wait_s = result->mean_wait_s;
  simulation.ranks_simulated = static_cast<int64_t>(ranks.size());
  simulation.num_ops = result->num_ops;
  simulation.links = Loads(topology, workload, result->bytes_on);
  simulation.timeline = TimelineOf(topology, workload, ranks, result->slices);
  if (!simulation.links.empty()) {
    simulation.bounds.beta_s = simulation.links[0].bytes / simulation.links[0].capacity;
    simulation.bounds.bottleneck = simulation.links[0].name;
  }
  return simulation;
}

}  // namespace jaxcomm
