// Plans of dispatch: list j of rank r goes to list r of rank j. A list names rows, and the executor reads it at run
// time. A message to several ranks of a node carries a row once, even if several of its lists name it.
#include "plan/builder.h"
#include "plan/partition.h"
#include "plan/row_areas.h"

namespace jaxcomm {
namespace {

// Hierarchical: local rank l puts its lists for the ranks of each other node to its rail peer, which forwards them in
// the node. One row per token and node crosses between nodes. Each source node has its own area of scratch, so no
// signals are needed for free areas: (G - 1) L lists, which hold at most (G - 1) T rows.
// Where ranks of a node read from each other, the rail peer signals that a message has arrived, and the others read
// their rows from its scratch.
// Source: deepseek-ai/DeepEP:deep_ep/include/deep_ep/impls/hybrid_dispatch.cuh.
Plan HierarchicalDispatch(const Request& request, int32_t rank) {
  const RailPosition at(request.geometry, rank);
  const int64_t b = request.block_count;
  Builder plan(request, rank);

  // At a rank of node `at`: the scratch for the message from node `from`.
  const RowAreas areas = {at.nodes};
  const auto area = [&](int32_t receiver, int32_t from) { return areas.PlaceOf(receiver, from) * at.locals * b; };
  for (int32_t d = 1; d < at.nodes; ++d) {
    const int32_t target = at.NodeAt(d), peer = at.RailPeer(d);
    plan.Move(plan.Input(int64_t{target} * at.locals * b), Builder::At(peer, Space::kScratch, area(target, at.node)),
              at.locals * b);
    plan.Signal(peer);
  }
  for (int32_t i = 0; i < at.locals; ++i) {
    const int32_t peer = at.NodePeer(i);
    if (Pulls(request.geometry, rank, peer)) {
      plan.Move(Builder::At(peer, Space::kInput, rank * b), plan.Output(peer * b), b);
    } else {
      plan.Move(plan.Input(peer * b), Builder::At(peer, Space::kOutput, rank * b), b);
    }
  }
  for (int32_t d = 1; d < at.nodes; ++d) {
    const int32_t source = at.NodeAt(-d), rail = at.RailPeer(-d);
    plan.Wait(rail);
    for (int32_t i = 0; i < at.locals; ++i) {
      const int32_t peer = at.NodePeer(i);
      if (peer != rank && request.geometry.pull) {
        plan.Signal(peer);
      } else {
        plan.Move(plan.Scratch(area(at.node, source) + peer % at.locals * b),
                  Builder::At(peer, Space::kOutput, rail * b), b);
      }
    }
    for (int32_t i = 1; i < at.locals && request.geometry.pull; ++i) {
      const int32_t peer = at.NodePeer(i);
      plan.Wait(peer);
      plan.Move(Builder::At(peer, Space::kScratch, area(at.node, source) + at.local * b),
                plan.Output((int64_t{source} * at.locals + peer % at.locals) * b), b);
    }
  }
  return std::move(plan).Finish(int64_t{at.nodes - 1} * at.locals * b);
}

}  // namespace

template <>
const std::vector<Algorithm>& Table<Collective::kDispatch>() {
  static const std::vector<Algorithm> table = {
      *FindAlgorithm(Collective::kAllToAll, "direct"),
      {"hierarchical", "deepseek-ai/DeepEP:deep_ep/include/deep_ep/impls/hybrid_dispatch.cuh", kNetworkOfNodes,
       HierarchicalDispatch},
  };
  return table;
}

}  // namespace jaxcomm
