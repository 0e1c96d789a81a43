// Clusters as levels of links, and the routes between ranks.
//
// Rank numbers are mixed-radix numbers: a digit for each level (for each dimension of a torus), innermost first.
// docs/internals/simulate.md describes the kinds of levels.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "common/status.h"
#include "plan/cost.h"

namespace jaxcomm {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

enum class LevelKind : uint8_t {
  kSwitch,     // every rank or group has one link into a switch that never limits
  kMesh,       // level 0: a link for each pair of ranks; bytes_per_s is shared by the links of a rank
  kTorus,      // level 0: bytes_per_s for each neighbour
  kRails,      // level 1: a switch for each local index
  kFatTree,    // groups of the level below share uplinks
  kDragonfly,  // above level 1: as a fat tree, and a link for each pair of groups
};

struct Level {
  std::string name;
  LevelKind kind = LevelKind::kSwitch;
  int64_t ranks = 1;       // of one group of this level
  double bytes_per_s = 1;  // of one rank and direction. Level 0: into the domain. Level 1: its adapters. Above: unused
  double flow_bytes_per_s = kUnlimited;  // limit of one transfer whose highest level is this one
  double overhead_s = 0;                 // as LinkModel::overhead_s
  double latency_s = 0;                  // added by this level
  double taper = 1;                      // bytes_per_s of all adapters below a group, divided by those of its uplinks
  bool shared = false;                   // level 1: bytes_per_s belongs to a group of level 0
  bool valiant = false;                  // dragonfly: each transfer goes through a random third group
  std::vector<int32_t> dims;             // torus
};

struct Cluster {
  std::vector<Level> levels;               // innermost first
  LinkModel self;                          // copies and local operands of one rank
  double memory_bytes_per_s = kUnlimited;  // a rank's memory: its own copies and transfers of peers
  double launch_s = 0;
  double sync_overhead_s = 0;
  double ranks_per_processor = 1;
  // As Machine::together_bytes, but counts the bytes of all channels.
  double together_bytes = 0;
};

// The levels that the cost model sees: a domain without contention and a network.
Cluster ClusterOf(const Machine& machine, const Geometry& geometry);
// The parameters of the cost model: figures of level 0 and of the highest level that `num_ranks` ranks use.
Machine MachineOf(const Cluster& cluster, int64_t num_ranks);

enum class LinkType : uint8_t { kMemory, kOut, kIn, kPair, kTorus, kUp, kDown, kGroups, kFabric };

// One link. `owner`: its rank, or the first rank of its group.
struct LinkId {
  LinkType type = LinkType::kMemory;
  uint8_t level = 0;
  uint8_t direction = 0;  // torus: 2 * dimension, + 1 for the negative direction
  int32_t owner = 0;
  int32_t other = 0;  // kPair, kGroups: the other end
};

struct LinkUse {
  LinkId link;
  double weight = 1;  // bytes on the link for each byte of the transfer
};

class Topology {
 public:
  // The first `num_ranks` ranks of `cluster`. Fails if levels do not divide.
  static StatusOr<Topology> Make(const Cluster& cluster, int64_t num_ranks);

  const Cluster& cluster() const { return cluster_; }
  int64_t num_ranks() const { return num_ranks_; }
  const std::vector<int64_t>& digits() const { return digits_; }    // sizes
  const std::vector<int64_t>& strides() const { return strides_; }  // rank = sum of digit * stride

  // The innermost level that both ranks share.
  int32_t CommonLevel(int32_t a, int32_t b) const;
  double LatencyS(int32_t src, int32_t dst) const;
  // Appends the links from src to dst, without the memories.
  void Route(int32_t src, int32_t dst, std::vector<LinkUse>* uses) const;
  double Capacity(const LinkId& link) const;
  // The digits of `owner` that distinguish links of this type and level, as a bit mask.
  uint32_t OwnerDigits(const LinkId& link) const;
  std::string Name(const LinkId& link) const;

 private:
  int64_t Group(int32_t rank, int32_t level) const { return rank / cluster_.levels[static_cast<size_t>(level)].ranks; }
  bool Rails() const { return cluster_.levels.size() > 1 && cluster_.levels[1].kind == LevelKind::kRails; }
  // The group of level `level` - 1, or the rail's switch, whose uplinks lead to `level`.
  int32_t Below(int32_t rank, int32_t level) const;
  int64_t RanksBelow(int32_t level) const;
  bool Crosses(int32_t src, int32_t dst, int32_t level) const;
  void RouteInTorus(int32_t src, int32_t dst, std::vector<LinkUse>* uses) const;

  Cluster cluster_;  // only the levels in use; the last one has num_ranks_ ranks
  int64_t num_ranks_ = 1;
  std::vector<int64_t> digits_;
  std::vector<int64_t> strides_;
};

}  // namespace jaxcomm
