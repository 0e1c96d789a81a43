// The time of a collective on a cluster.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"
#include "plan/algorithms.h"
#include "sim/topology.h"

namespace jaxcomm {

struct Bounds {
  double alpha_s = 0;      // without bytes
  double beta_s = 0;       // the bytes on the busiest link
  std::string bottleneck;  // that link
};

// Lower bounds on every algorithm of a collective, in closed form.
StatusOr<Bounds> BoundsOf(const Request& request, double item_bytes, const Cluster& cluster);

enum class Fidelity : uint8_t {
  kFolded,  // one rank for all ranks of equal role
  kFull,    // every rank
};

struct LinkLoad {
  std::string name;
  double bytes = 0;     // on the busiest link of this name
  double capacity = 0;  // bytes per second
};

// A transfer, or a wait for a signal, of a simulated rank.
struct TimelineEntry {
  int32_t rank = 0;
  int64_t ranks = 1;  // of equal role
  bool queued = false;
  std::string name;  // of the link that limits the transfer; "" for a wait
  double bytes = 0;
  double start_s = 0;
  double end_s = 0;
};

struct Simulation {
  double time_s = 0;
  Bounds bounds;      // of this plan; without launch and synchronization
  double wait_s = 0;  // mean time of a rank waiting for signals
  int64_t ranks_simulated = 0;
  int64_t num_ops = 0;          // simulated steps
  std::vector<LinkLoad> links;  // by utilisation, highest first
  std::vector<TimelineEntry> timeline;
};

// `request` is for one channel. All channels move equal slices at once, so `item_bytes` counts all of them together.
// Folding rounds blocks up to equal pieces where the plan divides them, and extends rings of few groups to long ones,
// unless a timeline is wanted. Fails if more than `max_steps` steps would have to be simulated. The timeline has at
// most `max_entries` entries.
StatusOr<Simulation> Simulate(const Algorithm& algorithm, Request request, double item_bytes, const Cluster& cluster,
                              Fidelity fidelity, int64_t max_steps, int64_t max_entries = 0);

}  // namespace jaxcomm
