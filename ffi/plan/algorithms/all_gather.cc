// Plans of all_gather: every rank ends with block r of every rank r, in rank order.
#include "plan/builder.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

// Direct: each rank puts its block to all others, or they read it. No waits. n - 1 messages of b. If the processor
// itself copies, each chunk goes to all ranks before the next one, so that it is read from memory once and from the
// cache n - 1 times. Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
Plan DirectAllGather(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const int64_t b = request.block_count;
  const int64_t chunks = NumChunks(b, request.geometry.all_addressable ? request.chunk_count : 0);
  Builder plan(request, rank);
  for (int64_t c = 0; c < chunks; ++c) {
    const Range part = Subrange({0, b}, chunks, c);
    for (int32_t s = 0; s < n; ++s) {
      const int32_t peer = (rank + s) % n;
      if (Pulls(request.geometry, rank, peer)) {
        plan.Move(Builder::At(peer, Space::kInput, part.begin), plan.Output(peer * b + part.begin), part.count);
      } else {
        plan.Move(plan.Input(part.begin), Builder::At(peer, Space::kOutput, rank * b + part.begin), part.count);
      }
    }
  }
  return std::move(plan).Finish(0);
}

// Ring: in step s, rank r forwards block r - s to r + 1. n - 1 messages of b. The last step needs no signal, because
// its block is not forwarded. Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
Plan RingAllGather(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const int64_t b = request.block_count;
  const int32_t next = (rank + 1) % n;
  const int32_t prev = (rank + n - 1) % n;
  Builder plan(request, rank);
  for (int32_t s = 0; s + 1 < n; ++s) {
    const int64_t block = (rank + n - s) % n;
    if (s > 0) plan.Wait(prev);
    plan.Move(s == 0 ? plan.Input(0) : plan.Output(block * b), Builder::At(next, Space::kOutput, block * b), b);
    if (s + 2 < n) plan.Signal(next);
  }
  plan.Move(plan.Input(0), plan.Output(rank * b), b);
  return std::move(plan).Finish(0);
}

// Recursive doubling: in round k, rank r exchanges the 2^k blocks of its group with rank r xor 2^k. log2 n messages,
// (n - 1) * b in total. Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
Plan RecursiveDoublingAllGather(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const int64_t b = request.block_count;
  Builder plan(request, rank);
  plan.Move(plan.Input(0), plan.Output(rank * b), b);
  for (int32_t bit = 1; bit < n; bit <<= 1) {
    const int32_t peer = rank ^ bit;
    const int64_t first_block = rank & ~(bit - 1);
    plan.Move(plan.Output(first_block * b), Builder::At(peer, Space::kOutput, first_block * b), bit * b);
    if (bit * 2 == n) break;  // blocks of the last round are not forwarded
    plan.Signal(peer);
    plan.Wait(peer);
  }
  return std::move(plan).Finish(0);
}

// Bruck: in round k, rank r puts all its blocks r .. r + 2^k - 1 to r - 2^k. ceil(log2 n) rounds for any n, (n - 1) * b
// in total. Blocks go to their final places. So blocks that wrap around at n take two messages, and the rotation at the
// end of the original algorithm is not needed. Source: Bruck et al., IEEE TPDS 8(11), 1997.
Plan BruckAllGather(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const int64_t b = request.block_count;
  Builder plan(request, rank);
  plan.Move(plan.Input(0), plan.Output(rank * b), b);
  for (int64_t bit = 1; bit < n; bit <<= 1) {
    const auto to = static_cast<int32_t>((rank + n - bit) % n);
    const int64_t num_blocks = std::min(bit, n - bit);
    const int64_t before_wrap = std::min<int64_t>(num_blocks, n - rank);
    plan.Move(plan.Output(rank * b), Builder::At(to, Space::kOutput, rank * b), before_wrap * b);
    plan.Move(plan.Output(0), Builder::At(to, Space::kOutput, 0), (num_blocks - before_wrap) * b);
    // This round delivers blocks from r + 2^k on. The next one forwards at most n - 2^(k+1) blocks, perhaps none of
    // these.
    if (n - 2 * bit > bit) {
      plan.Signal(to);
      plan.Wait(static_cast<int32_t>((rank + bit) % n));
    }
  }
  return std::move(plan).Finish(0);
}

