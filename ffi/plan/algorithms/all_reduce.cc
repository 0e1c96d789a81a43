// Plans of all_reduce: every rank ends with the sum of the blocks of all ranks. For each element, the order of operands
// is the same on all ranks, so the results are equal bit for bit.
#include "plan/builder.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

// Direct, or two-shot: rank r sums piece r over all inputs, in rank order, and puts the result to all ranks, chunk by
// chunk, so that a sum is put from the cache. No waits. (n - 1) * b / n read, and as much put, per rank. If direct
// plans pull, each rank signals that its sum is ready and then reads the sums of the others. Source:
// pytorch/pytorch:torch/csrc/distributed/c10d/intra_node_comm.cu (two-shot).
Plan DirectAllReduce(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const auto piece_of = [&](int32_t r) { return Subrange({0, request.block_count}, n, r); };
  const Range piece = piece_of(rank);
  const int64_t chunks = NumChunks(piece.count, request.chunk_count);
  Builder plan(request, rank);
  std::vector<Place> sources(n);
  for (int64_t c = 0; c < chunks; ++c) {
    const Range part = Subrange(piece, chunks, c);
    for (int32_t peer = 0; peer < n; ++peer) sources[peer] = Builder::At(peer, Space::kInput, part.begin);
    plan.Reduce(sources, plan.Output(part.begin), part.count);
    for (int32_t s = 1; s < n && !request.geometry.pull; ++s) {
      plan.Move(plan.Output(part.begin), Builder::At((rank + s) % n, Space::kOutput, part.begin), part.count);
    }
  }
  if (request.geometry.pull) {
    for (int32_t s = 1; s < n && piece.count > 0; ++s) plan.Signal((rank + s) % n);
    for (int32_t s = 1; s < n; ++s) {
      const int32_t peer = (rank + n - s) % n;
      const Range theirs = piece_of(peer);
      if (theirs.count == 0) continue;
      plan.Wait(peer);
      plan.Move(Builder::At(peer, Space::kOutput, theirs.begin), plan.Output(theirs.begin), theirs.count);
    }
  }
  return std::move(plan).Finish(0);
}

// One-shot: every rank sums all inputs, in rank order. One step; (n - 1) * b read per rank.
// Source: pytorch/pytorch:torch/csrc/distributed/c10d/intra_node_comm.cu (one-shot).
Plan OneShotAllReduce(const Request& request, int32_t rank) {
  Builder plan(request, rank);
  std::vector<Place> sources;
  for (int32_t peer = 0; peer < request.geometry.num_ranks(); ++peer) {
    sources.push_back(Builder::At(peer, Space::kInput, 0));
  }
  plan.Reduce(sources, plan.Output(0), request.block_count);
  return std::move(plan).Finish(0);
}

// Root: rank 0 sums all inputs and puts the result to all ranks; the others do nothing. It has the fewest steps in
// total, which is fastest if ranks share processors and blocks are small. (n - 1) * b read and (n - 1) * b put by rank
// 0. Source: reduce and broadcast over flat trees, Chan et al., CCPE 19(13), 2007, doi 10.1002/cpe.1206.
Plan RootAllReduce(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const Range block = {0, request.block_count};
  const int64_t chunks = rank == 0 ? NumChunks(block.count, request.chunk_count) : 0;
  Builder plan(request, rank);
  std::vector<Place> sources(n);
  for (int64_t c = 0; c < chunks; ++c) {
    const Range part = Subrange(block, chunks, c);
    for (int32_t peer = 0; peer < n; ++peer) sources[peer] = Builder::At(peer, Space::kInput, part.begin);
    plan.Reduce(sources, plan.Output(part.begin), part.count);
    for (int32_t peer = 1; peer < n; ++peer) {
      plan.Move(plan.Output(part.begin), Builder::At(peer, Space::kOutput, part.begin), part.count);
    }
  }
  return std::move(plan).Finish(0);
}

