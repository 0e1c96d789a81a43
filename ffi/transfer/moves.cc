#include "transfer/moves.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace jaxcomm {
namespace {

// The box of a cell of `holder`. Its first and last elements have the smallest and the largest index of each dimension.
Box BoxOf(const Cell& cell, const Box& holder) {
  int64_t first = cell.memory, last = cell.memory + cell.run - 1;
  for (const Cell::Rows& rows : cell.rows) last += (rows.size - 1) * rows.stride;
  Box box = holder;
  for (size_t d = holder.begin.size(); d-- > 0;) {
    const int64_t size = holder.end[d] - holder.begin[d];
    box.begin[d] = holder.begin[d] + first % size;
    box.end[d] = holder.begin[d] + last % size + 1;
    first /= size;
    last /= size;
  }
  return box;
}

}  // namespace

StatusOr<std::vector<TransferMove>> TransferMoves(const std::vector<Box>& sources,
                                                  const std::vector<Box>& destinations) {
  if (destinations.empty()) return std::vector<TransferMove>();
  const auto num_sources = static_cast<int32_t>(sources.size());
  Geometry geometry;
  geometry.ranks_per_node = num_sources + static_cast<int32_t>(destinations.size());
  const size_t num_dimensions = destinations[0].begin.size();
  const Box empty = {std::vector<int64_t>(num_dimensions), std::vector<int64_t>(num_dimensions)};
  std::vector<Box> held = sources, wanted(sources.size(), empty);
  held.resize(static_cast<size_t>(geometry.num_ranks()), empty);
  wanted.insert(wanted.end(), destinations.begin(), destinations.end());
  StatusOr<std::shared_ptr<const Boxes>> boxes = MakeBoxes(held, wanted, geometry);
  JAXCOMM_RETURN_IF_ERROR(boxes.status());
  std::vector<TransferMove> moves;
  for (const BoxMove& move : (*boxes)->direct.moves) {
    const Cells& cells = (*boxes)->outputs[static_cast<size_t>(move.to)];
    const auto cell = std::lower_bound(cells.begin(), cells.end(), move.to_offset,
                                       [](const Cell& each, int64_t offset) { return each.offset < offset; });
    const int32_t to = move.to - num_sources;
    moves.push_back({move.from, to, BoxOf(*cell, destinations[static_cast<size_t>(to)])});
  }
  return moves;
}

}  // namespace jaxcomm
