// Plans of permute: rank r ends with the block of source_of[r], or zeros.
#include "plan/builder.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

// Direct: the receiver reads if the source is addressable; otherwise the source puts chunks. No waits. The chunks of a
// receiver have b elements together. Source: jax-ml/jax:jax/_src/lax/parallel.py (ppermute) for the semantics; it is
// the only algorithm.
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
    if (request.source_of[peer] != rank || CanRead(geometry, peer, rank)) continue;
    const int64_t chunks = NumChunks(b, request.chunk_count);
    for (int64_t i = 0; i < chunks; ++i) {
      const Range part = Subrange({0, b}, chunks, i);
      plan.Move(plan.Input(part.begin), Builder::At(peer, Space::kOutput, part.begin), part.count);
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
