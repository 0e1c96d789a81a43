// Colour refinement of the plans of all ranks. Source: Berkholz, Bonsma, Grohe, Theory of Computing Systems 60, 2017,
// doi 10.1007/s00224-016-9686-0 (the coarsest equitable partition; colours here are hashes).
#include <algorithm>
#include <unordered_set>

#include "sim/fold.h"
#include "sim/hash.h"

namespace jaxcomm {
namespace {

// Limits on the steps of all ranks together, and on the rounds. Chains need a round for each rank.
constexpr size_t kMaxEdges = 20'000'000;
constexpr int kMaxRounds = 64;

// A step or an operand that involves another rank. `role`: its number in the plan, kind and level.
struct Edge {
  int32_t peer = 0;
  int32_t step = 0;
  uint64_t role = 0;
};

// Links that several ranks share, once for each of the ranks: what Topology::Route may use above the adapters.
std::vector<LinkId> SharedLinks(const Topology& topology, int32_t rank) {
  std::vector<LinkId> links, shared;
  const uint32_t all = (1U << topology.digits().size()) - 1;
  // The rank with other digits everywhere is the farthest.
  int64_t far = 0;
  for (size_t i = 0; i < topology.digits().size(); ++i) {
    const int64_t size = topology.digits()[i], stride = topology.strides()[i];
    far += (rank / stride % size + 1) % size * stride;
  }
  topology.Route(rank, static_cast<int32_t>(far), &links);
  const size_t out = links.size();
  topology.Route(static_cast<int32_t>(far), rank, &links);
  for (size_t i = 0; i < links.size(); ++i) {
    const LinkId& link = links[i];
    if (topology.OwnerDigits(link) == all) continue;
    const bool leaves = link.type == LinkType::kOut || link.type == LinkType::kUp;
    if ((i < out) == leaves) shared.push_back(link);
  }
  return shared;
}

// What faults change at a rank: its speed, and the bandwidths of its links.
uint64_t PlaceOf(const Topology& topology, int32_t rank, const std::vector<LinkId>& shared) {
  uint64_t hash = 0;
  const auto add = [&](double value) { hash = Mix(hash ^ Bits(value)); };
  add(topology.Slow(rank));
  const auto levels = static_cast<uint8_t>(std::min<size_t>(topology.cluster().levels.size(), 2));
  for (uint8_t level = 0; level < levels; ++level) {
    for (const LinkType type : {LinkType::kOut, LinkType::kIn}) add(topology.Capacity({type, level, rank}));
  }
  for (const LinkId& link : shared) add(topology.Capacity(link));
  return hash;
}

}  // namespace

uint64_t Fold::GroupColour(const LinkId& link) const { return group_colours_.at(KeyOf(link)); }

bool Fold::Refine(const Algorithm& algorithm, const Request& request) {
  const auto n = static_cast<size_t>(topology_->num_ranks());
  std::vector<Edge> edges;
  std::vector<size_t> first(n + 1, 0);
  std::vector<uint64_t> colour(n);
  for (size_t rank = 0; rank < n; ++rank) {
    const auto own = static_cast<int32_t>(rank);
    const Plan plan = BuildPlan(algorithm, request, own);
    uint64_t hash = Mix(plan.steps.size());
    const auto add = [&](size_t step, StepKind kind, int32_t peer) {
      const auto level = static_cast<uint64_t>(topology_->CommonLevel(own, peer));
      const auto latency = static_cast<uint64_t>(topology_->LatencyS(own, peer) * 1e12);
      edges.push_back(
          {peer, static_cast<int32_t>(step), Mix(Mix(step << 8 | level << 4 | static_cast<uint64_t>(kind)) ^ latency)});
    };
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      const Step& step = plan.steps[i];
      hash = Mix(hash ^ Mix(static_cast<uint64_t>(step.count) << 4 | static_cast<uint64_t>(step.kind)));
      if (step.peer >= 0 && step.peer != own) add(i, step.kind, step.peer);
      for (int32_t s = 0; s < step.num_sources; ++s) {
        const int32_t source = plan.sources[static_cast<size_t>(step.first_source + s)].rank;
        if (source != own) add(i, step.kind, source);
      }
      hash = Mix(hash + static_cast<uint64_t>(step.num_sources));
    }
    if (edges.size() > kMaxEdges) return false;
    colour[rank] = hash;
    first[rank + 1] = edges.size();
  }
  std::vector<std::vector<LinkId>> shared(n);
  for (size_t rank = 0; rank < n; ++rank) {
    const auto own = static_cast<int32_t>(rank);
    shared[rank] = SharedLinks(*topology_, own);
    if (topology_->HasFaults()) colour[rank] = Mix(colour[rank] ^ PlaceOf(*topology_, own, shared[rank]));
  }

  const auto colour_groups = [&] {
    group_colours_.clear();
    for (size_t rank = 0; rank < n; ++rank) {
      for (const LinkId& link : shared[rank]) group_colours_[KeyOf(link)] += Mix(colour[rank]);
    }
  };
  size_t classes = 0;
  for (int round = 0;; ++round) {
    const size_t now = std::unordered_set<uint64_t>(colour.begin(), colour.end()).size();
    if (now == classes) break;
    if (round == kMaxRounds || now > n / 2) return false;
    classes = now;
    colour_groups();
    std::vector<uint64_t> next(n);
    for (size_t rank = 0; rank < n; ++rank) next[rank] = Mix(colour[rank]);
    for (size_t rank = 0; rank < n; ++rank) {
      for (size_t i = first[rank]; i < first[rank + 1]; ++i) {
        const auto peer = static_cast<size_t>(edges[i].peer);
        next[rank] += Mix(Mix(colour[peer]) ^ edges[i].role);
        next[peer] += Mix(Mix(colour[rank] + 1) ^ edges[i].role);
      }
      for (const LinkId& link : shared[rank]) {
        next[rank] += Mix(group_colours_[KeyOf(link)] ^ static_cast<uint64_t>(link.type) << 8 ^ link.level);
      }
    }
    colour = std::move(next);
  }

  std::unordered_map<uint64_t, int32_t> first_of;
  representative_.resize(n);
  for (size_t rank = 0; rank < n; ++rank) {
    const int32_t representative = first_of.try_emplace(colour[rank], static_cast<int32_t>(rank)).first->second;
    representative_[rank] = representative;
    ++sizes_[representative];
  }
  colour_groups();
  for (auto& [key, sum] : group_colours_) sum = Mix(sum ^ Mix(key >> 32));
  for (size_t rank = 0; rank < n; ++rank) {
    for (const LinkId& link : shared[rank]) groups_.try_emplace(group_colours_[KeyOf(link)], link.owner, 0);
  }
  for (const auto& [key, sum] : group_colours_) ++groups_[sum].second;

  // The k-th wait of a rank on a peer ends with the k-th signal of the peer to it: a step of the peer's representative.
  for (size_t rank = 0; rank < n; ++rank) {
    const auto own = static_cast<int32_t>(rank);
    if (representative_[rank] != own) continue;
    std::unordered_set<int32_t> peers;
    for (size_t i = first[rank]; i < first[rank + 1]; ++i) peers.insert(edges[i].peer);
    for (int32_t peer : peers) {
      for (size_t i = first[static_cast<size_t>(peer)]; i < first[static_cast<size_t>(peer) + 1]; ++i) {
        if (edges[i].peer == own)
          targets_[StepKey(representative_[static_cast<size_t>(peer)], edges[i].step)].push_back({peer, own});
      }
    }
  }
  return true;
}

}  // namespace jaxcomm
