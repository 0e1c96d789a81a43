// Ranks of equal role, of which one is simulated.
//
// A fold is a group of permutations of ranks that change some digits of all rank numbers by the same amount (a cyclic
// shift or an exclusive or), and under which topology and plans stay the same. Max-min fair rates are unique, so ranks
// that the group maps to each other have equal times.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/algorithms.h"
#include "topology.h"

namespace jaxcomm {

enum class Symmetry : uint8_t { kNone, kShift, kXor };

class Fold {
 public:
  // No symmetry: every rank represents itself.
  explicit Fold(const Topology& topology);
  // The symmetries of the plans of `request`. Small groups are checked completely, others by sampled ranks.
  static Fold Find(const Topology& topology, const Algorithm& algorithm, const Request& request);

  const std::vector<Symmetry>& symmetries() const { return symmetries_; }  // by digit
  int64_t multiplicity() const { return multiplicity_; }                   // ranks of equal role
  std::vector<int32_t> Representatives() const;
  int32_t RepresentativeOf(int32_t rank) const;
  // The image of `other` under the permutation that maps `rank` to its representative.
  int32_t Image(int32_t rank, int32_t other) const;
  // A link of the same class, equal for all links of the class; and their number.
  LinkId RepresentativeOf(const LinkId& link, int64_t* count) const;

 private:
  // Equal for plans of ranks of equal role under the symmetries of this fold.
  uint64_t HashOf(const Plan& plan) const;
  void Set(size_t digit, Symmetry symmetry);

  const Topology* topology_;
  std::vector<Symmetry> symmetries_;
  int64_t multiplicity_ = 1;
};

}  // namespace jaxcomm
