#include "sim/workload.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "sim/hash.h"

namespace jaxcomm {
namespace {

// Limits of the table of counters: 32 MB. With more senders, each has few receivers.
constexpr size_t kMaxCounterTable = 8 << 20;
constexpr size_t kMaxCounterRows = 64;

int64_t Picoseconds(double time_s) { return std::llround(time_s * 1e12); }

uint64_t Pair(int32_t a, int32_t b) { return static_cast<uint64_t>(a) << 32 | static_cast<uint32_t>(b); }

uint64_t Key(const LinkId& link) {
  const uint64_t kind = static_cast<uint64_t>(link.type) << 4 | link.level;
  return kind << 32 | static_cast<uint32_t>(link.owner);
}

}  // namespace

WorkloadBuilder::WorkloadBuilder(const Topology& topology, const Fold& fold, const Geometry& geometry,
                                 double bytes_per_item, const ArenaCopies& copies)
    : topology_(topology), fold_(fold), geometry_(geometry), bytes_per_item_(bytes_per_item), copies_(copies) {
  counter_row_.assign(static_cast<size_t>(topology.num_ranks()), -1);
  by_crossed_.resize(size_t{2} << topology.cluster().levels.size());
  by_role_ = !fold.HasColours() && !topology.HasFaults();
}

WorkloadBuilder::Figures WorkloadBuilder::FiguresOf(int32_t rank, int32_t peer) const {
  const Cluster& cluster = topology_.cluster();
  const double slow = topology_.Slow(rank);
  if (rank == peer) return {cluster.self.overhead_s * slow, cluster.self.bytes_per_s / slow, false};
  const int32_t top = topology_.CommonLevel(rank, peer);
  const Level& level = cluster.levels[static_cast<size_t>(top)];
  return {level.overhead_s * slow, level.flow_bytes_per_s / slow, top > 0 && !geometry_.all_addressable};
}

uint32_t WorkloadBuilder::Crossed(int32_t rank, int32_t peer) const {
  const std::vector<Level>& levels = topology_.cluster().levels;
  uint32_t crossed = 0;
  for (const Level& level : levels) {
    const auto ranks = static_cast<int32_t>(level.ranks);
    crossed = crossed << 1 | (rank / ranks != peer / ranks ? 1U : 0U);
  }
  const auto locals = static_cast<int32_t>(levels[0].ranks);
  return crossed << 1 | (rank % locals == peer % locals ? 1U : 0U);
}

WorkloadBuilder::PeerFigures& WorkloadBuilder::FiguresOfPeer(int32_t rank, int32_t peer) {
  if (peer == last_peer_) return *last_figures_;
  last_peer_ = peer;
  const auto compute = [&] { return PeerFigures{FiguresOf(rank, peer), topology_.LatencyS(rank, peer), -1}; };
  if (!by_role_ || peer == rank) {
    other_figures_ = compute();
    last_figures_ = &other_figures_;
    return other_figures_;
  }
  std::optional<PeerFigures>& known = by_crossed_[Crossed(rank, peer)];
  if (!known) known = compute();
  last_figures_ = &*known;
  return *known;
}

void WorkloadBuilder::AddUse(const LinkId& link, double weight) {
  const double capacity = topology_.Capacity(link);
  if (!(capacity < kUnlimited)) return;
  int64_t count = 1;
  const LinkId id = fold_.RepresentativeOf(link, &count);
  const auto [entry, added] = link_index_.try_emplace(Key(id), static_cast<int32_t>(workload_.links.size()));
  if (added) {
    workload_.links.push_back({id, capacity});
    sum_.push_back(0);
    row_sum_.push_back(0);
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
  hash = Mix(hash ^ static_cast<uint32_t>(op.route));
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
  const auto n = static_cast<size_t>(topology_.num_ranks());
  int32_t& row = counter_row_[static_cast<size_t>(counter.first)];
  if (row < 0 && counter_rows_.size() < kMaxCounterRows && (counter_rows_.size() + 1) * n <= kMaxCounterTable) {
    row = static_cast<int32_t>(counter_rows_.size());
    counter_rows_.emplace_back(n, -1);
  }
  if (row >= 0) {
    int32_t& known = counter_rows_[static_cast<size_t>(row)][static_cast<size_t>(counter.second)];
    if (known < 0) known = workload_.num_counters++;
    return known;
  }
  const uint64_t key = Pair(counter.first, counter.second), hash = Mix(key);
  const int32_t entry =
      counter_index_.Find(hash, [&](int32_t i) { return counters_[static_cast<size_t>(i)].first == key; });
  if (entry >= 0) return counters_[static_cast<size_t>(entry)].second;
  counter_index_.Add(hash, static_cast<int32_t>(counters_.size()));
  counters_.emplace_back(key, workload_.num_counters);
  return workload_.num_counters++;
}

int32_t WorkloadBuilder::TargetsOf(int32_t rank, int64_t step, int32_t peer) {
  if (!fold_.HasColours()) return CounterOf(fold_.CounterOf(rank, peer));
  std::vector<int32_t> counters;
  for (const Fold::Counter& counter : fold_.Targets(rank, step, peer)) counters.push_back(CounterOf(counter));
  if (counters.size() == 1) return counters[0];
  const auto list = static_cast<int32_t>(workload_.target_first.size() - 1);
  const auto [entry, added] = targets_index_.try_emplace(std::move(counters), list);
  if (added) {
    workload_.target_counters.insert(workload_.target_counters.end(), entry->first.begin(), entry->first.end());
    workload_.target_first.push_back(static_cast<int32_t>(workload_.target_counters.size()));
  }
  return -1 - entry->second;
}

uint64_t WorkloadBuilder::RouteKey(int32_t rank, int32_t src, int32_t dst) const {
  if (!by_role_) return Pair(src, dst);
  if (src == dst) return Pair(-1, src);
  // The links of the peer are those of its representative. Which levels a transfer crosses follows from both numbers.
  const int32_t peer = src == rank ? dst : src;
  const uint32_t direction = src == rank ? 1 : 2;
  const uint32_t crossed = direction << (topology_.cluster().levels.size() + 1) | Crossed(rank, peer);
  return Pair(static_cast<int32_t>(crossed), fold_.RepresentativeOf(peer));
}

int32_t WorkloadBuilder::PeerRoute(int32_t rank, int32_t src, int32_t dst, const Figures& figures) {
  if (src == last_src_ && dst == last_dst_) return last_route_;
  last_src_ = src;
  last_dst_ = dst;
  const uint64_t key = RouteKey(rank, src, dst), hash = Mix(key);
  const int32_t known =
      peer_index_.Find(hash, [&](int32_t i) { return peer_routes_[static_cast<size_t>(i)].first == key; });
  if (known >= 0) return last_route_ = peer_routes_[static_cast<size_t>(known)].second;
  if (src == dst) {
    AddUse({LinkType::kMemory, 0, rank}, 2);  // read and written
  } else {
    links_.clear();
    topology_.Route(src, dst, &links_);
    for (const LinkId& link : links_) AddUse(link);
    AddUse({LinkType::kMemory, 0, src});
    AddUse({LinkType::kMemory, 0, dst});
  }
  const int32_t route = TakeRoute(1, figures.limit);
  peer_index_.Add(hash, static_cast<int32_t>(peer_routes_.size()));
  peer_routes_.emplace_back(key, route);
  return last_route_ = route;
}

void WorkloadBuilder::FindOperands(const Plan& plan, const Step& step) {
  const Place* sources = plan.sources.data() + step.first_source;
  const auto same = [](const Place& source, int32_t rank) { return source.rank == rank; };
  if (std::equal(sources, sources + step.num_sources, operand_ranks_.begin(), operand_ranks_.end(), same)) return;
  operand_ranks_.clear();
  operands_.clear();
  for (int32_t i = 0; i < step.num_sources; ++i) operand_ranks_.push_back(sources[i].rank);
  // Operands of one level are one transfer, as in the cost model.
  const auto level_of = [&](int32_t src) { return src == plan.rank ? -1 : topology_.CommonLevel(plan.rank, src); };
  std::vector<int32_t> levels;
  for (int32_t src : operand_ranks_) {
    const int32_t level = level_of(src);
    if (std::find(levels.begin(), levels.end(), level) == levels.end()) levels.push_back(level);
  }
  std::sort(levels.begin(), levels.end());
  for (int32_t level : levels) {
    Operands operands;
    operands.level = level;
    for (int32_t src : operand_ranks_) {
      if (level_of(src) != level) continue;
      if (operands.count++ == 0) operands.figures = FiguresOf(plan.rank, src);
      AddUse({LinkType::kMemory, 0, src});
      if (src == plan.rank) continue;
      links_.clear();
      topology_.Route(src, plan.rank, &links_);
      for (const LinkId& link : links_) AddUse(link);
    }
    if (level == levels.front()) AddUse({LinkType::kMemory, 0, plan.rank});  // the result is written once
    for (int32_t link : touched_) operands.uses.push_back({link, std::exchange(sum_[static_cast<size_t>(link)], 0)});
    touched_.clear();
    operands_.push_back(std::move(operands));
  }
}

void WorkloadBuilder::AddReduce(const Plan& plan, const Step& step, RankOps* program) {
  FindOperands(plan, step);
  const bool is_short = IsShort(step);
  const double bytes = static_cast<double>(step.count) * bytes_per_item_;
  for (const Operands& operands : operands_) {
    if (is_short) {
      for (const ClassUse& use : operands.uses) AddToRow(use, bytes);
      AddToRow(operands.level, bytes * operands.count, operands.figures.limit);
      row_.new_overhead_s += operands.figures.overhead_s;
      continue;
    }
    for (const ClassUse& use : operands.uses) {
      touched_.push_back(use.link);
      sum_[static_cast<size_t>(use.link)] = use.weight;
    }
    Op op;
    op.route = TakeRoute(1 / operands.count, operands.figures.limit);
    op.bytes = bytes * operands.count;
    op.overhead_ps = Picoseconds(operands.figures.overhead_s);
    Append(op, program);
  }
}

void WorkloadBuilder::AddToRow(const ClassUse& use, double bytes) {
  double& sum = row_sum_[static_cast<size_t>(use.link)];
  if (sum == 0) row_.links.push_back(use.link);
  sum += use.weight * bytes;
}

void WorkloadBuilder::AddToRow(int32_t level, double bytes, double limit) {
  const auto entry = static_cast<size_t>(level + 1);
  if (row_.busy_s.size() <= entry) row_.busy_s.resize(entry + 1, 0);
  row_.busy_s[entry] += bytes / limit;
  row_.bytes += bytes;
}

void WorkloadBuilder::RunRow(RankOps* program) {
  if (row_.IsEmpty()) return;
  Op op;
  op.bytes = std::exchange(row_.bytes, 0);
  op.overhead_ps = Picoseconds(std::exchange(row_.new_overhead_s, 0));
  for (int32_t link : row_.links) {
    touched_.push_back(link);
    sum_[static_cast<size_t>(link)] = std::exchange(row_sum_[static_cast<size_t>(link)], 0);
  }
  row_.links.clear();
  const double busy_s = row_.busy_s.empty() ? 0 : *std::max_element(row_.busy_s.begin(), row_.busy_s.end());
  const double more_s = busy_s - std::exchange(row_.run_s, busy_s);
  op.route = TakeRoute(op.bytes > 0 ? 1 / op.bytes : 1, more_s > 0 ? op.bytes / more_s : kUnlimited);
  Append(op, program);
}

bool WorkloadBuilder::IsShort(const Step& step) const {
  return static_cast<double>(step.count) * bytes_per_item_ <= topology_.cluster().concurrent_bytes;
}

std::vector<size_t> WorkloadBuilder::OrderOf(const Plan& plan) const {
  // If no move is short, the order is that of the plan.
  const double concurrent_bytes = geometry_.num_nodes > 1 ? 0 : topology_.cluster().concurrent_bytes;
  return WaitsFirst(plan, static_cast<int64_t>(concurrent_bytes / std::max(bytes_per_item_, 1.0)));
}

void WorkloadBuilder::AddSignal(const Plan& plan, const Step& step, RankOps* program) {
  PeerFigures& peer = FiguresOfPeer(plan.rank, step.peer);
  const Figures& figures = peer.figures;
  const int32_t counter = TargetsOf(plan.rank, &step - plan.steps.data(), step.peer);
  if (figures.queued && peer.signal_op >= 0) {
    program->ops.push_back({peer.signal_op, counter});
    return;
  }
  double overhead_s = figures.overhead_s;
  if (topology_.cluster().concurrent_bytes > 0 && !figures.queued) {  // by a thread each
    overhead_s = std::max(overhead_s - signals_s_, 0.0);
    signals_s_ += overhead_s;
  }
  Op op;
  op.kind = OpKind::kSignal;
  op.queued = figures.queued;
  op.overhead_ps = Picoseconds(overhead_s);
  op.latency_ps = Picoseconds(peer.latency_s);
  const int32_t index = OpOf(op);
  if (figures.queued) peer.signal_op = index;
  program->ops.push_back({index, counter});
}

void WorkloadBuilder::AddStep(const Plan& plan, const Step& step, RankOps* program) {
  const int32_t rank = plan.rank, peer = step.peer >= 0 ? step.peer : rank;
  const bool moves_data = step.kind != StepKind::kSignal && step.kind != StepKind::kWait;
  const bool is_short = moves_data && IsShort(step), reduces = step.kind == StepKind::kReduce;
  const bool waits = step.kind == StepKind::kWait;
  const Figures figures = reduces || waits ? Figures() : FiguresOfPeer(rank, peer).figures;
  const bool joins = is_short && !figures.queued;
  const bool ends_row = waits ? geometry_.num_nodes > 1 : !is_short;
  if (!joins) RunRow(program);
  if (ends_row) row_ = Row();
  if (step.kind == StepKind::kSignal) return AddSignal(plan, step, program);
  signals_s_ = 0;
  if (reduces) return AddReduce(plan, step, program);
  Op op;
  if (waits) {
    op.kind = OpKind::kWait;
    if (wait_op_ < 0) wait_op_ = OpOf(op);
    program->ops.push_back({wait_op_, CounterOf(fold_.CounterOf(peer, rank))});
    return;
  }
  const bool reads = step.kind == StepKind::kGet;
  op.bytes = static_cast<double>(step.count) * bytes_per_item_;
  op.route = PeerRoute(rank, reads ? peer : rank, reads ? rank : peer, figures);
  if (joins) {
    const TransferRoute& route = workload_.routes[static_cast<size_t>(op.route)];
    for (int32_t i = route.first; i < route.first + route.count; ++i) {
      AddToRow(workload_.uses[static_cast<size_t>(i)], op.bytes);
    }
    AddToRow(peer == rank ? -1 : topology_.CommonLevel(rank, peer), op.bytes, figures.limit);
    const double more_s = IsMove(step.kind) ? std::max(figures.overhead_s - row_.overhead_s, 0.0) : figures.overhead_s;
    if (IsMove(step.kind)) row_.overhead_s += more_s;
    row_.new_overhead_s += more_s;
    return;
  }
  op.queued = figures.queued;
  op.overhead_ps = Picoseconds(figures.overhead_s);
  Append(op, program);
}

void WorkloadBuilder::AddCopy(int32_t rank, int64_t count, RankOps* program) {
  if (count == 0) return;
  Op op;
  op.route = PeerRoute(rank, rank, rank, FiguresOf(rank, rank));
  op.bytes = static_cast<double>(count) * bytes_per_item_;
  Append(op, program);
}

void WorkloadBuilder::Add(const Plan& plan) {
  RankOps program;
  program.ranks = fold_.Multiplicity(plan.rank);
  multiplicity_ = static_cast<double>(program.ranks);
  peer_index_.Clear();
  peer_routes_.clear();
  last_src_ = last_dst_ = last_peer_ = -1;
  by_crossed_.assign(by_crossed_.size(), std::nullopt);
  operand_ranks_.clear();
  program.ops.reserve(plan.steps.size());
  row_ = Row();
  signals_s_ = 0;
  AddCopy(plan.rank, copies_.before, &program);
  for (const size_t i : OrderOf(plan)) AddStep(plan, plan.steps[i], &program);
  RunRow(&program);
  AddCopy(plan.rank, copies_.after, &program);
  workload_.programs.push_back(std::move(program));
}

Workload WorkloadBuilder::Finish() && { return std::move(workload_); }

}  // namespace jaxcomm
