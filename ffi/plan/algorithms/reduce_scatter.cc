// Plans of reduce_scatter: rank r ends with the sum of block r of all ranks.
#include "plan/builder.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

// Direct: one reduce over the inputs of all ranks, in rank order. No waits. (n - 1) * b read from peers.
// Source: the first half of a two-shot all-reduce, pytorch/pytorch:torch/csrc/distributed/c10d/intra_node_comm.cu.
Plan DirectReduceScatter(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const int64_t b = request.block_count;
  Builder plan(request, rank);
  std::vector<Place> sources;
  for (int32_t peer = 0; peer < n; ++peer) sources.push_back(Builder::At(peer, Space::kInput, rank * b));
  plan.Reduce(sources, plan.Output(0), b);
  return std::move(plan).Finish(0);
}

// Ring: the sum of block j starts at rank j + 1 and travels around to rank j; each rank adds its own block. n - 1
// messages of b. One chunk goes all the way before the next, and message i uses slot i mod n. Free slots need no
// signals: rank r sends message i after it got message i - 1 from r - 1, which had got i - 2 from r - 2, and so on back
// to r + 1, which had sent message i - n + 1 and so had finished with the slot of message i - n. Source: Patarasuk,
// Yuan, JPDC 69(2), 2009, doi 10.1016/j.jpdc.2008.09.002.
Plan RingReduceScatter(const Request& request, int32_t rank) {
  const int64_t n = request.geometry.num_ranks();
  const int64_t b = request.block_count;
  const int64_t chunks = NumChunks(b, request.chunk_count);
  const int64_t max_chunk = MaxChunk(b, chunks);
  const int64_t slots = std::min(n, (n - 1) * chunks);
  const auto next = static_cast<int32_t>((rank + 1) % n);
  const auto prev = static_cast<int32_t>((rank + n - 1) % n);
  Builder plan(request, rank);
  int64_t message = 0;  // number of the next one to send; the one received before it is message - 1
  const auto slot = [&](int64_t i) { return i % slots * max_chunk; };
  for (int64_t c = 0; c < chunks; ++c) {
    const Range part = Subrange({0, b}, chunks, c);
    for (int64_t s = 0; s + 1 < n; ++s, ++message) {
      const int64_t block = (rank + 2 * n - 1 - s) % n;
      Place sum = plan.Input(block * b + part.begin);
      if (s > 0) {
        const Place received = plan.Scratch(slot(message - 1));
        plan.Wait(prev);
        plan.Reduce({received, sum}, received, part.count);
        sum = received;
      }
      plan.Move(sum, Builder::At(next, Space::kScratch, slot(message)), part.count);
      plan.Signal(next);
    }
    std::vector<Place> sources;
    if (n > 1) {
      plan.Wait(prev);
      sources.push_back(plan.Scratch(slot(message - 1)));
    }
    sources.push_back(plan.Input(rank * b + part.begin));
    plan.Reduce(sources, plan.Output(part.begin), part.count);
  }
  return std::move(plan).Finish(slots * max_chunk);
}

// Recursive halving: in each round, the range of blocks that a rank is responsible for splits in two. The rank puts its
// sums of the other half to its peer there and adds the sums that it receives. log2 n messages, (n - 1) * b in total.
// Every round has its own receive area. Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
Plan RecursiveHalvingReduceScatter(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const int64_t b = request.block_count;
  Builder plan(request, rank);
  Place sums = plan.Input(0);  // sums of the blocks that this rank is responsible for
  int64_t receive = 0;
  for (int32_t half = n / 2; half > 0; half /= 2) {
    const int32_t peer = rank ^ half;
    const bool upper = rank & half;
    Place kept = sums;
    Place sent = sums;
    (upper ? kept : sent).offset += half * b;
    plan.Move(sent, Builder::At(peer, Space::kScratch, receive), half * b);
    plan.Signal(peer);
    plan.Wait(peer);
    const Place received = plan.Scratch(receive);
    const Place to = half == 1 ? plan.Output(0) : received;
    // The lower rank's sum comes first, so the order of operands does not depend on the rank that adds them.
    plan.Reduce(upper ? std::vector<Place>{received, kept} : std::vector<Place>{kept, received}, to, half * b);
    sums = received;
    receive += half * b;
  }
  if (n == 1) plan.Move(plan.Input(0), plan.Output(0), b);
  return std::move(plan).Finish(receive);
}

