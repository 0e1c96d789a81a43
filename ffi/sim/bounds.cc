// Lower bounds in closed form, which hold for every algorithm without reductions by switches.
#include <algorithm>

#include "sim/simulate.h"

namespace jaxcomm {
namespace {

// The most blocks that any of the consecutive groups of g ranks receives from outside by a permutation.
int64_t MostPermutedInto(const std::vector<int32_t>& source_of, int64_t g) {
  int64_t most = 0, into = 0;
  for (size_t r = 0; r < source_of.size(); ++r) {
    const auto rank = static_cast<int64_t>(r);
    if (rank % g == 0) into = 0;
    into += source_of[r] >= 0 && source_of[r] / g != rank / g;
    most = std::max(most, into);
  }
  return most;
}

// Bytes that a group of g of n ranks must at least receive from outside; 0 if the request does not say.
double BytesInto(const Request& request, double item_bytes, int64_t n, int64_t g) {
  const CollectiveTraits& traits = TraitsOf(request.collective);
  double blocks = 0;
  if (traits.TakesPermutation()) {
    blocks = static_cast<double>(MostPermutedInto(request.source_of, g));
  } else if (traits.blocks_into != nullptr && n != g) {
    blocks = traits.blocks_into(static_cast<double>(n), static_cast<double>(g));
  }
  return blocks * static_cast<double>(request.block_count) * item_bytes;
}

}  // namespace

StatusOr<Bounds> BoundsOf(const Request& request, double item_bytes, const Cluster& cluster) {
  const int64_t n = request.geometry.num_ranks();
  auto made = Topology::Make(cluster, n);
  if (!made.ok()) return made.status();
  const Topology& topology = *made;
  const std::vector<Level>& levels = topology.cluster().levels;
  Bounds bounds;
  if (n == 1) return bounds;
  const auto limit = [&](int64_t group, double bytes_per_s, const std::string& name) {
    const double time_s = BytesInto(request, item_bytes, n, group) / bytes_per_s;
    if (time_s <= bounds.beta_s) return;
    bounds.beta_s = time_s;
    bounds.bottleneck = name;
  };
  // A single rank may receive over all its links at once.
  double rank_bytes_per_s = levels[0].ranks > 1 ? levels[0].bytes_per_s : 0;
  if (levels.size() > 1) rank_bytes_per_s += levels[1].bytes_per_s;
  limit(1, rank_bytes_per_s, levels[0].ranks > 1 ? levels[0].name + " in" : levels[1].name + " in");
  for (size_t i = 1; i < levels.size(); ++i) {
    const int64_t group = levels[i - 1].ranks;
    limit(group, static_cast<double>(group) * levels[1].bytes_per_s / levels[i].taper,
          levels[i].name + (i > 1 ? " down" : " in"));
  }
  // Data of the farthest rank must arrive, or a signal, at least once.
  const CollectiveTraits& traits = TraitsOf(request.collective);
  if (!traits.TakesPermutation()) {
    for (const Level& level : levels) {
      if (&level == &levels[0] && levels.size() > 1) continue;
      bounds.alpha_s += level.latency_s;
    }
    // A plan without signals inside a domain has no latency in this model.
    if (levels.size() == 1 && traits.output != BufferBlocks::kNone) bounds.alpha_s = 0;
  }
  return bounds;
}

}  // namespace jaxcomm
