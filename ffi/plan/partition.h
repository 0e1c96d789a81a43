// Shared by the plans of all collectives: partitions of elements, addressability, trees and powers of two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/algorithms.h"

namespace jaxcomm {

// The rows of one collective. Each collective's file defines its own, so a missing one fails to link.
template <Collective collective>
const std::vector<Algorithm>& Table();
#define JAXCOMM_COLLECTIVE(enumerator, name, ...) \
  template <>                                     \
  const std::vector<Algorithm>& Table<Collective::enumerator>();
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE

struct Range {
  int64_t begin = 0;
  int64_t count = 0;
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Subrange i of n: sizes differ by at most one element, so any count works for any n. The largest has CeilDiv(count,
// n).
inline Range Subrange(Range whole, int64_t n, int64_t i) {
  const int64_t begin = whole.count * i / n;
  return {whole.begin + begin, whole.count * (i + 1) / n - begin};
}

// The number of chunks of a range of `count` elements; 0 for an empty range. Chunk c is Subrange(range, num_chunks, c).
inline int64_t NumChunks(int64_t count, int64_t chunk_count) {
  if (count <= 0) return 0;
  return chunk_count > 0 ? CeilDiv(count, chunk_count) : 1;
}

// Elements of the largest chunk.
inline int64_t MaxChunk(int64_t count, int64_t num_chunks) { return num_chunks > 0 ? CeilDiv(count, num_chunks) : 0; }

inline bool IsPowerOfTwo(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

// Smallest k with 2^k >= n.
inline int32_t CeilLog2(int64_t n) {
  int32_t k = 0;
  while ((int64_t{1} << k) < n) ++k;
  return k;
}

inline bool CanRead(const Geometry& geometry, int32_t reader, int32_t owner) {
  return geometry.all_addressable || geometry.node(reader) == geometry.node(owner);
}

// Whether a direct plan has `reader` read the data of `owner`. Otherwise `owner` puts it. Both ranks agree.
inline bool Pulls(const Geometry& geometry, int32_t reader, int32_t owner) {
  return geometry.pull && CanRead(geometry, reader, owner);
}

// Where a rank is in its node and on its rail, for hierarchical plans.
struct RailPosition {
  RailPosition(const Geometry& geometry, int32_t rank)
      : nodes(geometry.num_nodes),
        locals(geometry.ranks_per_node),
        node(geometry.node(rank)),
        local(geometry.local(rank)) {}

  // The rank on the rail that is `distance` nodes away, and the rank of the node that is `distance` ranks away; modulo
  // their numbers, which a negative distance must not exceed.
  int32_t RailPeer(int64_t distance) const { return NodeAt(distance) * locals + local; }
  int32_t NodePeer(int64_t distance) const {
    return node * locals + static_cast<int32_t>((local + locals + distance) % locals);
  }
  int32_t NodeAt(int64_t distance) const { return static_cast<int32_t>((node + nodes + distance) % nodes); }

  const int32_t nodes, locals, node, local;
};

// Binomial tree over 0 .. n-1 with root 0. The subtree of v is v .. v + lowbit(v) - 1, so sums up the tree are in rank
// order. Children are in ascending order, which is also the order of the sizes of their subtrees.
inline std::vector<int32_t> TreeChildren(int32_t v, int32_t n) {
  std::vector<int32_t> children;
  for (int64_t bit = 1; (v & bit) == 0 && v + bit < n; bit <<= 1) children.push_back(static_cast<int32_t>(v + bit));
  return children;
}
inline int32_t TreeParent(int32_t v) { return v & (v - 1); }

// Whether sizes, root and permutation are valid for the geometry. No algorithm supports an ill-formed request.
bool WellFormed(const Request& request);

// Values of Algorithm::source for several rows.
inline constexpr char kThakur[] = "Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005, doi 10.1177/1094342005051521";
inline constexpr char kTraeff[] = "Traeff, Hunold, IEEE Cluster 2020, arXiv:1910.13373";
inline constexpr char kNcclLl[] = "NVIDIA/nccl:src/device/prims_ll.h (flags in the data)";

// Values of Algorithm::supports.
extern const Support kAnyGeometry;
extern const Support kOneAddressSpace;
extern const Support kOneNodeWithMultimem;
extern const Support kPowerOfTwoRanks;
extern const Support kSeveralNodes;
extern const Support kNetworkOfNodes;

}  // namespace jaxcomm