// Hierarchical: for every node, local rank l sums its node's blocks for rank l of that node and puts the sum to it. The
// receiver adds G sums in node order. Scatter of chunk c + 1 is issued before the finish of chunk c waits. Four slots
// need no signals of their own: before scatter u, a rank has finished chunk u - 2, for which every rail peer signalled
// its scatter u - 2, which it issued after its finish u - 4.
// (G - 1) * b between nodes, G * (L - 1) * b read in the node.
// Source: Traeff, Hunold, IEEE Cluster 2020, arXiv:1910.13373 (full-lane reduce-scatter).
Plan HierarchicalReduceScatter(const Request& request, int32_t rank) {
  constexpr int64_t kSlots = 4;
  constexpr int64_t kSendSlots = 2;  // a put may still read one slot while the next sum is written to the other
  const RailPosition at(request.geometry, rank);
  const int64_t b = request.block_count;
  const int64_t chunks = NumChunks(b, request.chunk_count);
  const int64_t max_chunk = MaxChunk(b, chunks);
  const int64_t slots = std::min(kSlots, chunks);
  Builder plan(request, rank);

  const auto received = [&](int64_t c, int32_t from) { return (c % slots * at.nodes + from) * max_chunk; };
  const int64_t send_area = slots * at.nodes * max_chunk;
  int64_t sent = 0;
  const auto node_sum = [&](int64_t target, Range part, Place to) {
    std::vector<Place> sources;
    for (int32_t i = 0; i < at.locals; ++i) {
      sources.push_back(Builder::At(at.node * at.locals + i, Space::kInput, target * b + part.begin));
    }
    plan.Reduce(sources, to, part.count);
  };
  const auto scatter = [&](int64_t c) {
    const Range part = Subrange({0, b}, chunks, c);
    for (int32_t d = 1; d < at.nodes; ++d) {
      const int32_t peer = at.RailPeer(d);
      const Place sum = plan.Scratch(send_area + sent++ % kSendSlots * max_chunk);
      node_sum(peer, part, sum);
      plan.Move(sum, Builder::At(peer, Space::kScratch, received(c, at.node)), part.count);
      plan.Signal(peer);
    }
    node_sum(rank, part, plan.Scratch(received(c, at.node)));
  };
  const auto finish = [&](int64_t c) {
    const Range part = Subrange({0, b}, chunks, c);
    for (int32_t d = 1; d < at.nodes; ++d) plan.Wait(at.RailPeer(-d));
    std::vector<Place> sources;
    for (int32_t from = 0; from < at.nodes; ++from) sources.push_back(plan.Scratch(received(c, from)));
    plan.Reduce(sources, plan.Output(part.begin), part.count);
  };

  RunPipeline(chunks, {{0, scatter}, {1, finish}});
  return std::move(plan).Finish(send_area + std::min(kSendSlots, (at.nodes - 1) * chunks) * max_chunk);
}

}  // namespace

template <>
const std::vector<Algorithm>& Table<Collective::kReduceScatter>() {
  static const std::vector<Algorithm> table = {
      {"direct", "pytorch/pytorch:torch/csrc/distributed/c10d/intra_node_comm.cu (first half of two-shot)",
       kOneAddressSpace, DirectReduceScatter},
      {"recursive_halving", kThakur, kPowerOfTwoRanks, RecursiveHalvingReduceScatter},
      {"ring", "Patarasuk, Yuan, JPDC 69(2), 2009, doi 10.1016/j.jpdc.2008.09.002", kAnyGeometry, RingReduceScatter},
      {"hierarchical", kTraeff, kSeveralNodes, HierarchicalReduceScatter},
      {"ll", kNcclLl, kOneAddressSpace, DirectReduceScatter, Protocol::kLl},
      {"multimem", "NVIDIA/nccl:src/device/symmetric/reduce_scatter.cuh (multimem)", kOneNodeWithMultimem,
       DirectReduceScatter, Protocol::kMultimem},
  };
  return table;
}

}  // namespace jaxcomm
