#include "sim/workload.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "sim/hash.h"

namespace jaxcomm {
namespace {

int64_t Picoseconds(double time_s) { return std::llround(time_s * 1e12); }

uint64_t Pair(int32_t a, int32_t b) { return static_cast<uint64_t>(a) << 32 | static_cast<uint32_t>(b); }

uint64_t Bits(double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Different for different links: ranks have 26 bits (Topology::Make).
uint64_t Key(const LinkId& link) {
  const uint64_t kind = static_cast<uint64_t>(link.type) << 8 | static_cast<uint64_t>(link.level) << 4 | link.direction;
  return kind << 52 | static_cast<uint64_t>(link.owner) << 26 | static_cast<uint64_t>(link.other);
}

}  // namespace

WorkloadBuilder::WorkloadBuilder(const Topology& topology, const Fold& fold, const Geometry& geometry,
                                 double bytes_per_item)
    : topology_(topology), fold_(fold), geometry_(geometry), bytes_per_item_(bytes_per_item) {}

WorkloadBuilder::Figures WorkloadBuilder::FiguresOf(int32_t rank, int32_t peer) const {
  const Cluster& cluster = topology_.cluster();
  const double slow = topology_.Slow(rank);
  if (rank == peer) return {cluster.self.overhead_s * slow, cluster.self.bytes_per_s / slow, false};
  const int32_t top = topology_.CommonLevel(rank, peer);
  const Level& level = cluster.levels[static_cast<size_t>(top)];
  return {level.overhead_s * slow, level.flow_bytes_per_s / slow, top > 0 && !geometry_.all_addressable};
}

void WorkloadBuilder::AddUse(const LinkId& link, double weight) {
  const double capacity = topology_.Capacity(link);
  if (!(capacity < kUnlimited)) return;
  int64_t count = 1;
  const LinkId id = fold_.RepresentativeOf(link, &count);
  const auto [entry, added] = link_index_.try_emplace(Key(id), static_cast<int32_t>(workload_.links.size()));
  if (added) {
    workload_.links.push_back({id, capacity, count});
    sum_.push_back(0);
  }
  double& sum = sum_[static_cast<size_t>(entry->second)];
  if (sum == 0) touched_.push_back(entry->second);
  // All ranks of equal role transfer at once, over all links of the class.
  sum += weight * multiplicity_ / static_cast<double>(count);
}

int32_t WorkloadBuilder::TakeRoute(double scale, double limit) {
  std::sort(touched_.begin(), touched_.end());
  uint64_t hash = 0;
  for (int32_t link : touched_) {
    double& weight = sum_[static_cast<size_t>(link)];
    weight *= scale;
    limit = std::min(limit, workload_.links[static_cast<size_t>(link)].capacity / weight);
    hash = Mix(Mix(hash ^ static_cast<uint64_t>(link)) ^ Bits(weight));
  }
  hash = Mix(hash ^ Bits(limit));
  const auto same = [&](const TransferRoute& route) {
    if (route.limit != limit || static_cast<size_t>(route.count) != touched_.size()) return false;
    for (size_t i = 0; i < touched_.size(); ++i) {
      const ClassUse& use = workload_.uses[static_cast<size_t>(route.first) + i];
      if (use.link != touched_[i] || use.weight != sum_[static_cast<size_t>(touched_[i])]) return false;
    }
    return true;
  };
  const auto clear = [&] {
    for (int32_t link : touched_) sum_[static_cast<size_t>(link)] = 0;
    touched_.clear();
  };
  const int32_t known =
      route_index_.Find(hash, [&](int32_t i) { return same(workload_.routes[static_cast<size_t>(i)]); });
  if (known >= 0) {
    clear();
    return known;
  }
  const auto index = static_cast<int32_t>(workload_.routes.size());
  workload_.routes.push_back(
      {static_cast<int32_t>(workload_.uses.size()), static_cast<int32_t>(touched_.size()), limit});
  for (int32_t link : touched_) workload_.uses.push_back({link, sum_[static_cast<size_t>(link)]});
  route_index_.Add(hash, index);
  clear();
  return index;
}

int32_t WorkloadBuilder::OpOf(const Op& op) {
  uint64_t hash = Mix(static_cast<uint64_t>(op.kind) * 2 + (op.queued ? 1 : 0));
  hash = Mix(hash ^ Pair(op.route, op.counter));
  hash = Mix(Mix(hash ^ Bits(op.bytes)) + static_cast<uint64_t>(op.overhead_ps));
  hash = Mix(hash + static_cast<uint64_t>(op.latency_ps));
  const int32_t known = op_index_.Find(hash, [&](int32_t i) { return workload_.ops[static_cast<size_t>(i)] == op; });
  if (known >= 0) return known;
  const auto index = static_cast<int32_t>(workload_.ops.size());
  op_index_.Add(hash, index);
  workload_.ops.push_back(op);
  return index;
}

int32_t WorkloadBuilder::CounterOf(const Fold::Counter& counter) {
  const uint64_t key = Pair(counter.first, counter.second), hash = Mix(key);
  const int32_t known =
      counter_index_.Find(hash, [&](int32_t i) { return counter_keys_[static_cast<size_t>(i)] == key; });
  if (known >= 0) return known;
  counter_index_.Add(hash, workload_.num_counters);
  counter_keys_.push_back(key);
  target_of_counter_.push_back(-1);
  return workload_.num_counters++;
}

int32_t WorkloadBuilder::TargetsOf(int32_t rank, int64_t step, int32_t peer) {
  std::vector<int32_t> counters;
  for (const Fold::Counter& counter : fold_.Targets(rank, step, peer)) counters.push_back(CounterOf(counter));
  const auto index = static_cast<int32_t>(workload_.target_first.size() - 1);
  const auto append = [&](const std::vector<int32_t>& list) {
    workload_.target_counters.insert(workload_.target_counters.end(), list.begin(), list.end());
    workload_.target_first.push_back(static_cast<int32_t>(workload_.target_counters.size()));
  };
  if (counters.size() == 1) {
    int32_t& target = target_of_counter_[static_cast<size_t>(counters[0])];
    if (target < 0) {
      target = index;
      append(counters);
    }
    return target;
  }
  const auto [entry, added] = targets_index_.try_emplace(std::move(counters), index);
  if (added) append(entry->first);
  return entry->second;
}

int32_t WorkloadBuilder::PeerRoute(int32_t rank, int32_t src, int32_t dst, const Figures& figures) {
  const uint64_t key = Pair(src, dst), hash = Mix(key);
  const int32_t known =
      peer_index_.Find(hash, [&](int32_t i) { return peer_routes_[static_cast<size_t>(i)].first == key; });
  if (known >= 0) return peer_routes_[static_cast<size_t>(known)].second;
  if (src == dst) {
    AddUse({LinkType::kMemory, 0, 0, rank, 0}, 2);  // read and written
  } else {
    links_.clear();
    topology_.Route(src, dst, &links_);
    for (const LinkUse& use : links_) AddUse(use.link, use.weight);
    AddUse({LinkType::kMemory, 0, 0, src, 0}, 1);
    AddUse({LinkType::kMemory, 0, 0, dst, 0}, 1);
  }
  const int32_t route = TakeRoute(1, figures.limit);
  peer_index_.Add(hash, static_cast<int32_t>(peer_routes_.size()));
  peer_routes_.emplace_back(key, route);
  return route;
}

void WorkloadBuilder::AddReduce(const Plan& plan, const Step& step, RankOps* program) {
  // Operands of one level are one transfer, as in the cost model.
  const double bytes = static_cast<double>(step.count) * bytes_per_item_;
  const auto source = [&](int32_t i) { return plan.sources[static_cast<size_t>(step.first_source + i)].rank; };
  const auto level_of = [&](int32_t src) { return src == plan.rank ? -1 : topology_.CommonLevel(plan.rank, src); };
  std::vector<int32_t> levels;
  for (int32_t i = 0; i < step.num_sources; ++i) {
    const int32_t level = level_of(source(i));
    if (std::find(levels.begin(), levels.end(), level) == levels.end()) levels.push_back(level);
  }
  std::sort(levels.begin(), levels.end());
  for (int32_t level : levels) {
    double operands = 0;
    Figures figures;
    for (int32_t i = 0; i < step.num_sources; ++i) {
      const int32_t src = source(i);
      if (level_of(src) != level) continue;
      if (operands++ == 0) figures = FiguresOf(plan.rank, src);
      AddUse({LinkType::kMemory, 0, 0, src, 0}, 1);
      if (src == plan.rank) continue;
      links_.clear();
      topology_.Route(src, plan.rank, &links_);
      for (const LinkUse& use : links_) AddUse(use.link, use.weight);
    }
    if (level == levels.front()) AddUse({LinkType::kMemory, 0, 0, plan.rank, 0}, 1);  // the result is written once
    Op op;
    op.route = TakeRoute(1 / operands, figures.limit);
    op.bytes = bytes * operands;
    op.overhead_ps = Picoseconds(figures.overhead_s);
    program->ops.push_back(OpOf(op));
  }
}

bool WorkloadBuilder::IsShort(const Step& step) const {
  return IsMove(step.kind) && static_cast<double>(step.count) * bytes_per_item_ <= topology_.cluster().together_bytes;
}

std::vector<size_t> WorkloadBuilder::OrderOf(const Plan& plan) const {
  const double together_bytes = topology_.cluster().together_bytes;
  if (geometry_.num_nodes > 1 || together_bytes == 0) {
    std::vector<size_t> order(plan.steps.size());
    std::iota(order.begin(), order.end(), size_t{0});
    return order;
  }
  return WaitsFirst(plan, static_cast<int64_t>(together_bytes / std::max(bytes_per_item_, 1.0)));
}

double WorkloadBuilder::SharedOverhead(const Step& step, double overhead_s) {
  if (!IsShort(step)) return overhead_s;
  const double more_s = std::max(overhead_s - shared_s_, 0.0);
  shared_s_ += more_s;
  return more_s;
}

void WorkloadBuilder::AddStep(const Plan& plan, const Step& step, RankOps* program) {
  const bool ends_group = step.kind == StepKind::kWait ? geometry_.num_nodes > 1 : !IsShort(step);
  if (ends_group) shared_s_ = 0;
  if (step.kind == StepKind::kReduce) return AddReduce(plan, step, program);
  const int32_t rank = plan.rank, peer = step.peer >= 0 ? step.peer : rank;
  const Figures figures = FiguresOf(rank, peer);
  Op op;
  op.overhead_ps = Picoseconds(figures.queued ? figures.overhead_s : SharedOverhead(step, figures.overhead_s));
  op.queued = figures.queued;
  if (step.kind == StepKind::kWait) {
    op = Op();
    op.kind = OpKind::kWait;
    op.counter = CounterOf(fold_.CounterOf(peer, rank));
  } else if (step.kind == StepKind::kSignal) {
    op.kind = OpKind::kSignal;
    op.counter = TargetsOf(rank, &step - plan.steps.data(), peer);
    op.latency_ps = Picoseconds(topology_.LatencyS(rank, peer));
  } else {
    const bool reads = step.kind == StepKind::kGet;
    op.route = PeerRoute(rank, reads ? peer : rank, reads ? rank : peer, figures);
    op.bytes = static_cast<double>(step.count) * bytes_per_item_;
  }
  program->ops.push_back(OpOf(op));
}

void WorkloadBuilder::Add(const Plan& plan) {
  RankOps program;
  program.ranks = fold_.Multiplicity(plan.rank);
  if (!topology_.StartsTogether()) program.start_ps = Picoseconds(topology_.StartS(plan.rank));
  multiplicity_ = static_cast<double>(program.ranks);
  peer_index_.Clear();
  peer_routes_.clear();
  program.ops.reserve(plan.steps.size());
  shared_s_ = 0;
  for (const size_t i : OrderOf(plan)) AddStep(plan, plan.steps[i], &program);
  workload_.programs.push_back(std::move(program));
}

Workload WorkloadBuilder::Finish() && { return std::move(workload_); }

}  // namespace jaxcomm