// Ring: the sum of piece j starts at rank j + 1 and travels around to rank j, then the result travels around once more.
// 2 (n - 1) steps, 2 (n - 1) * b / n sent per rank. Sums travel in the outputs: rank r gets piece j once as a partial
// sum and once as the result, and the result exists only after r has forwarded the partial sum. So no scratch is
// needed. A piece is pipelined by chunks: one is put while the next is summed. Source: Patarasuk, Yuan, JPDC 69(2),
// 2009, doi 10.1016/j.jpdc.2008.09.002.
Plan RingAllReduce(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const Range block = {0, request.block_count};
  const int64_t chunks = NumChunks(CeilDiv(block.count, n), request.chunk_count);  // per piece, equal on all ranks
  const int32_t next = (rank + 1) % n;
  const int32_t prev = (rank + n - 1) % n;
  Builder plan(request, rank);
  plan.Reserve(2 * (n - 1) * chunks * 4, (n - 1) * chunks * 2);
  // The first n - 1 steps forward partial sums, the others results. In step n - 1, this rank's piece becomes a result.
  for (int64_t s = 0; s <= 2 * (n - 1) - 1; ++s) {
    const Range piece = Subrange(block, n, (rank + 2 * n - 1 - s) % n);
    for (int64_t c = 0; c < chunks; ++c) {
      const Range part = Subrange(piece, chunks, c);
      if (s > 0) plan.Wait(prev);
      if (s > 0 && s < n) {
        plan.Reduce({plan.Output(part.begin), plan.Input(part.begin)}, plan.Output(part.begin), part.count);
      }
      plan.Move(s == 0 ? plan.Input(part.begin) : plan.Output(part.begin),
                Builder::At(next, Space::kOutput, part.begin), part.count);
      if (s < 2 * (n - 1) - 1) plan.Signal(next);  // the result of the last step is not forwarded
    }
  }
  if (n == 1) plan.Move(plan.Input(0), plan.Output(0), block.count);
  return std::move(plan).Finish(0);
}

// Reduces any number of ranks to a power of two. Of the first 2 * extra ranks, the even ones send their input to the
// odd ones and get the result from them. All other ranks are members 0 .. size - 1, in rank order.
struct Fold {
  int32_t size = 1;
  int32_t extra = 0;

  explicit Fold(int32_t n) {
    while (size * 2 <= n) size *= 2;
    extra = n - size;
  }
  bool Outside(int32_t rank) const { return rank < 2 * extra && rank % 2 == 0; }
  bool Stands(int32_t rank) const { return rank < 2 * extra && rank % 2 == 1; }  // for the rank below it
  int32_t Member(int32_t rank) const { return rank < 2 * extra ? rank / 2 : rank - extra; }
  int32_t Rank(int32_t member) const { return member < extra ? 2 * member + 1 : member + extra; }
};

// First step of a folded plan. A rank that stands for another receives the input of that rank in scratch [0, b).
// Returns the space of this rank's sum after the step.
Space FoldIn(Builder& plan, const Fold& fold, int32_t rank, int64_t b) {
  if (fold.Outside(rank)) {
    plan.Move(plan.Input(0), Builder::At(rank + 1, Space::kScratch, 0), b);
    plan.Signal(rank + 1);
  }
  if (!fold.Stands(rank)) return Space::kInput;
  plan.Wait(rank - 1);
  plan.Reduce({plan.Scratch(0), plan.Input(0)}, plan.Output(0), b);
  return Space::kOutput;
}

// Last step: sends the result to the rank outside. No signal is needed, because that rank reads it only after the end.
void FoldOut(Builder& plan, const Fold& fold, int32_t rank, int64_t b) {
  if (fold.Stands(rank)) plan.Move(plan.Output(0), Builder::At(rank - 1, Space::kOutput, 0), b);
}

// Recursive doubling: in round k, member m exchanges its whole sum with member m xor 2^k; both add, the lower member's
// sum first. log2 n messages of b, and two more steps if n is not a power of two. Every round has its own receive area.
// Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
Plan RecursiveDoublingAllReduce(const Request& request, int32_t rank) {
  const Fold fold(request.geometry.num_ranks());
  const int64_t b = request.block_count;
  Builder plan(request, rank);
  Space sum = FoldIn(plan, fold, rank, b);
  int64_t receive = fold.extra > 0 ? b : 0;
  for (int32_t bit = 1; bit < fold.size; bit <<= 1, receive += b) {
    if (fold.Outside(rank)) continue;
    const int32_t member = fold.Member(rank);
    const int32_t peer = fold.Rank(member ^ bit);
    const Place own = Builder::At(rank, sum, 0);
    const Place received = plan.Scratch(receive);
    plan.Move(own, Builder::At(peer, Space::kScratch, receive), b);
    plan.Signal(peer);
    plan.Wait(peer);
    plan.Reduce(member & bit ? std::vector<Place>{received, own} : std::vector<Place>{own, received}, plan.Output(0),
                b);
    sum = Space::kOutput;
  }
  if (fold.size == 1) plan.Move(plan.Input(0), plan.Output(0), b);
  FoldOut(plan, fold, rank, b);
  return std::move(plan).Finish(receive);
}

