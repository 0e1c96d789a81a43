// Levels of a cluster and comparisons of times, for the tests of the simulator.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "../../ffi/sim/topology.h"
#include "../check.h"
#include "../plan/written.h"

namespace jaxcomm {

inline void CheckClose(const std::string& what, double got, double expected, double relative = 1e-6) {
  const bool close = std::abs(got - expected) <= relative * std::abs(expected);
  if (!close) std::fprintf(stderr, "%s: %.12g, expected %.12g\n", what.c_str(), got, expected);
  CHECK(close);
}

// A step has an overhead of 0.4 us.
inline Level MakeLevel(const char* name, LevelKind kind, int64_t ranks, double bytes_per_s, double latency_s,
                       double taper = 1) {
  Level level;
  level.name = name;
  level.kind = kind;
  level.ranks = ranks;
  level.bytes_per_s = bytes_per_s;
  level.latency_s = latency_s;
  level.overhead_s = 4e-7;
  level.taper = taper;
  return level;
}

// The request of a call on GPUs whose nodes are the groups of level 0.
inline Request OnGpus(Collective collective, const Cluster& cluster, int64_t num_ranks, int64_t block_count,
                      int64_t chunk_count) {
  const int64_t locals = std::min(cluster.levels[0].ranks, num_ranks);
  Request request =
      Ask(collective, static_cast<int32_t>(num_ranks / locals), static_cast<int32_t>(locals), block_count, chunk_count);
  request.geometry.all_addressable = request.geometry.num_nodes == 1;
  request.geometry.pull = true;
  return request;
}

// The levels that the cost model sees: a domain without contention and a network.
inline Cluster ClusterOf(const Machine& machine, const Geometry& geometry) {
  const LinkModel& node = machine.links[static_cast<size_t>(Link::kNode)];
  const LinkModel& network = machine.links[static_cast<size_t>(Link::kNetwork)];
  Cluster cluster;
  cluster.self = machine.links[static_cast<size_t>(Link::kSelf)];
  cluster.launch_s = machine.launch_s;
  cluster.sync_overhead_s = machine.sync_overhead_s;
  cluster.concurrent_bytes = static_cast<double>(machine.concurrent_bytes);
  cluster.arena = machine.arena;
  Level inner;
  inner.name = "node";
  inner.ranks = geometry.ranks_per_node;
  inner.bytes_per_s = kUnlimited;
  inner.flow_bytes_per_s = node.bytes_per_s;
  inner.overhead_s = node.overhead_s;
  inner.latency_s = node.latency_s;
  cluster.levels.push_back(inner);
  if (geometry.num_nodes == 1) return cluster;
  Level outer;
  outer.name = "network";
  outer.kind = LevelKind::kFatTree;
  outer.ranks = geometry.num_ranks();
  outer.bytes_per_s = kUnlimited;
  outer.flow_bytes_per_s = network.bytes_per_s;
  outer.overhead_s = network.overhead_s;
  outer.latency_s = network.latency_s;
  cluster.levels.push_back(outer);
  return cluster;
}

}  // namespace jaxcomm
