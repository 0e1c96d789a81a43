#include "workload.h"

#include <algorithm>
#include <cmath>

namespace jaxcomm {
namespace {

int64_t Picoseconds(double time_s) { return std::llround(time_s * 1e12); }

uint64_t Pair(int32_t a, int32_t b) { return static_cast<uint64_t>(a) << 32 | static_cast<uint32_t>(b); }

}  // namespace

int64_t Program::num_ops() const {
  int64_t total = 0;
  for (const Loop& loop : loops) total += loop.length * loop.count;
  return total;
}

WorkloadBuilder::WorkloadBuilder(const Topology& topology, const Fold& fold, const Geometry& geometry,
                                 double bytes_per_item)
    : topology_(topology), fold_(fold), geometry_(geometry), bytes_per_item_(bytes_per_item) {}

WorkloadBuilder::Figures WorkloadBuilder::FiguresOf(int32_t rank, int32_t peer) const {
  const Cluster& cluster = topology_.cluster();
  if (rank == peer) return {cluster.self.overhead_s, cluster.self.bytes_per_s, false};
  const int32_t top = topology_.CommonLevel(rank, peer);
  const Level& level = cluster.levels[static_cast<size_t>(top)];
  return {level.overhead_s, level.flow_bytes_per_s, top > 0 && !geometry_.all_addressable};
}

void WorkloadBuilder::AddUse(const LinkId& link, double weight, std::map<int32_t, double>* sum) {
  const double capacity = topology_.Capacity(link);
  if (!(capacity < kUnlimited)) return;
  int64_t count = 1;
  const LinkId id = fold_.RepresentativeOf(link, &count);
  const auto [entry, added] =
      link_index_.try_emplace({static_cast<uint8_t>(id.type), id.level, id.direction, id.owner, id.other},
                              static_cast<int32_t>(workload_.links.size()));
  if (added) workload_.links.push_back({id, capacity, count});
  // All ranks of equal role transfer at once, over all links of the class.
  (*sum)[entry->second] += weight * static_cast<double>(fold_.multiplicity()) / static_cast<double>(count);
}

int32_t WorkloadBuilder::RouteOf(const std::map<int32_t, double>& sum, double limit) {
  for (const auto& [link, weight] : sum) {
    limit = std::min(limit, workload_.links[static_cast<size_t>(link)].capacity / weight);
  }
  const std::vector<std::pair<int32_t, double>> key(sum.begin(), sum.end());
  const auto [entry, added] = route_index_[key].try_emplace(limit, static_cast<int32_t>(workload_.routes.size()));
  if (added) {
    workload_.routes.push_back({static_cast<int32_t>(workload_.uses.size()), static_cast<int32_t>(key.size()), limit});
    for (const auto& [link, weight] : key) workload_.uses.push_back({link, weight});
  }
  return entry->second;
}

int32_t WorkloadBuilder::OpOf(const Op& op) {
  const auto [entry, added] = op_index_.try_emplace(op, static_cast<int32_t>(workload_.ops.size()));
  if (added) workload_.ops.push_back(op);
  return entry->second;
}

int32_t WorkloadBuilder::ChannelOf(int32_t src, int32_t dst) {
  const auto [entry, added] =
      channel_index_.try_emplace(Pair(fold_.RepresentativeOf(src), fold_.Image(src, dst)), workload_.num_channels);
  if (added) {
    workload_.targets.push_back({workload_.num_channels});
    ++workload_.num_channels;
  }
  return entry->second;
}

int32_t WorkloadBuilder::PeerRoute(int32_t rank, int32_t src, int32_t dst, const Figures& figures) {
  const auto [entry, added] = peer_route_.try_emplace(Pair(src, dst), 0);
  if (added) {
    std::map<int32_t, double> sum;
    std::vector<LinkUse> links;
    if (src == dst) {
      AddUse({LinkType::kMemory, 0, 0, rank, 0}, 2, &sum);  // read and written
    } else {
      topology_.Route(src, dst, &links);
      for (const LinkUse& use : links) AddUse(use.link, use.weight, &sum);
      AddUse({LinkType::kMemory, 0, 0, src, 0}, 1, &sum);
      AddUse({LinkType::kMemory, 0, 0, dst, 0}, 1, &sum);
    }
    entry->second = RouteOf(sum, figures.limit);
  }
  return entry->second;
}

void WorkloadBuilder::AddReduce(const Plan& plan, const Step& step, Program* program) {
  // Operands of one class of link are one transfer, as in the cost model.
  struct Part {
    int64_t operands = 0;
    Figures figures;
    std::map<int32_t, double> sum;
  };
  std::map<int32_t, Part> parts;  // by level; -1: own memory
  const double bytes = static_cast<double>(step.count) * bytes_per_item_;
  std::vector<LinkUse> links;
  for (int32_t i = 0; i < step.num_sources; ++i) {
    const int32_t src = plan.sources[static_cast<size_t>(step.first_source + i)].rank;
    Part& part = parts[src == plan.rank ? -1 : topology_.CommonLevel(plan.rank, src)];
    if (++part.operands == 1) part.figures = FiguresOf(plan.rank, src);
    AddUse({LinkType::kMemory, 0, 0, src, 0}, 1, &part.sum);
    if (src == plan.rank) continue;
    links.clear();
    topology_.Route(src, plan.rank, &links);
    for (const LinkUse& use : links) AddUse(use.link, use.weight, &part.sum);
  }
  bool first = true;
  for (auto& [level, part] : parts) {
    if (first) AddUse({LinkType::kMemory, 0, 0, plan.rank, 0}, 1, &part.sum);  // the result is written once
    first = false;
    const auto operands = static_cast<double>(part.operands);
    for (auto& [link, weight] : part.sum) weight /= operands;
    Op op;
    op.route = RouteOf(part.sum, part.figures.limit);
    op.bytes = bytes * operands;
    op.overhead_ps = Picoseconds(part.figures.overhead_s);
    program->ops.push_back(OpOf(op));
  }
}

void WorkloadBuilder::AddStep(const Plan& plan, const Step& step, Program* program) {
  if (step.kind == StepKind::kReduce) return AddReduce(plan, step, program);
  const int32_t rank = plan.rank, peer = step.peer >= 0 ? step.peer : rank;
  const Figures figures = FiguresOf(rank, peer);
  Op op;
  op.overhead_ps = Picoseconds(figures.overhead_s);
  op.queued = figures.queued;
  if (step.kind == StepKind::kWait) {
    op = Op();
    op.kind = OpKind::kWait;
    op.channel = ChannelOf(peer, rank);
  } else if (step.kind == StepKind::kSignal) {
    op.kind = OpKind::kSignal;
    op.channel = ChannelOf(rank, peer);
    op.latency_ps = Picoseconds(topology_.LatencyS(rank, peer));
  } else {
    const bool reads = step.kind == StepKind::kGet;
    op.route = PeerRoute(rank, reads ? peer : rank, reads ? rank : peer, figures);
    op.bytes = static_cast<double>(step.count) * bytes_per_item_;
  }
  program->ops.push_back(OpOf(op));
}

void WorkloadBuilder::Add(const Plan& plan) {
  Program program;
  program.ranks = fold_.multiplicity();
  peer_route_.clear();
  program.ops.reserve(plan.steps.size());
  for (const Step& step : plan.steps) AddStep(plan, step, &program);
  program.loops = FindLoops(program.ops);
  workload_.programs.push_back(std::move(program));
}

Workload WorkloadBuilder::Finish() && { return std::move(workload_); }

std::vector<Loop> FindLoops(const std::vector<int32_t>& ops) {
  const auto size = static_cast<int64_t>(ops.size());
  return size > 0 ? std::vector<Loop>{{0, size, 1}} : std::vector<Loop>{};
}

}  // namespace jaxcomm