// Rabenseifner: reduce-scatter by recursive halving of the buffer, then all-gather by recursive doubling back.
// 2 log2 n messages, 2 (n - 1) * b / n in total, and two more steps if n is not a power of two.
// Source: Rabenseifner, ICCS 2004, doi 10.1007/978-3-540-24685-5_1.
Plan RabenseifnerAllReduce(const Request& request, int32_t rank) {
  const Fold fold(request.geometry.num_ranks());
  const int64_t b = request.block_count;
  Builder plan(request, rank);
  Space sum = FoldIn(plan, fold, rank, b);
  const int32_t member = fold.Member(rank);
  // The elements of `width` pieces from piece `first` on. The block has fold.size pieces.
  const auto pieces = [&](int64_t first, int64_t width) {
    const int64_t begin = Subrange({0, b}, fold.size, first).begin;
    const Range last = Subrange({0, b}, fold.size, first + width - 1);
    return Range{begin, last.begin + last.count - begin};
  };

  int64_t receive = fold.extra > 0 ? b : 0;
  for (int32_t half = fold.size / 2; half > 0; half /= 2) {
    const int64_t receive_next = receive + CeilDiv(b * half, fold.size);
    if (!fold.Outside(rank)) {
      const int32_t peer = fold.Rank(member ^ half);
      const Range kept = pieces(member & ~(half - 1), half);
      const Range sent = pieces((member ^ half) & ~(half - 1), half);
      plan.Move(Builder::At(rank, sum, sent.begin), Builder::At(peer, Space::kScratch, receive), sent.count);
      plan.Signal(peer);
      plan.Wait(peer);
      const Place own = Builder::At(rank, sum, kept.begin);
      const Place received = plan.Scratch(receive);
      plan.Reduce(member & half ? std::vector<Place>{received, own} : std::vector<Place>{own, received},
                  plan.Output(kept.begin), kept.count);
      sum = Space::kOutput;
    }
    receive = receive_next;
  }

  if (fold.size == 1) plan.Move(plan.Input(0), plan.Output(0), b);
  for (int32_t width = 1; width < fold.size && !fold.Outside(rank); width *= 2) {
    const int32_t peer = fold.Rank(member ^ width);
    const bool last = width * 2 == fold.size;
    const Range own = pieces(member & ~(width - 1), width);
    plan.Move(plan.Output(own.begin), Builder::At(peer, Space::kOutput, own.begin), own.count);
    // After the last round, only a rank that stands for another forwards the result.
    if (!last || fold.Stands(peer)) plan.Signal(peer);
    if (!last || fold.Stands(rank)) plan.Wait(peer);
  }
  FoldOut(plan, fold, rank, b);
  return std::move(plan).Finish(receive);
}

// Tree: sums go up a binomial tree to rank 0, and the result comes down again. 2 ceil(log2 n) rounds. Every child has
// its own receive area. Pipelined by chunks. A rank sends its sum from its output, which the result overwrites only
// after the parent has received the sum. Source: Chan, Heimlich, Purkayastha, van de Geijn, CCPE 19(13), 2007,
// doi 10.1002/cpe.1206.
Plan TreeAllReduce(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const int64_t b = request.block_count;
  const int64_t chunks = NumChunks(b, request.chunk_count);
  const std::vector<int32_t> children = TreeChildren(rank, n);
  const int32_t parent = TreeParent(rank);
  Builder plan(request, rank);
  const auto area = [&](int32_t child) { return CeilLog2(child - TreeParent(child)) * b; };

  const auto up = [&](int64_t c) {
    const Range part = Subrange({0, b}, chunks, c);
    std::vector<Place> sources = {plan.Input(part.begin)};
    for (int32_t child : children) {
      plan.Wait(child);
      sources.push_back(plan.Scratch(area(child) + part.begin));
    }
    if (rank == 0 || !children.empty()) plan.Reduce(sources, plan.Output(part.begin), part.count);
    if (rank == 0) return;
    plan.Move(children.empty() ? plan.Input(part.begin) : plan.Output(part.begin),
              Builder::At(parent, Space::kScratch, area(rank) + part.begin), part.count);
    plan.Signal(parent);
  };
  const auto down = [&](int64_t c) {
    const Range part = Subrange({0, b}, chunks, c);
    if (rank != 0 && !children.empty()) plan.Wait(parent);
    for (auto child = children.rbegin(); child != children.rend(); ++child) {
      plan.Move(plan.Output(part.begin), Builder::At(*child, Space::kOutput, part.begin), part.count);
      if (!TreeChildren(*child, n).empty()) plan.Signal(*child);
    }
  };
  for (int64_t c = 0; c < chunks; ++c) {
    up(c);
    if (rank == 0) down(c);
  }
  for (int64_t c = 0; c < chunks && rank != 0; ++c) down(c);
  return std::move(plan).Finish(CeilLog2(n) * b);
}

