#include "sim/simulate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <utility>

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
    if (load.capacity > 0 && bytes[i] / workload.links[i].capacity <= load.bytes / load.capacity) continue;
    load.bytes = bytes[i];
    load.capacity = workload.links[i].capacity;
  }
  std::vector<LinkLoad> loads;
  for (auto& [name, load] : by_name) {
    load.name = name;
    loads.push_back(load);
  }
  return loads;
}

// Sorts the links, and takes the busiest one as bound.
void SetBusiest(Simulation* simulation) {
  std::vector<LinkLoad>& links = simulation->links;
  if (links.empty()) return;
  std::stable_sort(links.begin(), links.end(),
                   [](const LinkLoad& a, const LinkLoad& b) { return a.bytes / a.capacity > b.bytes / b.capacity; });
  simulation->bounds.beta_s = links[0].bytes / links[0].capacity;
  simulation->bounds.bottleneck = links[0].name;
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

// Whether both buffers of a rank are one block.
bool IsOfOneBlock(const Request& request) {
  const CollectiveTraits& traits = TraitsOf(request.collective);
  return traits.input == BufferBlocks::kOne && traits.output == BufferBlocks::kOne;
}

// Whether a plan divides the only block of the buffers, which may give pieces of different sizes.
bool Cuts(const Algorithm& algorithm, const Request& request) {
  if (!IsOfOneBlock(request)) return false;
  const Plan plan = algorithm.build(request, request.root);
  return std::any_of(plan.steps.begin(), plan.steps.end(), [&](const Step& step) {
    return step.kind != StepKind::kSignal && step.kind != StepKind::kWait && step.count != request.block_count;
  });
}

// Lines that do not hold, after which a ring is simulated in full.
constexpr int kMaxFailures = 4;
// Ranks of the smallest ring from which others follow.
constexpr int64_t kFewRanks = 8;

// Rings of this many groups of the level below the highest one, with the pieces of `request`.
Request RingOf(Request request, int64_t groups, int64_t group_size) {
  const int64_t n = request.geometry.num_ranks(), ranks = groups * group_size;
  if (IsOfOneBlock(request)) request.block_count = CeilDiv(request.block_count, n) * ranks;
  if (request.geometry.num_nodes == 1) {
    request.geometry.ranks_per_node = static_cast<int32_t>(ranks);
  } else {
    request.geometry.num_nodes = static_cast<int32_t>(ranks / request.geometry.ranks_per_node);
  }
  return request;
}

// Whether the third time continues the line through the others, which are one group apart, after `more` groups; up to
// the rounding of the engine's times, which grows with the distance.
bool OnLine(double first, double second, double third, int64_t more = 1) {
  const auto distance = static_cast<double>(more);
  return std::abs((third - second) - distance * (second - first)) <= 2e-12 * distance + 1e-14 * std::abs(third);
}

// Each group of the highest level adds the same rounds to a ring, all alike once the ranks run in a steady state. Its
// time is then a linear function of the number of groups. Simulates rings of few groups until three times lie on a
// line, and so does that of a ring of twice the groups; then extends the line. Returns nothing if no line holds, or if
// the groups are few. The simulated rings have at most 2 * (least + kMaxFailures + 1) groups, whatever the number of
// ranks.
std::optional<StatusOr<Simulation>> SimulateRing(const Algorithm& algorithm, const Request& request, double item_bytes,
                                                 const Cluster& cluster, const Topology& topology, int64_t max_steps) {
  const std::vector<Level>& levels = topology.cluster().levels;
  const int64_t n = topology.num_ranks(), size = levels.size() > 1 ? levels[levels.size() - 2].ranks : 1;
  const Algorithm* ring_algorithm = FindAlgorithm(request.collective, "ring");
  if (ring_algorithm == nullptr || ring_algorithm->build != algorithm.build ||
      TraitsOf(request.collective).TakesRoot() || topology.HasFaults() || request.staged_count > 0 ||
      request.geometry.num_ranks() != n ||
      (request.geometry.num_nodes > 1 && size % request.geometry.ranks_per_node != 0)) {
    return std::nullopt;
  }
  const int64_t groups = n / size, least = std::max<int64_t>(2, CeilDiv(kFewRanks, size));
  if (groups < 2 * (least + kMaxFailures + 2)) return std::nullopt;  // longer than those that are simulated here
  const auto simulate = [&](int64_t count) {
    return Simulate(algorithm, RingOf(request, count, size), item_bytes, cluster, Fidelity::kFolded, max_steps);
  };
  std::vector<Simulation> found;  // of `least` groups, and one more each
  int64_t num_ops = 0;
  for (int failures = 0; failures < kMaxFailures;) {
    const int64_t next = least + static_cast<int64_t>(found.size());
    auto made = simulate(next);
    if (!made.ok()) return std::nullopt;
    num_ops += made->num_ops;
    found.push_back(*std::move(made));
    if (found.size() < 3) continue;
    const Simulation &a = found[found.size() - 3], &b = found[found.size() - 2], &c = found.back();
    ++failures;
    if (!OnLine(a.time_s, b.time_s, c.time_s) || !OnLine(a.bounds.alpha_s, b.bounds.alpha_s, c.bounds.alpha_s) ||
        a.links.size() != b.links.size() || b.links.size() != c.links.size()) {
      continue;
    }
    // Times of few groups can lie on a line by chance.
    auto doubled = simulate(2 * next);
    if (!doubled.ok()) return std::nullopt;
    num_ops += doubled->num_ops;
    if (!OnLine(b.time_s, c.time_s, doubled->time_s, next) ||
        !OnLine(b.bounds.alpha_s, c.bounds.alpha_s, doubled->bounds.alpha_s, next) ||
        doubled->links.size() != c.links.size()) {
      continue;
    }
    const double more = static_cast<double>(groups - 2 * next) / static_cast<double>(next);
    const auto extend = [&](double before, double last) { return last + more * (last - before); };
    Simulation ring = *std::move(doubled);
    ring.time_s = extend(c.time_s, ring.time_s);
    ring.bounds.alpha_s = extend(c.bounds.alpha_s, ring.bounds.alpha_s);
    ring.wait_s = extend(c.wait_s, ring.wait_s);
    ring.num_ops = num_ops;
    for (LinkLoad& load : ring.links) {
      const auto before =
          std::find_if(c.links.begin(), c.links.end(), [&](const LinkLoad& l) { return l.name == load.name; });
      if (before == c.links.end()) return std::nullopt;
      load.bytes = extend(before->bytes, load.bytes);
    }
    SetBusiest(&ring);
    return StatusOr<Simulation>(std::move(ring));
  }
  return std::nullopt;
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
  if (fidelity == Fidelity::kFolded && max_entries == 0) {
    auto ring = SimulateRing(algorithm, request, item_bytes, cluster, topology, max_steps);
    if (ring) return *std::move(ring);
  }
  const auto too_many = [&](size_t simulated) {
    return InvalidArgumentError("more than " + std::to_string(max_steps) + " steps of " + std::to_string(simulated) +
                                " ranks would have to be simulated");
  };
  // Faults leave almost no equal roles. The last rank has no more steps than others: it is a leaf of trees.
  if (topology.HasFaults() &&
      static_cast<int64_t>(BuildPlan(algorithm, request, static_cast<int32_t>(n - 1)).steps.size()) > max_steps / n) {
    return too_many(static_cast<size_t>(n));
  }
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
      return too_many(ranks.size());
    }
    builder->Add(plan);
  }
  const Workload workload = std::move(*builder).Finish();
  builder.reset();  // frees its tables
  auto result = RunEngine(workload, static_cast<size_t>(std::max<int64_t>(max_entries, 0)));
  if (!result.ok()) return result.status();

  Simulation simulation;
  const double last_s = LastMessage(topology, request.geometry);
  const double end_s = static_cast<double>(result->time_ps) * 1e-12;
  simulation.time_s = cluster.launch_s + cluster.sync_overhead_s + end_s + last_s;
  simulation.bounds.alpha_s = static_cast<double>(result->empty_ps) * 1e-12 + last_s;
  simulation.wait_s = result->mean_wait_s;
  simulation.ranks_simulated = static_cast<int64_t>(ranks.size());
  simulation.num_ops = result->num_ops;
  simulation.links = Loads(topology, workload, result->bytes_on);
  simulation.timeline = TimelineOf(topology, workload, ranks, result->slices);
  SetBusiest(&simulation);
  return simulation;
}

}  // namespace jaxcomm
