// Plans of broadcast: every rank ends with the root's block.
#include "plan/builder.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

// Direct: the root puts its block to all ranks. The others do nothing, so it is the fastest if ranks share processors
// and blocks are small. (n - 1) * b sent by the root; chunk by chunk if the processor itself copies, as in all_gather.
// If direct plans pull, all ranks read from the root. Source: the flat tree of Thakur, Rabenseifner, Gropp, IJHPCA
// 19(1), 2005.
Plan DirectBroadcast(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  Builder plan(request, rank);
  if (Pulls(request.geometry, rank, request.root)) {
    plan.Move(Builder::At(request.root, Space::kInput, 0), plan.Output(0), request.block_count);
  }
  if (rank == request.root) {
    const Range block = {0, request.block_count};
    const int64_t chunks = NumChunks(block.count, request.geometry.all_addressable ? request.chunk_count : 0);
    for (int64_t c = 0; c < chunks; ++c) {
      const Range part = Subrange(block, chunks, c);
      for (int32_t s = 0; s < n; ++s) {
        const int32_t peer = (rank + s) % n;
        if (Pulls(request.geometry, peer, rank)) continue;
        plan.Move(plan.Input(part.begin), Builder::At(peer, Space::kOutput, part.begin), part.count);
      }
    }
  }
  return std::move(plan).Finish(0);
}

// Scatter and all-gather by reading: rank r reads piece r of the root's block chunk by chunk and puts each chunk to all
// ranks. So the root's block is read once in total, and every rank does the same work. No waits.
// b / n read from the root and (n - 1) * b / n put, per rank.
// Source: Chan, Heimlich, Purkayastha, van de Geijn, CCPE 19(13), 2007, doi 10.1002/cpe.1206.
Plan ScatterAllGatherBroadcast(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const Range block = {0, request.block_count};
  const Range piece = Subrange(block, n, rank);
  const int64_t chunks = NumChunks(piece.count, request.chunk_count);
  Builder plan(request, rank);
  for (int64_t c = 0; c < chunks; ++c) {
    const Range part = Subrange(piece, chunks, c);
    plan.Move(Builder::At(request.root, Space::kInput, part.begin), plan.Output(part.begin), part.count);
    for (int32_t s = 1; s < n; ++s) {
      plan.Move(plan.Output(part.begin), Builder::At((rank + s) % n, Space::kOutput, part.begin), part.count);
    }
  }
  return std::move(plan).Finish(0);
}

// Forwards the block from `parent` (-1: this rank's input) to `children`, chunk by chunk. Children that forward it too
// get signals. The others need none, because they read the data only after the end.
Plan Forward(const Request& request, int32_t rank, int32_t parent, const std::vector<int32_t>& children,
             const std::vector<bool>& child_forwards) {
  const Range block = {0, request.block_count};
  const int64_t chunks = NumChunks(block.count, request.chunk_count);
  Builder plan(request, rank);
  for (int64_t c = 0; c < chunks; ++c) {
    const Range part = Subrange(block, chunks, c);
    if (parent >= 0 && !children.empty()) plan.Wait(parent);
    const Place src = parent < 0 ? plan.Input(part.begin) : plan.Output(part.begin);
    for (size_t i = 0; i < children.size(); ++i) {
      plan.Move(src, Builder::At(children[i], Space::kOutput, part.begin), part.count);
      if (child_forwards[i]) plan.Signal(children[i]);
    }
  }
  if (parent < 0) plan.Move(plan.Input(0), plan.Output(0), block.count);
  return std::move(plan).Finish(0);
}

// Tree: binomial, largest subtree first. ceil(log2 n) rounds; a rank sends at most ceil(log2 n) * b.
// Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
Plan TreeBroadcast(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const int32_t v = (rank + n - request.root) % n;
  const auto real = [&](int32_t u) { return (u + request.root) % n; };
  const std::vector<int32_t> tree = TreeChildren(v, n);
  std::vector<int32_t> children;
  std::vector<bool> child_forwards;
  for (auto child = tree.rbegin(); child != tree.rend(); ++child) {
    children.push_back(real(*child));
    child_forwards.push_back(!TreeChildren(*child, n).empty());
  }
  return Forward(request, rank, v == 0 ? -1 : real(TreeParent(v)), children, child_forwards);
}