// Hierarchical: piece l of the block belongs to rail l, and sub-piece g of it to node g. Per chunk there are four
// stages:
// - scatter: rank (g, l) sums the sub-piece of every (g', l) over its node and puts the sum to that rank;
// - combine: it adds the G sums of its own sub-piece in node order and puts the result to its rail and its node;
// - spread: it puts the results that it receives from its rail to its node. Ranks that pull signal their node instead;
// - collect: ranks that pull read the results of their local peers.
// Scatter of chunk c + 4 and combine of chunk c + 2 are issued before the spread of chunk c waits, so that a late rank
// leaves no gap on the network. Five slots need no signals of their own: before scatter u, a rank has spread chunk u -
// 5, for which every rail peer signalled its combine u - 5. Per rank 2 (G - 1) * b / n between nodes; 2 (L - 1) * b / L
// in the node. Source: Cho et al. (BlueConnect), IBM J. Res. Dev. 63(6), 2019, doi 10.1147/JRD.2019.2947013.
Plan HierarchicalAllReduce(const Request& request, int32_t rank) {
  constexpr int64_t kAhead = 2;
  constexpr int64_t kSlots = 2 * kAhead + 1;
  constexpr int64_t kSendSlots = 2;  // a put may still read one slot while the next sum is written to the other
  const RailPosition at(request.geometry, rank);
  const Range block = {0, request.block_count};
  const int64_t max_count = CeilDiv(CeilDiv(block.count, at.locals), at.nodes);  // of a sub-piece
  const int64_t chunks = NumChunks(max_count, request.chunk_count);              // equal on all ranks
  const int64_t max_chunk = MaxChunk(max_count, chunks);
  const int64_t slots = std::min(kSlots, chunks);
  Builder plan(request, rank);
  // On each rail two exchanges of sums, signals and waits; in the node results come by pulls or go by puts.
  plan.Reserve(chunks * (at.nodes + 2) * (at.locals + 6), chunks * at.nodes * (at.locals + 1));

  const auto part_at = [&](int32_t l, int32_t g, int64_t c) {
    return Subrange(Subrange(Subrange(block, at.locals, l), at.nodes, g), chunks, c);
  };
  const auto part_of = [&](int32_t g, int64_t c) { return part_at(at.local, g, c); };
  const auto received = [&](int64_t c, int32_t from) { return (c % slots * at.nodes + from) * max_chunk; };
  const int64_t send_area = slots * at.nodes * max_chunk;
  int64_t sent = 0;
  std::vector<Place> sources;
  const auto node_sum = [&](Range part, Place to) {
    sources.clear();
    for (int32_t i = 0; i < at.locals; ++i) {
      sources.push_back(Builder::At(at.node * at.locals + i, Space::kInput, part.begin));
    }
    plan.Reduce(sources, to, part.count);
  };
  const auto put_to_node = [&](Range part) {
    for (int32_t i = 1; i < at.locals && !request.geometry.pull; ++i) {
      plan.Move(plan.Output(part.begin), Builder::At(at.NodePeer(i), Space::kOutput, part.begin), part.count);
    }
  };

  const auto scatter = [&](int64_t c) {
    for (int32_t d = 1; d < at.nodes; ++d) {
      const Range part = part_of(at.NodeAt(d), c);
      const Place sum = plan.Scratch(send_area + sent++ % kSendSlots * max_chunk);
      node_sum(part, sum);
      plan.Move(sum, Builder::At(at.RailPeer(d), Space::kScratch, received(c, at.node)), part.count);
      plan.Signal(at.RailPeer(d));
    }
    node_sum(part_of(at.node, c), plan.Scratch(received(c, at.node)));
  };
  const auto combine = [&](int64_t c) {
    const Range part = part_of(at.node, c);
    for (int32_t d = 1; d < at.nodes; ++d) plan.Wait(at.RailPeer(-d));
    sources.clear();
    for (int32_t from = 0; from < at.nodes; ++from) sources.push_back(plan.Scratch(received(c, from)));
    plan.Reduce(sources, plan.Output(part.begin), part.count);
    for (int32_t d = 1; d < at.nodes; ++d) {
      plan.Move(plan.Output(part.begin), Builder::At(at.RailPeer(d), Space::kOutput, part.begin), part.count);
      plan.Signal(at.RailPeer(d));
    }
    put_to_node(part);
  };
  const auto spread = [&](int64_t c) {
    for (int32_t d = 1; d < at.nodes; ++d) {
      plan.Wait(at.RailPeer(-d));
      put_to_node(part_of(at.NodeAt(-d), c));
    }
    for (int32_t i = 1; i < at.locals && request.geometry.pull; ++i) plan.Signal(at.NodePeer(i));
  };
  const auto collect = [&](int64_t c) {
    for (int32_t i = 1; i < at.locals && request.geometry.pull; ++i) {
      const int32_t peer = at.NodePeer(-i);
      plan.Wait(peer);
      for (int32_t g = 0; g < at.nodes; ++g) {
        const Range part = part_at(request.geometry.local(peer), g, c);
        plan.Move(Builder::At(peer, Space::kOutput, part.begin), plan.Output(part.begin), part.count);
      }
    }
  };

  RunPipeline(chunks, {{0, scatter}, {kAhead, combine}, {2 * kAhead, spread}, {2 * kAhead + 1, collect}});
  return std::move(plan).Finish(send_area + std::min(kSendSlots, (at.nodes - 1) * chunks) * max_chunk);
}

}  // namespace

