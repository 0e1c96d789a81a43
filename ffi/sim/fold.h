// Ranks of equal role, of which one is simulated.
//
// Ranks are divided such that every link of a class is crossed by the same number of transfers of each class (an
// equitable partition). Max-min fair rates are unique, so ranks of a class have equal times. There are two ways to find
// such classes:
// - Symmetries: permutations that change some digits of all rank numbers by the same amount (a cyclic shift or an
//   exclusive or), under which topology and plans stay the same. They need only the plans of a few ranks.
// - Colour refinement of the plans of all ranks, for trees, roots, and numbers of ranks that are no powers of two.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/algorithms.h"
#include "sim/topology.h"

namespace jaxcomm {

enum class Symmetry : uint8_t { kNone, kShift, kXor };

class Fold {
 public:
  // No symmetry: every rank represents itself.
  explicit Fold(const Topology& topology);
  // Looks for symmetries; if there are none and the plans are short, refines colours.
  static Fold Find(const Topology& topology, const Algorithm& algorithm, const Request& request);

  bool HasColours() const { return !representative_.empty(); }
  std::vector<int32_t> Representatives() const;
  int32_t RepresentativeOf(int32_t rank) const;
  // Ranks with the role of this one.
  int64_t Multiplicity(int32_t rank) const;
  // A link of the same class, equal for all links of the class; and their number.
  LinkId RepresentativeOf(const LinkId& link, int64_t* count) const;

  // A counter of signals from src to dst, as the pair of a sender and a receiver that is a representative.
  using Counter = std::pair<int32_t, int32_t>;
  Counter CounterOf(int32_t src, int32_t dst) const;
  // The counters that the signal to `peer` in step `step` of representative `rank` adds to.
  std::vector<Counter> Targets(int32_t rank, int64_t step, int32_t peer) const;

 private:
  // Equal for plans of ranks of equal role under the symmetries of this fold.
  uint64_t HashOf(const Plan& plan) const;
  void Set(size_t digit, Symmetry symmetry);
  // The image of `other` under the permutation that maps `rank` to its representative.
  int32_t Image(int32_t rank, int32_t other) const;
  // Sets colour_ and what follows from it. False if there are too many steps or classes.
  bool Refine(const Algorithm& algorithm, const Request& request);
  static uint64_t StepKey(int32_t rank, int64_t step) {
    return static_cast<uint64_t>(rank) << 32 | static_cast<uint32_t>(step);
  }
  bool OfOneRank(const LinkId& link) const {
    return topology_->OwnerDigits(link) == (1U << topology_->digits().size()) - 1;
  }
  // The colour of the group of ranks that shares the link.
  uint64_t GroupColour(const LinkId& link) const;

  const Topology* topology_;
  std::vector<Symmetry> symmetries_;  // by digit
  int64_t multiplicity_ = 1;          // of symmetries
  // Of colour refinement, else empty: by rank.
  std::vector<int32_t> representative_;
  std::unordered_map<int32_t, int64_t> sizes_;                        // by representative
  std::unordered_map<uint64_t, std::pair<int32_t, int64_t>> groups_;  // first owner and number, by type, level, colour
  std::unordered_map<uint64_t, uint64_t> group_colours_;              // by KeyOf a link
  std::unordered_map<uint64_t, std::vector<Counter>> targets_;        // by representative and step
};

}  // namespace jaxcomm