// Hierarchical: each rank sends its block over the rail to one rank of every other node, directly into its output. That
// rank puts it to its local peers, or signals them to read it. A stage is one chunk for one other node. The send of
// stage t + 1 is issued before the forward of stage t waits. (G - 1) * b between nodes, G * (L - 1) * b in the node, no
// scratch. Source: Traeff, Hunold, IEEE Cluster 2020, arXiv:1910.13373 (full-lane all-gather).
Plan HierarchicalAllGather(const Request& request, int32_t rank) {
  const RailPosition at(request.geometry, rank);
  const int64_t b = request.block_count;
  const int64_t chunks = NumChunks(b, request.chunk_count);
  const int64_t stages = (at.nodes - 1) * chunks;
  Builder plan(request, rank);

  const auto send = [&](int64_t t) {
    const Range part = Subrange({0, b}, chunks, t % chunks);
    const int32_t peer = at.RailPeer(1 + t / chunks);
    plan.Move(plan.Input(part.begin), Builder::At(peer, Space::kOutput, rank * b + part.begin), part.count);
    plan.Signal(peer);
  };
  // Puts `count` elements from `src` to `offset` of the outputs of all local peers.
  const auto spread = [&](Place src, int64_t offset, int64_t count) {
    for (int32_t i = 1; i < at.locals; ++i) plan.Move(src, Builder::At(at.NodePeer(i), Space::kOutput, offset), count);
  };
  // The range of the output that local rank l receives from its rail in stage t. The same in all outputs.
  const auto got = [&](int64_t t, int32_t l) {
    const Range part = Subrange({0, b}, chunks, t % chunks);
    const int64_t from = int64_t{at.NodeAt(-1 - t / chunks)} * at.locals + l;
    return Range{from * b + part.begin, part.count};
  };
  const auto forward = [&](int64_t t) {
    const Range part = got(t, at.local);
    plan.Wait(static_cast<int32_t>(part.begin / b));  // the rank whose block it is
    if (!request.geometry.pull) return spread(plan.Output(part.begin), part.begin, part.count);
    for (int32_t i = 1; i < at.locals; ++i) plan.Signal(at.NodePeer(i));
  };
  const auto collect = [&](int64_t t) {
    for (int32_t i = 1; i < at.locals && request.geometry.pull; ++i) {
      const int32_t peer = at.NodePeer(-i);
      const Range part = got(t, request.geometry.local(peer));
      plan.Wait(peer);
      plan.Move(Builder::At(peer, Space::kOutput, part.begin), plan.Output(part.begin), part.count);
    }
  };

  // The local peers get the chunks of this rank's block in between, while messages between nodes are in flight.
  const auto spread_own = [&](int64_t c) {
    const Range part = Subrange({0, b}, chunks, c);
    plan.Move(plan.Input(part.begin), plan.Output(rank * b + part.begin), part.count);
    if (!request.geometry.pull) return spread(plan.Input(part.begin), rank * b + part.begin, part.count);
    for (int32_t i = 1; i < at.locals; ++i) {
      const int32_t peer = at.NodePeer(-i);
      plan.Move(Builder::At(peer, Space::kInput, part.begin), plan.Output(peer * b + part.begin), part.count);
    }
  };

  const auto forward_all = [&](int64_t t) {
    if (t < chunks) spread_own(t);
    forward(t);
  };
  RunPipeline(stages, {{0, send}, {1, forward_all}, {2, collect}});
  return std::move(plan).Finish(0);
}

}  // namespace

template <>
const std::vector<Algorithm>& Table<Collective::kAllGather>() {
  static const std::vector<Algorithm> table = {
      {"direct", kThakur, kAnyGeometry, DirectAllGather},
      {"recursive_doubling", kThakur, kPowerOfTwoRanks, RecursiveDoublingAllGather},
      {"bruck", "Bruck et al., IEEE TPDS 8(11), 1997, doi 10.1109/71.642949", kAnyGeometry, BruckAllGather},
      {"ring", kThakur, kAnyGeometry, RingAllGather},
      {"hierarchical", kTraeff, kSeveralNodes, HierarchicalAllGather},
      {"ll", kNcclLl, kOneAddressSpace, DirectAllGather, Protocol::kLl},
      {"multimem", "NVIDIA/nccl:src/device/symmetric/all_gather.cuh (multimem)", kOneNodeWithMultimem, DirectAllGather,
       Protocol::kMultimem},
  };
  return table;
}

}  // namespace jaxcomm
