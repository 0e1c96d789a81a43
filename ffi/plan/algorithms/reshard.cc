// Plans of reshard: each cell of each destination comes from the owner that MakeBoxes has chosen.
#include <algorithm>
#include <vector>

#include "plan/boxes.h"
#include "plan/builder.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

// Direct: the receiver reads if the source is addressable; otherwise the source puts. No waits. Each element that a
// rank lacks travels once. Rank r begins with rank r + 1, so that no rank receives from all others at first. Puts are
// cut into chunks and alternate between the receivers. Thakur, Choudhary, Ramanujam, IEEE TPDS 7(6), 1996, redistribute
// cyclic arrays.
Plan DirectReshard(const Request& request, int32_t rank) {
  const Geometry& geometry = request.geometry;
  const int32_t n = geometry.num_ranks();
  std::vector<BoxMove> puts, reads;
  for (const BoxMove& move : request.boxes->moves) {
    if (move.to == rank && CanRead(geometry, rank, move.from)) reads.push_back(move);
    if (move.from == rank && !CanRead(geometry, move.to, rank)) puts.push_back(move);
  }
  const auto rotate = [&](std::vector<BoxMove>& moves, int32_t BoxMove::* peer) {
    std::stable_sort(moves.begin(), moves.end(), [&](const BoxMove& a, const BoxMove& b) {
      return (a.*peer - rank - 1 + n) % n < (b.*peer - rank - 1 + n) % n;
    });
  };
  rotate(puts, &BoxMove::to);
  rotate(reads, &BoxMove::from);
  Builder plan(request, rank);
  const int64_t chunk = request.chunk_count;
  bool more = true;
  for (int64_t begin = 0; more; begin += chunk) {
    more = false;
    for (const BoxMove& move : puts) {
      const int64_t left = move.count - begin;
      const int64_t count = chunk > 0 ? std::min(chunk, left) : left;
      plan.Move(plan.Input(move.from_offset + begin), Builder::At(move.to, Space::kOutput, move.to_offset + begin),
                count);
      more = more || left > count;
    }
    if (chunk == 0) break;
  }
  for (const BoxMove& move : reads) {
    plan.Move(Builder::At(move.from, Space::kInput, move.from_offset), plan.Output(move.to_offset), move.count);
  }
  return std::move(plan).Finish(0);
}

}  // namespace

template <>
const std::vector<Algorithm>& Table<Collective::kReshard>() {
  static const std::vector<Algorithm> table = {
      {"direct", "Thakur, Choudhary, Ramanujam, IEEE TPDS 7(6), 1996", kAnyGeometry, DirectReshard},
  };
  return table;
}

}  // namespace jaxcomm
