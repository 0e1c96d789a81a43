// Plans of permute: rank r ends with the block of source_of[r], or zeros.
#include "plan/builder.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

// Direct: the receiver reads if the source is addressable; otherwise the source puts. No waits. At most one message of
// b per receiver. Source: jax-ml/jax:jax/_src/lax/parallel.py (ppermute) for the semantics; it is the only algorithm.
Plan DirectPermute(const Request& request, int32_t rank) {
  const Geometry& geometry = request.geometry;
  const int64_t b = request.block_count;
  const int32_t source = request.source_of[rank];
  Builder plan(request, rank);
  if (source < 0) {
    plan.Zero(plan.Output(0), b);
  } else if (CanRead(geometry, rank, source)) {
    plan.Move(Builder::At(source, Space::kInput, 0), plan.Output(0), b);
  }
  for (int32_t peer = 0; peer < geometry.num_ranks(); ++peer) {
    if (request.source_of[peer] == rank && !CanRead(geometry, peer, rank)) {
      plan.Move(plan.Input(0), Builder::At(peer, Space::kOutput, 0), b);
    }
  }
  return std::move(plan).Finish(0);
}

}  // namespace

template <>
const std::vector<Algorithm>& Table<Collective::kPermute>() {
  static const std::vector<Algorithm> table = {
      {"direct", "jax-ml/jax:jax/_src/lax/parallel.py (ppermute)", kAnyGeometry, DirectPermute},
  };
  return table;
}

}  // namespace jaxcomm
