// Plans of all_to_all: block j of rank r goes to block r of rank j.
#include "plan/builder.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

// Moves one block between this rank and `peer`: puts its own block, or reads the peer's if direct plans pull.
void Exchange(Builder& plan, const Request& request, int32_t rank, int32_t peer) {
  const int64_t b = request.block_count;
  if (Pulls(request.geometry, rank, peer)) {
    plan.Move(Builder::At(peer, Space::kInput, rank * b), plan.Output(peer * b), b);
  } else {
    plan.Move(plan.Input(peer * b), Builder::At(peer, Space::kOutput, rank * b), b);
  }
}

// Direct: each rank puts every block directly to its destination, or reads every block from its source. Each rank
// starts with itself, so that no rank is the first target of all others. No waits. n - 1 messages of b. Source: Thakur,
// Rabenseifner, Gropp, IJHPCA 19(1), 2005.
Plan DirectAllToAll(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  Builder plan(request, rank);
  for (int32_t s = 0; s < n; ++s) {
    Exchange(plan, request, rank, (rank + s) % n);
  }
  return std::move(plan).Finish(0);
}

// Pairwise: in round s, rank r puts to r + s and then waits for r - s, so that each rank sends one block and receives
// one block at a time. The signals only limit the pace. n - 1 messages of b. Source: as direct.
Plan PairwiseAllToAll(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const int64_t b = request.block_count;
  Builder plan(request, rank);
  plan.Move(plan.Input(rank * b), plan.Output(rank * b), b);
  for (int32_t s = 1; s < n; ++s) {
    const int32_t to = (rank + s) % n;
    plan.Move(plan.Input(to * b), Builder::At(to, Space::kOutput, rank * b), b);
    if (s + 1 == n) break;  // no later round to delay
    plan.Signal(to);
    plan.Wait((rank + n - s) % n);
  }
  return std::move(plan).Finish(0);
}

// Bruck: blocks are numbered by distance (block i of rank r goes to r + i). In round k, all blocks whose distance has
// bit k set travel 2^k ranks, packed into one message. ceil(log2 n) messages, about n / 2 blocks each. Every round has
// its own receive area, so that the sender of round k + 1 need not wait for a receiver that still reads round k.
// Source: Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE TPDS 8(11), 1997, doi 10.1109/71.642949.
Plan BruckAllToAll(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const int64_t b = request.block_count;
  Builder plan(request, rank);
  std::vector<Place> where(n);  // by distance: the place of the block, at first in this rank's input
  for (int32_t i = 0; i < n; ++i) where[i] = plan.Input((rank + i) % n * b);
  int64_t receive = n / 2 * b;  // after the send area: no round moves more than n / 2 blocks
  for (int32_t bit = 1; bit < n; bit <<= 1) {
    const int32_t to = (rank + bit) % n;
    std::vector<int32_t> moved;
    for (int32_t i = 0; i < n; ++i) {
      if (i & bit) moved.push_back(i);
    }
    const auto num_moved = static_cast<int64_t>(moved.size());
    Place message = where[moved[0]];
    if (num_moved > 1) {
      message = plan.Scratch(0);
      for (int64_t j = 0; j < num_moved;) {
        // Contiguous blocks are packed by one step.
        const Place first = where[moved[j]];
        int64_t num_contiguous = 1;
        while (j + num_contiguous < num_moved && where[moved[j + num_contiguous]].space == first.space &&
               where[moved[j + num_contiguous]].offset == first.offset + num_contiguous * b) {
          ++num_contiguous;
        }
        plan.Move(first, plan.Scratch(j * b), num_contiguous * b);
        j += num_contiguous;
      }
    }
    plan.Move(message, Builder::At(to, Space::kScratch, receive), num_moved * b);
    plan.Signal(to);
    plan.Wait((rank + n - bit) % n);
    for (int64_t j = 0; j < num_moved; ++j) where[moved[j]] = plan.Scratch(receive + j * b);
    receive += num_moved * b;
  }
  for (int32_t i = 0; i < n; ++i) plan.Move(where[i], plan.Output((rank + n - i) % n * b), b);
  return std::move(plan).Finish(receive);
}

