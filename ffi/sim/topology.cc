#include "sim/topology.h"

#include <algorithm>

namespace jaxcomm {
namespace {

constexpr int64_t kMaxRanks = 1 << 26;

// Out of one rank's link into a switch, and into another's.
void Cross(uint8_t level, int32_t from, int32_t to, std::vector<LinkId>* links) {
  links->push_back({LinkType::kOut, level, from});
  links->push_back({LinkType::kIn, level, to});
}

// Whether groups of ranks share the link.
bool IsUplink(const LinkId& link) { return link.type == LinkType::kUp || link.type == LinkType::kDown; }

}  // namespace

Machine MachineOf(const Cluster& cluster, int64_t num_ranks) {
  Machine machine;
  machine.launch_s = cluster.launch_s;
  machine.sync_overhead_s = cluster.sync_overhead_s;
  machine.concurrent_bytes = static_cast<int64_t>(cluster.concurrent_bytes);
  machine.arena = cluster.arena;
  machine.links[static_cast<size_t>(Link::kSelf)] = cluster.self;
  const Level& inner = cluster.levels.front();
  machine.links[static_cast<size_t>(Link::kNode)] = {
      inner.overhead_s, std::min(inner.bytes_per_s, inner.flow_bytes_per_s), inner.latency_s};
  LinkModel& network = machine.links[static_cast<size_t>(Link::kNetwork)];
  network = machine.links[static_cast<size_t>(Link::kNode)];
  for (size_t i = 1; i < cluster.levels.size() && cluster.levels[i - 1].ranks < num_ranks; ++i) {
    const Level& level = cluster.levels[i];
    network.latency_s = level.latency_s + (i > 1 ? network.latency_s : 0);
    network.overhead_s = level.overhead_s;
    network.bytes_per_s = std::min(i == 1 ? level.bytes_per_s : network.bytes_per_s, level.flow_bytes_per_s);
  }
  return machine;
}

StatusOr<Topology> Topology::Make(const Cluster& cluster, int64_t num_ranks) {
  const auto fail = [](const std::string& text) { return InvalidArgumentError("cluster: " + text); };
  if (cluster.levels.empty()) return fail("needs at least one level");
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    return fail("the number of ranks must be from 1 to " + std::to_string(kMaxRanks) + ", got " +
                std::to_string(num_ranks));
  }
  Topology topology;
  topology.cluster_ = cluster;
  topology.num_ranks_ = num_ranks;
  std::vector<Level>& levels = topology.cluster_.levels;
  int64_t below = 1;
  for (size_t i = 0; i < levels.size(); ++i) {
    Level& level = levels[i];
    if (level.ranks < 1 || level.ranks % below != 0) {
      return fail("level " + level.name + " has " + std::to_string(level.ranks) +
                  " ranks, which is not a multiple of the " + std::to_string(below) + " below it");
    }
    if (level.kind == LevelKind::kRails && i != 1)
      return fail("level " + level.name + " cannot be of its kind at this place");
    if (level.ranks < num_ranks && num_ranks % level.ranks != 0) {
      return fail(std::to_string(num_ranks) + " ranks cannot be split into groups of " + std::to_string(level.ranks) +
                  " (level " + level.name + ")");
    }
    topology.digits_.push_back(std::min(level.ranks, num_ranks) / below);
    if (level.ranks >= num_ranks) {
      level.ranks = num_ranks;
      levels.resize(i + 1);
      break;
    }
    below = level.ranks;
    if (i + 1 == levels.size()) {
      return fail("has " + std::to_string(level.ranks) + " ranks, fewer than " + std::to_string(num_ranks));
    }
  }
  int64_t stride = 1;
  for (int64_t size : topology.digits_) {
    topology.strides_.push_back(stride);
    stride *= size;
  }
  topology.AddFaults();
  return topology;
}

void Topology::AddFaults() {
  const std::vector<Level>& levels = cluster_.levels;
  const int64_t locals = levels[0].ranks;
  for (const LinkFault& fault : cluster_.faults) {
    if (static_cast<size_t>(fault.level) >= levels.size()) continue;  // these ranks do not use it
    auto owner = static_cast<int32_t>(fault.index);
    if (fault.level >= 2) {
      const int64_t below = levels[static_cast<size_t>(fault.level - 1)].ranks;
      owner = static_cast<int32_t>(fault.level == 2 && Rails() ? fault.index / locals * below + fault.index % locals
                                                               : fault.index * below);
    }
    if (fault.capacity == 0) {
      lost_.insert(owner);
      continue;
    }
    if (fault.level == 1 && fault.latency_s > 0) hops_[owner] = fault.latency_s;
    const LinkType out = fault.level < 2 ? LinkType::kOut : LinkType::kUp;
    const LinkType in = fault.level < 2 ? LinkType::kIn : LinkType::kDown;
    const auto level = static_cast<uint8_t>(fault.level);
    if (fault.out) shares_[KeyOf({out, level, owner})] = fault.capacity;
    if (fault.in) shares_[KeyOf({in, level, owner})] = fault.capacity;
  }
  for (const SlowRank& slow : cluster_.slow_ranks) slow_[slow.rank] = slow.slow;
}

double Topology::Slow(int32_t rank) const {
  const auto found = slow_.find(rank);
  return found == slow_.end() ? 1 : found->second;
}

double Topology::HopS(int32_t rank) const {
  const auto found = hops_.find(rank);
  return found == hops_.end() ? 0 : found->second;
}