// Ring: a chain from the root through all ranks, pipelined by chunks, so every link is busy. b sent per rank.
// Source: Watts, van de Geijn, "A pipelined broadcast for multidimensional meshes", PPL 5(2), 1995.
Plan RingBroadcast(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const int32_t v = (rank + n - request.root) % n;
  std::vector<int32_t> children;
  if (v + 1 < n) children.push_back((rank + 1) % n);
  return Forward(request, rank, v == 0 ? -1 : (rank + n - 1) % n, children, {v + 2 < n});
}

// Hierarchical: the root scatters L pieces in its node. Piece l goes over rail l to all nodes by a binomial tree of
// nodes. A rank that gets a piece from another node, or from the root, puts it to its local peers. If ranks pull, they
// read instead: from the root if it is on their node, otherwise from the local peer that has signalled. Pipelined by
// chunks. Each rank of the root's node sends ceil(log2 G) * b / L between nodes. No scratch. Source: Traeff, Hunold,
// IEEE Cluster 2020, arXiv:1910.13373 (full-lane broadcast).
Plan HierarchicalBroadcast(const Request& request, int32_t rank) {
  const RailPosition at(request.geometry, rank);
  const int32_t v = at.NodeAt(-request.geometry.node(request.root));  // the number of this node in the tree
  const std::vector<int32_t> children = TreeChildren(v, at.nodes);
  const Range block = {0, request.block_count};
  const int64_t chunks = NumChunks(CeilDiv(block.count, at.locals), request.chunk_count);
  const bool is_root = rank == request.root;
  const bool pull = request.geometry.pull;
  Builder plan(request, rank);
  const auto part_of = [&](int32_t l, int64_t c) { return Subrange(Subrange(block, at.locals, l), chunks, c); };
  const auto read_root = [&](Range part) {
    plan.Move(Builder::At(request.root, Space::kInput, part.begin), plan.Output(part.begin), part.count);
  };
  const auto collect = [&](int64_t c) {
    if (!pull || is_root) return;
    for (int32_t i = 1; i < at.locals; ++i) {
      const int32_t peer = at.NodePeer(-i);
      const Range part = part_of(request.geometry.local(peer), c);
      if (v == 0) {
        read_root(part);
        continue;
      }
      plan.Wait(peer);
      plan.Move(Builder::At(peer, Space::kOutput, part.begin), plan.Output(part.begin), part.count);
    }
  };
  const auto forward = [&](int64_t c) {
    if (v == 0 && pull) {
      if (!is_root) read_root(part_of(at.local, c));
    } else if (is_root) {
      for (int32_t i = 1; i < at.locals; ++i) {
        const int32_t peer = at.NodePeer(i);
        const Range part = part_of(request.geometry.local(peer), c);
        plan.Move(plan.Input(part.begin), Builder::At(peer, Space::kOutput, part.begin), part.count);
        plan.Signal(peer);
      }
    } else {
      plan.Wait(v == 0 ? request.root : at.RailPeer(TreeParent(v) - v));
    }
    const Range part = part_of(at.local, c);
    const Place src = is_root ? plan.Input(part.begin) : plan.Output(part.begin);
    for (auto child = children.rbegin(); child != children.rend(); ++child) {
      const int32_t peer = at.RailPeer(*child - v);
      plan.Move(src, Builder::At(peer, Space::kOutput, part.begin), part.count);
      plan.Signal(peer);
    }
    for (int32_t i = 1; i < at.locals; ++i) {
      const int32_t peer = at.NodePeer(i);
      if (pull) {
        if (v > 0) plan.Signal(peer);
      } else if (peer != request.root) {  // the root has the whole block
        plan.Move(src, Builder::At(peer, Space::kOutput, part.begin), part.count);
      }
    }
  };
  RunPipeline(chunks, {{0, forward}, {1, collect}});
  if (is_root) plan.Move(plan.Input(0), plan.Output(0), block.count);
  return std::move(plan).Finish(0);
}

}  // namespace

template <>
const std::vector<Algorithm>& Table<Collective::kBroadcast>() {
  static const std::vector<Algorithm> table = {
      {"direct", kThakur, kAnyGeometry, DirectBroadcast},
      {"scatter_all_gather", "Chan, Heimlich, Purkayastha, van de Geijn, CCPE 19(13), 2007, doi 10.1002/cpe.1206",
       kOneAddressSpace, ScatterAllGatherBroadcast},
      {"tree", kThakur, kAnyGeometry, TreeBroadcast},
      {"ring", "Watts, van de Geijn, Parallel Processing Letters 5(2), 1995", kAnyGeometry, RingBroadcast},
      {"hierarchical", kTraeff, kSeveralNodes, HierarchicalBroadcast},
  };
  return table;
}

}  // namespace jaxcomm