template <>
const std::vector<Algorithm>& Table<Collective::kAllReduce>() {
  static const std::vector<Algorithm> table = {
      {"direct", "pytorch/pytorch:torch/csrc/distributed/c10d/intra_node_comm.cu (two-shot)", kOneAddressSpace,
       DirectAllReduce},
      {"root", "Chan, Heimlich, Purkayastha, van de Geijn, CCPE 19(13), 2007, doi 10.1002/cpe.1206 (flat trees)",
       kOneAddressSpace, RootAllReduce},
      {"one_shot", "pytorch/pytorch:torch/csrc/distributed/c10d/intra_node_comm.cu (one-shot)", kOneAddressSpace,
       OneShotAllReduce},
      {"rabenseifner", "Rabenseifner, ICCS 2004, doi 10.1007/978-3-540-24685-5_1", kAnyGeometry, RabenseifnerAllReduce},
      {"recursive_doubling", kThakur, kAnyGeometry, RecursiveDoublingAllReduce},
      {"ring", "Patarasuk, Yuan, JPDC 69(2), 2009, doi 10.1016/j.jpdc.2008.09.002", kAnyGeometry, RingAllReduce},
      {"tree", "Chan, Heimlich, Purkayastha, van de Geijn, CCPE 19(13), 2007, doi 10.1002/cpe.1206", kAnyGeometry,
       TreeAllReduce},
      {"hierarchical", "Cho et al., IBM J. Res. Dev. 63(6), 2019, doi 10.1147/JRD.2019.2947013", kSeveralNodes,
       HierarchicalAllReduce},
      {"ll", kNcclLl, kOneAddressSpace, OneShotAllReduce, Protocol::kLl},
      {"ll_two_shot", kNcclLl, kOneAddressSpace, DirectAllReduce, Protocol::kLlTwoShot},
      {"multimem", "NVIDIA/nccl:src/device/symmetric/all_reduce.cuh (multimem)", kOneNodeWithMultimem, DirectAllReduce,
       Protocol::kMultimem},
  };
  return table;
}

}  // namespace jaxcomm