std::pair<int32_t, int32_t> Topology::Relays(int32_t src, int32_t dst) const {
  if (lost_.empty()) return {src, dst};
  const auto locals = static_cast<int32_t>(cluster_.levels[0].ranks);
  const int32_t src_domain = src / locals * locals, dst_domain = dst / locals * locals;
  const bool changes_rails = Rails() && cluster_.levels.size() == 2;  // as in RouteBetween
  if (!Lost(src) && !Lost(dst) && !(changes_rails && Lost(src_domain + dst % locals))) return {src, dst};
  // One local index for both domains, so that the relays are on one rail.
  for (int32_t i = 0; i < locals; ++i) {
    const int32_t local = (std::max(src % locals, dst % locals) + 1 + i) % locals;
    if (!Lost(src_domain + local) && !Lost(dst_domain + local)) return {src_domain + local, dst_domain + local};
  }
  // No rail is whole in both domains.
  const auto alive = [&](int32_t first) {
    int32_t rank = first;
    while (Lost(rank)) ++rank;
    return rank;
  };
  return {alive(src_domain), alive(dst_domain)};
}

int32_t Topology::CommonLevel(int32_t a, int32_t b) const {
  int32_t level = 0;
  while (Group(a, level) != Group(b, level)) ++level;
  return level;
}

int64_t Topology::RanksBelow(int32_t level) const {
  const std::vector<Level>& levels = cluster_.levels;
  const int64_t ranks = levels[static_cast<size_t>(level - 1)].ranks;
  return level == 2 && Rails() ? ranks / levels[0].ranks : ranks;
}

int32_t Topology::Below(int32_t rank, int32_t level) const {
  const int64_t ranks = cluster_.levels[static_cast<size_t>(level - 1)].ranks;
  const int64_t rail = level == 2 && Rails() ? rank % cluster_.levels[0].ranks : 0;
  return static_cast<int32_t>(rank / ranks * ranks + rail);
}

bool Topology::Crosses(int32_t src, int32_t dst, int32_t level) const { return Below(src, level) != Below(dst, level); }

double Topology::LatencyS(int32_t src, int32_t dst) const {
  const std::vector<Level>& levels = cluster_.levels;
  const auto top = static_cast<size_t>(CommonLevel(src, dst));
  if (top == 0) return levels[0].latency_s;
  double latency_s = levels[1].latency_s;
  for (size_t i = 2; i < levels.size(); ++i) {
    if (Crosses(src, dst, static_cast<int32_t>(i))) latency_s += levels[i].latency_s;
  }
  const auto [first, last] = Relays(src, dst);
  const bool over_domain = Rails() && levels.size() == 2 && first % levels[0].ranks != last % levels[0].ranks;
  const int hops = (over_domain ? 1 : 0) + (first != src ? 1 : 0) + (last != dst ? 1 : 0);
  return latency_s + hops * levels[0].latency_s + HopS(src) + HopS(dst);
}

void Topology::Route(int32_t src, int32_t dst, std::vector<LinkId>* links) const {
  if (CommonLevel(src, dst) == 0) return Cross(0, src, dst, links);
  const auto [first, last] = Relays(src, dst);
  if (first != src) Route(src, first, links);
  RouteBetween(first, last, links);
  if (last != dst) Route(last, dst, links);
}

void Topology::RouteBetween(int32_t src, int32_t dst, std::vector<LinkId>* links) const {
  const std::vector<Level>& levels = cluster_.levels;
  const auto local_ranks = static_cast<int32_t>(levels[0].ranks);
  if (Rails() && levels.size() == 2 && src % local_ranks != dst % local_ranks) {
    // Without a level above, no switch joins two rails: the data changes rails inside the sender's domain.
    const int32_t relay = src / local_ranks * local_ranks + dst % local_ranks;
    Cross(0, src, relay, links);
    return Cross(1, relay, dst, links);
  }
  Cross(1, src, dst, links);
  for (size_t i = 2; i < levels.size(); ++i) {
    const auto level = static_cast<int32_t>(i);
    if (!Crosses(src, dst, level)) continue;
    links->push_back({LinkType::kUp, static_cast<uint8_t>(level), Below(src, level)});
    links->push_back({LinkType::kDown, static_cast<uint8_t>(level), Below(dst, level)});
  }
}

double Topology::Capacity(const LinkId& link) const {
  const auto share = shares_.find(KeyOf(link));
  return WholeCapacity(link) * (share == shares_.end() ? 1 : share->second);
}

double Topology::WholeCapacity(const LinkId& link) const {
  if (link.type == LinkType::kMemory) return cluster_.memory_bytes_per_s;
  const Level& level = cluster_.levels[link.level];
  if (!IsUplink(link)) return level.bytes_per_s;
  return static_cast<double>(RanksBelow(link.level)) * cluster_.levels[1].bytes_per_s / level.taper;
}

uint32_t Topology::OwnerDigits(const LinkId& link) const {
  const uint32_t all = (1U << digits_.size()) - 1;
  if (!IsUplink(link)) return all;
  return (all & ~((1U << link.level) - 1)) | (link.level == 2 && Rails() ? 1U : 0);
}

std::string Topology::Name(const LinkId& link) const {
  constexpr const char* kNames[] = {"memory", " out", " in", " up", " down"};
  const char* const name = kNames[static_cast<size_t>(link.type)];
  return link.type == LinkType::kMemory ? name : cluster_.levels[link.level].name + name;
}

}  // namespace jaxcomm
