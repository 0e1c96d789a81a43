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
  const Geometry& geometry = request.geometry;
  const int32_t nodes = geometry.num_nodes;
  const int32_t locals = geometry.ranks_per_node;
  const int32_t node = geometry.node(rank);
  const int32_t local = geometry.local(rank);
  const int64_t b = request.block_count;
  Builder plan(request, rank);

  // At a rank of node `at`: the scratch for the message from node `from`.
  const RowAreas areas = {nodes};
  const auto area = [&](int32_t at, int32_t from) { return areas.PlaceOf(at, from) * locals * b; };
  for (int32_t d = 1; d < nodes; ++d) {
    const int32_t target = (node + d) % nodes;
    const int32_t peer = target * locals + local;
    plan.Move(plan.Input(int64_t{target} * locals * b), Builder::At(peer, Space::kScratch, area(target, node)),
              locals * b);
    plan.Signal(peer);
  }
  for (int32_t i = 0; i < locals; ++i) {
    const int32_t peer = node * locals + (local + i) % locals;
    if (Pulls(geometry, rank, peer)) {
      plan.Move(Builder::At(peer, Space::kInput, rank * b), plan.Output(peer * b), b);
    } else {
      plan.Move(plan.Input(peer * b), Builder::At(peer, Space::kOutput, rank * b), b);
    }
  }
  for (int32_t d = 1; d < nodes; ++d) {
    const int32_t source = (node + nodes - d) % nodes;
    const int32_t rail = source * locals + local;
    plan.Wait(rail);
    for (int32_t i = 0; i < locals; ++i) {
      const int32_t peer = node * locals + (local + i) % locals;
      if (peer != rank && geometry.pull) {
        plan.Signal(peer);
      } else {
        plan.Move(plan.Scratch(area(node, source) + peer % locals * b), Builder::At(peer, Space::kOutput, rail * b), b);
      }
    }
    for (int32_t i = 1; i < locals && geometry.pull; ++i) {
      const int32_t other = (local + i) % locals;
      const int32_t peer = node * locals + other;
      plan.Wait(peer);
      plan.Move(Builder::At(peer, Space::kScratch, area(node, source) + local * b),
                plan.Output((int64_t{source} * locals + other) * b), b);
    }
  }
  return std::move(plan).Finish(int64_t{nodes - 1} * locals * b);
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
