// Clusters as levels of links, and the routes between ranks.
//
// Rank numbers are mixed-radix numbers: a digit for each level, innermost first.
// docs/internals/simulate.md describes the kinds of levels.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/status.h"
#include "plan/cost.h"

namespace jaxcomm {

constexpr double kUnlimited = std::numeric_limits<double>::infinity();

enum class LevelKind : uint8_t {
  kSwitch,   // every rank or group has one link into a switch that never limits
  kRails,    // level 1: a switch for each local index
  kFatTree,  // groups of the level below share uplinks
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
};

// Links with less bandwidth. `index`: a rank on levels 0 and 1; above, a group of the level below (a switch of a rail,
// in the order of leaves). A capacity of 0 is a lost adapter, which exists on level 1 only: another rank of the domain
// relays its transfers. jaxcomm/simulate/cluster/groups.py checks faults.
struct LinkFault {
  int32_t level = 0;
  int64_t index = 0;
  bool out = true;  // the direction from the rank or group
  bool in = true;
  double capacity = 1;  // share that is left
  // Added to transfers over the adapter of a rank: the hop to a relay that is not among these ranks.
  double latency_s = 0;
};

// A rank whose own steps take `slow` times as long.
struct SlowRank {
  int32_t rank = 0;
  double slow = 1;
};

struct Cluster {
  std::vector<Level> levels;               // innermost first
  LinkModel self;                          // copies and local operands of one rank
  double memory_bytes_per_s = kUnlimited;  // a rank's memory: its own copies and transfers of peers
  double launch_s = 0;
  double sync_overhead_s = 0;
  // As Machine::concurrent_bytes, but counts the bytes of all channels.
  double concurrent_bytes = 0;
  bool arena = false;  // as Machine::arena
  std::vector<LinkFault> faults;
  std::vector<SlowRank> slow_ranks;
};

// The parameters of the cost model: figures of level 0 and of the highest level that `num_ranks` ranks use.
Machine MachineOf(const Cluster& cluster, int64_t num_ranks);

enum class LinkType : uint8_t { kMemory, kOut, kIn, kUp, kDown };

// One link. `owner`: its rank, or the first rank of its group.
struct LinkId {
  LinkType type = LinkType::kMemory;
  uint8_t level = 0;
  int32_t owner = 0;
};
inline uint64_t KeyOf(const LinkId& link) {
  return static_cast<uint64_t>(link.type) << 40 | static_cast<uint64_t>(link.level) << 32 |
         static_cast<uint32_t>(link.owner);
}

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
  void Route(int32_t src, int32_t dst, std::vector<LinkId>* links) const;
  double Capacity(const LinkId& link) const;
  // The digits of `owner` that distinguish links of this type and level, as a bit mask.
  uint32_t OwnerDigits(const LinkId& link) const;
  std::string Name(const LinkId& link) const;

  // Whether ranks of equal place differ: faults or slow ranks.
  bool HasFaults() const { return !shares_.empty() || !lost_.empty() || !slow_.empty(); }
  // Whether transfers pass links of ranks that are neither their source nor their destination because of a fault.
  bool HasRelays() const { return !lost_.empty(); }
  double Slow(int32_t rank) const;

 private:
  void AddFaults();
  double WholeCapacity(const LinkId& link) const;  // without faults
  bool Lost(int32_t rank) const { return lost_.count(rank) != 0; }
  // The ranks whose adapters carry a transfer between the domains of src and dst.
  std::pair<int32_t, int32_t> Relays(int32_t src, int32_t dst) const;
  // What faults add to the latency of transfers over the rank's adapter.
  double HopS(int32_t rank) const;
  void RouteBetween(int32_t src, int32_t dst, std::vector<LinkId>* links) const;
  int64_t Group(int32_t rank, int32_t level) const { return rank / cluster_.levels[static_cast<size_t>(level)].ranks; }
  bool Rails() const { return cluster_.levels.size() > 1 && cluster_.levels[1].kind == LevelKind::kRails; }
  // The group of level `level` - 1, or the rail's switch, whose uplinks lead to `level`.
  int32_t Below(int32_t rank, int32_t level) const;
  int64_t RanksBelow(int32_t level) const;
  bool Crosses(int32_t src, int32_t dst, int32_t level) const;

  Cluster cluster_;  // only the levels in use; the last one has num_ranks_ ranks
  int64_t num_ranks_ = 1;
  std::vector<int64_t> digits_;
  std::vector<int64_t> strides_;
  std::unordered_map<uint64_t, double> shares_;  // by KeyOf a link
  std::unordered_map<int32_t, double> slow_;
  std::unordered_map<int32_t, double> hops_;  // LinkFault::latency_s by rank
  std::unordered_set<int32_t> lost_;          // ranks
};

}  // namespace jaxcomm
