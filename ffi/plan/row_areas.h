// Where hierarchical plans of dispatch and combine keep what nodes exchange. The executor finds the same places again.
//
// A rank has a place for each other node. A place is counted in lists, or in messages to a node.
#pragma once

#include <cstdint>

namespace jaxcomm {

struct RowAreas {
  int32_t num_nodes = 1;

  // A combine has these areas: lists that have arrived, lists that are read, sums of this node, sums of other nodes.
  enum Area { kReceivedLists, kLists, kSums, kReceivedSums, kNumAreas };

  // At a rank of node `at`: the place for what node `other` sends or gets.
  int64_t PlaceOf(int32_t at, int32_t other) const { return (at + num_nodes - other) % num_nodes - 1; }
  int64_t PlaceOf(Area area, int32_t at, int32_t other) const { return Begin(area) + PlaceOf(at, other); }
  // The inverse.
  Area AreaOf(int64_t place) const { return static_cast<Area>(place / (num_nodes - 1)); }
  int32_t NodeOf(int64_t place, int32_t at) const {
    return static_cast<int32_t>((at + num_nodes - 1 - place % (num_nodes - 1)) % num_nodes);
  }

  // The first place of an area; of kNumAreas: the number of places.
  int64_t Begin(Area area) const { return int64_t{area} * (num_nodes - 1); }
};

}  // namespace jaxcomm
