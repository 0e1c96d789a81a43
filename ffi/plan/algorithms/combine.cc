// Plans of combine: rank r adds the rows that list r of every rank holds. The plans are those of a reduce_scatter over
// lists. The executor reads at run time which rows they are, and adds them in the order of the choices.
#include "plan/builder.h"
#include "plan/partition.h"
#include "plan/row_areas.h"

namespace jaxcomm {
namespace {

// Direct: reads the rows where they lie. Ranks that cannot be read put theirs into the scratch of the rank that adds
// them: n lists, which hold at most T K rows. n - 1 messages of b.
Plan DirectCombine(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  const int64_t b = request.block_count;
  Builder plan(request, rank);
  for (int32_t d = 1; d < n; ++d) {
    const int32_t home = (rank + d) % n;
    if (CanRead(request.geometry, home, rank)) continue;
    plan.Move(plan.Input(home * b), Builder::At(home, Space::kScratch, rank * b), b);
    plan.Signal(home);
  }
  std::vector<Place> sources;
  bool receives = false;
  for (int32_t from = 0; from < n; ++from) {
    if (CanRead(request.geometry, rank, from)) {
      sources.push_back(Builder::At(from, Space::kInput, rank * b));
      continue;
    }
    plan.Wait(from);
    sources.push_back(plan.Scratch(from * b));
    receives = true;
  }
  plan.Reduce(sources, plan.Output(0), b);
  return std::move(plan).Finish(receives ? n * b : 0);
}

// Hierarchical: local rank l of a node adds the rows of its node for each of its rail peers, and puts the sums to it.
// One row per token and node crosses between nodes. The rail peer first puts the lists of its choices: they say which
// rows belong to one token, and have the weights. They are moved to a second place, so that the plan shows when they
// are read. No area of scratch is used twice.
// Source: deepseek-ai/DeepEP:deep_ep/include/deep_ep/impls/hybrid_combine.cuh.
Plan HierarchicalCombine(const Request& request, int32_t rank) {
  const RailPosition at(request.geometry, rank);
  const int64_t b = request.block_count;
  Builder plan(request, rank);

  const RowAreas areas = {at.nodes};
  const auto area = [&](RowAreas::Area which, int32_t owner, int32_t other) {
    return areas.PlaceOf(which, owner, other) * b;
  };
  for (int32_t d = 1; d < at.nodes; ++d) {
    const int32_t peer = at.RailPeer(d);
    plan.Move(plan.Input(rank * b),
              Builder::At(peer, Space::kScratch, area(RowAreas::kReceivedLists, at.NodeAt(d), at.node)), b);
    plan.Signal(peer);
  }
  const auto add_rows = [&](int64_t list, std::vector<Place>* sources) {  // of this node
    for (int32_t i = 0; i < at.locals; ++i) {
      sources->push_back(Builder::At(at.node * at.locals + i, Space::kInput, list * b));
    }
  };
  for (int32_t d = at.nodes - 1; d > 0; --d) {
    const int32_t home = at.NodeAt(d), peer = at.RailPeer(d);
    plan.Wait(peer);
    plan.Move(plan.Scratch(area(RowAreas::kReceivedLists, at.node, home)),
              plan.Scratch(area(RowAreas::kLists, at.node, home)), b);
    std::vector<Place> sources;
    add_rows(peer, &sources);
    const Place sums = plan.Scratch(area(RowAreas::kSums, at.node, home));
    plan.Reduce(sources, sums, b);
    plan.Move(sums, Builder::At(peer, Space::kScratch, area(RowAreas::kReceivedSums, home, at.node)), b);
    plan.Signal(peer);
  }
  for (int32_t d = 1; d < at.nodes; ++d) plan.Wait(at.RailPeer(d));
  std::vector<Place> sources;
  for (int32_t from = 0; from < at.nodes; ++from) {
    if (from == at.node) {
      add_rows(rank, &sources);
    } else {
      sources.push_back(plan.Scratch(area(RowAreas::kReceivedSums, at.node, from)));
    }
  }
  plan.Reduce(sources, plan.Output(0), b);
  return std::move(plan).Finish(areas.Begin(RowAreas::kNumAreas) * b);
}

}  // namespace

template <>
const std::vector<Algorithm>& Table<Collective::kCombine>() {
  static const std::vector<Algorithm> table = {
      {"direct", "pytorch/pytorch:torch/csrc/distributed/c10d/intra_node_comm.cu (first half of two-shot)",
       kAnyGeometry, DirectCombine},
      {"hierarchical", "deepseek-ai/DeepEP:deep_ep/include/deep_ep/impls/hybrid_combine.cuh", kNetworkOfNodes,
       HierarchicalCombine},
  };
  return table;
}

}  // namespace jaxcomm
