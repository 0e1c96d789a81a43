// Plans of barrier: no rank ends before every rank has begun.
#include "plan/builder.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

// Direct: every rank signals every other. n - 1 signals, one round.
// Source: Hoefler, Mehlan, Mietke, Rehm, "A survey of barrier algorithms", Chemnitzer Informatik-Berichte, 2004.
Plan DirectBarrier(const Request& request, int32_t rank) {
  const int32_t n = request.geometry.num_ranks();
  Builder plan(request, rank);
  for (int32_t s = 1; s < n; ++s) plan.Signal((rank + s) % n);
  for (int32_t s = 1; s < n; ++s) plan.Wait((rank + n - s) % n);
  return std::move(plan).Finish(0);
}

// The rounds of the dissemination barrier over `n` members. This rank is member `v`, and member u is rank of(u).
template <typename RankOf>
void Disseminate(Builder& plan, int32_t v, int32_t n, RankOf of) {
  for (int64_t bit = 1; bit < n; bit <<= 1) {
    plan.Signal(of(static_cast<int32_t>((v + bit) % n)));
    plan.Wait(of(static_cast<int32_t>((v + n - bit) % n)));
  }
}

// Dissemination: in round k, rank r signals r + 2^k. ceil(log2 n) signals and rounds.
// Source: Hensgen, Finkel, Manber, IJPP 17(1), 1988, doi 10.1007/BF01379320.
Plan DisseminationBarrier(const Request& request, int32_t rank) {
  Builder plan(request, rank);
  Disseminate(plan, rank, request.geometry.num_ranks(), [](int32_t u) { return u; });
  return std::move(plan).Finish(0);
}

// Hierarchical: every rank signals local rank 0 of its node, the nodes run a dissemination barrier over one rail, and
// local rank 0 signals the ranks of its node.
// ceil(log2 G) signals between nodes per node. Source: Traeff, Hunold, IEEE Cluster 2020, arXiv:1910.13373.
Plan HierarchicalBarrier(const Request& request, int32_t rank) {
  const Geometry& geometry = request.geometry;
  const int32_t locals = geometry.ranks_per_node;
  const int32_t leader = geometry.node(rank) * locals;
  Builder plan(request, rank);
  if (rank != leader) {
    plan.Signal(leader);
    plan.Wait(leader);
  } else {
    for (int32_t i = 1; i < locals; ++i) plan.Wait(leader + i);
    Disseminate(plan, geometry.node(rank), geometry.num_nodes, [&](int32_t node) { return node * locals; });
    for (int32_t i = 1; i < locals; ++i) plan.Signal(leader + i);
  }
  return std::move(plan).Finish(0);
}

}  // namespace

template <>
const std::vector<Algorithm>& Table<Collective::kBarrier>() {
  static const std::vector<Algorithm> table = {
      {"direct", "Hoefler, Mehlan, Mietke, Rehm, Chemnitzer Informatik-Berichte, 2004", kAnyGeometry, DirectBarrier},
      {"dissemination", "Hensgen, Finkel, Manber, IJPP 17(1), 1988, doi 10.1007/BF01379320", kAnyGeometry,
       DisseminationBarrier},
      {"hierarchical", kTraeff, kSeveralNodes, HierarchicalBarrier},
  };
  return table;
}

}  // namespace jaxcomm
