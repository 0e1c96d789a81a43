#include "sim/fold.h"

#include <algorithm>
#include <tuple>

#include "plan/partition.h"
#include "sim/hash.h"

namespace jaxcomm {
namespace {

// Groups up to this size are checked completely.
constexpr int64_t kMaxChecked = 64;
// Plans with more steps are sampled at fewer ranks.
constexpr size_t kManySteps = 20000;

int64_t Moved(int64_t digit, int64_t by, int64_t size, Symmetry symmetry) {
  return symmetry == Symmetry::kXor ? digit ^ by : (digit + by) % size;
}

// Ranks whose neighbours show an asymmetry if there is one: ends of chains, roots, and some in between.
std::vector<int32_t> Samples(const Request& request, bool many_steps) {
  const int32_t n = request.geometry.num_ranks();
  std::vector<int32_t> samples;
  if (n <= kMaxChecked) {
    for (int32_t rank = 0; rank < n; ++rank) samples.push_back(rank);
    return samples;
  }
  samples = {request.root, n - 1};
  if (!many_steps) {
    for (int32_t rank : {request.root + 1, n / 2, n / 3, n / 7 * 5 + 1}) samples.push_back(rank % n);
  }
  return samples;
}

}  // namespace

Fold::Fold(const Topology& topology) : topology_(&topology), symmetries_(topology.digits().size(), Symmetry::kNone) {}

void Fold::Set(size_t digit, Symmetry symmetry) {
  if (symmetries_[digit] == Symmetry::kNone && symmetry != Symmetry::kNone) multiplicity_ *= topology_->digits()[digit];
  if (symmetries_[digit] != Symmetry::kNone && symmetry == Symmetry::kNone) multiplicity_ /= topology_->digits()[digit];
  symmetries_[digit] = symmetry;
}

int32_t Fold::Image(int32_t rank, int32_t other) const {
  int64_t image = other;
  for (size_t i = 0; i < symmetries_.size(); ++i) {
    if (symmetries_[i] == Symmetry::kNone) continue;
    const int64_t size = topology_->digits()[i], stride = topology_->strides()[i];
    const int64_t from = rank / stride % size, to = other / stride % size;
    const int64_t digit = symmetries_[i] == Symmetry::kXor ? from ^ to : to - from + (to < from ? size : 0);
    image += (digit - to) * stride;
  }
  return static_cast<int32_t>(image);
}

int32_t Fold::RepresentativeOf(int32_t rank) const {
  return representative_.empty() ? Image(rank, rank) : representative_[static_cast<size_t>(rank)];
}

int64_t Fold::Multiplicity(int32_t rank) const {
  return representative_.empty() ? multiplicity_ : sizes_.at(RepresentativeOf(rank));
}

Fold::Counter Fold::CounterOf(int32_t src, int32_t dst) const {
  if (!representative_.empty()) return {src, dst};
  return {Image(src, src), Image(src, dst)};
}

std::vector<Fold::Counter> Fold::Targets(int32_t rank, int64_t step, int32_t peer) const {
  if (representative_.empty()) return {CounterOf(rank, peer)};
  const auto found = targets_.find(StepKey(rank, step));
  return found == targets_.end() ? std::vector<Counter>{} : found->second;
}

std::vector<int32_t> Fold::Representatives() const {
  std::vector<int32_t> ranks;
  for (int32_t rank = 0; rank < topology_->num_ranks(); ++rank) {
    if (RepresentativeOf(rank) == rank) ranks.push_back(rank);
  }
  return ranks;
}

LinkId Fold::RepresentativeOf(const LinkId& link, int64_t* count) const {
  if (!representative_.empty()) {
    LinkId image = link;
    if (OfOneRank(link)) {
      image.owner = RepresentativeOf(link.owner);
      *count = sizes_.at(image.owner);
    } else {
      std::tie(image.owner, *count) = groups_.at(GroupColour(link));
    }
    return image;
  }
  const uint32_t digits = topology_->OwnerDigits(link);
  *count = 1;
  for (size_t i = 0; i < symmetries_.size(); ++i) {
    if (symmetries_[i] != Symmetry::kNone && (digits >> i & 1)) *count *= topology_->digits()[i];
  }
  LinkId image = link;
  image.owner = RepresentativeOf(link.owner);
  return image;
}

uint64_t Fold::HashOf(const Plan& plan) const {
  uint64_t hash = Mix(plan.steps.size());
  const auto role = [&](int32_t peer) {
    return Mix(static_cast<uint64_t>(peer < 0 || peer == plan.rank ? -1 : Image(plan.rank, peer)));
  };
  for (const Step& step : plan.steps) {
    uint64_t peers = role(step.peer);
    for (int32_t i = 0; i < step.num_sources; ++i) {  // their order does not matter
      peers += role(plan.sources[static_cast<size_t>(step.first_source + i)].rank);
    }
    hash = Mix(hash ^ Mix(peers + static_cast<uint64_t>(step.kind))) + static_cast<uint64_t>(step.count);
  }
  return hash;
}

Fold Fold::Find(const Topology& topology, const Algorithm& algorithm, const Request& request) {
  Fold fold(topology);
  if (topology.HasFaults()) {
    // No symmetry keeps a fault. Where a third rank relays transfers, equal plans do not make equal roles.
    const std::vector<Level>& levels = topology.cluster().levels;
    const bool over_domain = levels.size() == 2 && levels[1].kind == LevelKind::kRails;
    Fold refined(topology);
    const bool folds = !topology.HasRelays() && !over_domain && topology.num_ranks() > 1;
    return folds && refined.Refine(algorithm, request) ? refined : fold;
  }
  // A staged plan repeats the same transfers for each chunk, so it has the symmetries of the plan without the ring.
  const auto plan_of = [&](int64_t rank) { return algorithm.build(request, static_cast<int32_t>(rank)); };
  std::vector<int32_t> samples = Samples(request, false);
  std::vector<Plan> plans;
  for (int32_t rank : samples) {
    plans.push_back(plan_of(rank));
    if (topology.num_ranks() > kMaxChecked && plans.back().steps.size() > kManySteps && plans.size() > 1) break;
  }
  for (size_t i = 0; i < topology.digits().size(); ++i) {
    const int64_t size = topology.digits()[i], stride = topology.strides()[i];
    if (size == 1) continue;
    const auto holds = [&](Symmetry symmetry) {
      Fold alone(topology);
      alone.Set(i, symmetry);
      std::vector<int64_t> amounts = {1};
      if (symmetry == Symmetry::kXor) {
        for (int64_t bit = 2; bit < size; bit *= 2) amounts.push_back(bit);
      }
      for (size_t s = 0; s < plans.size(); ++s) {
        const int64_t digit = samples[s] / stride % size;
        const uint64_t hash = alone.HashOf(plans[s]);
        for (int64_t by : amounts) {
          const int64_t moved = samples[s] + (Moved(digit, by, size, symmetry) - digit) * stride;
          if (alone.HashOf(plan_of(moved)) != hash) return false;
        }
      }
      if (!TraitsOf(request.collective).TakesPermutation()) return true;
      for (size_t r = 0; r < request.source_of.size(); ++r) {
        const auto rank = static_cast<int64_t>(r);
        const int64_t moved = rank + (Moved(rank / stride % size, 1, size, symmetry) - rank / stride % size) * stride;
        const int32_t source = request.source_of[r], theirs = request.source_of[static_cast<size_t>(moved)];
        if ((source < 0) != (theirs < 0)) return false;
        if (source >= 0 &&
            alone.Image(static_cast<int32_t>(rank), source) != alone.Image(static_cast<int32_t>(moved), theirs)) {
          return false;
        }
      }
      return true;
    };
    if (holds(Symmetry::kShift)) {
      fold.Set(i, Symmetry::kShift);
    } else if (IsPowerOfTwo(size) && holds(Symmetry::kXor)) {
      fold.Set(i, Symmetry::kXor);
    }
  }
  if (fold.multiplicity_ == 1 && topology.num_ranks() > 1) {
    Fold refined(topology);
    if (refined.Refine(algorithm, request)) return refined;
  }
  return fold;
}

}  // namespace jaxcomm