// Hierarchical: local rank l' of a node gathers all blocks that its node sends over rail l', then puts them to its rail
// peer, directly into its output. L times fewer and L times larger messages between nodes than direct.
// A stage is one chunk for one other node. The gather of stage t + 1 is issued before the send of stage t waits, so
// both networks are busy. Four slots of scratch are enough and need no signals of their own: before gather u, a rank
// has sent stage u - 2, for which every local peer signalled its gather u - 2, which it issued after its send u - 4.
// Source: Traeff, Hunold, IEEE Cluster 2020, arXiv:1910.13373 (full-lane all-to-all); Hwang et al., MLSys 2023,
// arXiv:2206.03382 (two-dimensional hierarchical all-to-all).
Plan HierarchicalAllToAll(const Request& request, int32_t rank) {
  constexpr int64_t kSlots = 4;
  const RailPosition at(request.geometry, rank);
  const int64_t b = request.block_count;
  const int64_t chunks = NumChunks(b, request.chunk_count);
  const int64_t max_chunk = MaxChunk(b, chunks);
  const int64_t stages = (at.nodes - 1) * chunks;
  const int64_t slots = std::min(kSlots, stages);
  Builder plan(request, rank);

  const auto chunk = [&](int64_t t) { return Subrange({0, b}, chunks, t % chunks); };
  // The offset in scratch of the data from local rank `from`. Whole blocks are contiguous, in the order of the output.
  const auto slot = [&](int64_t t, int32_t from) { return (t % slots * at.locals + from) * max_chunk; };
  const auto gather = [&](int64_t t) {
    const Range part = chunk(t);
    for (int32_t i = 1; i <= at.locals; ++i) {
      const int32_t peer = at.NodePeer(i);
      const int64_t block = at.NodeAt(1 + t / chunks) * at.locals + request.geometry.local(peer);
      plan.Move(plan.Input(block * b + part.begin), Builder::At(peer, Space::kScratch, slot(t, at.local)), part.count);
      if (peer != rank) plan.Signal(peer);
    }
  };
  const auto send = [&](int64_t t) {
    for (int32_t i = 1; i < at.locals; ++i) plan.Wait(at.NodePeer(-i));
    const Range part = chunk(t);
    const int32_t peer = at.RailPeer(1 + t / chunks);
    const int64_t first_block = at.node * at.locals;
    if (chunks == 1) {
      plan.Move(plan.Scratch(slot(t, 0)), Builder::At(peer, Space::kOutput, first_block * b), at.locals * b);
      return;
    }
    for (int32_t from = 0; from < at.locals; ++from) {
      plan.Move(plan.Scratch(slot(t, from)), Builder::At(peer, Space::kOutput, (first_block + from) * b + part.begin),
                part.count);
    }
  };

  RunPipeline(stages, {{0, gather}, {1, send}});
  // Blocks for the own node come last: no rank waits for them, and the last messages are still in flight.
  for (int32_t i = 0; i < at.locals; ++i) Exchange(plan, request, rank, at.NodePeer(i));
  return std::move(plan).Finish(slots * at.locals * max_chunk);
}

}  // namespace

template <>
const std::vector<Algorithm>& Table<Collective::kAllToAll>() {
  static const std::vector<Algorithm> table = {
      {"direct", kThakur, kAnyGeometry, DirectAllToAll},
      {"pairwise", kThakur, kAnyGeometry, PairwiseAllToAll},
      {"bruck", "Bruck et al., IEEE TPDS 8(11), 1997, doi 10.1109/71.642949", kAnyGeometry, BruckAllToAll},
      {"hierarchical",
       "Traeff, Hunold, IEEE Cluster 2020, arXiv:1910.13373; Hwang et al., MLSys 2023, arXiv:2206.03382", kSeveralNodes,
       HierarchicalAllToAll},
      {"ll", kNcclLl, kOneAddressSpace, DirectAllToAll, Protocol::kLl},
  };
  return table;
}

}  // namespace jaxcomm
