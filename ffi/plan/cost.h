// What a plan moves over each class of link, and how long that should take.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "plan.h"

namespace jaxcomm {

enum class Link : uint8_t { kSelf, kNode, kNetwork };  // own memory, peers of the node, peers of other nodes
constexpr int kNumLinks = 3;

struct LinkModel {
  double overhead_s = 0;   // that the sender is busy with a step or a signal, beside its bytes
  double bytes_per_s = 1;  // of one rank, or of a node's shared link
  double latency_s = 0;    // until the peer has it, while the sender goes on
};

// self and node are as one rank sees them when all ranks of the group work at once.
struct Machine {
  std::array<LinkModel, kNumLinks> links;
  double launch_s = 0;  // once per call
  // Ranks that one processor works for: time on kSelf and kNode is multiplied by it. 1 where each rank has its own.
  double ranks_per_processor = 1;
  // The ranks of a node share one link to other nodes and take turns on it. If not, each has its own.
  bool shared_network = false;
  // What ranks do together before the first step of a plan and after the last.
  double sync_overhead_s = 0;
  // Protocol::kLl, kLlTwoShot: messages to peers of the node. None: not for a request of this size.
  std::optional<LinkModel> ll;
  std::optional<LinkModel> ll_two_shot;
};

struct Traffic {
  int64_t messages = 0;  // put, get, and one per remote operand of a reduce
  int64_t bytes = 0;     // initiated by this rank: put + got + remote operands of reduces
  int64_t signals = 0;
};

struct Cost {
  std::array<Traffic, kNumLinks> traffic;
  int64_t steps = 0;
  int64_t scratch_bytes = 0;
  double time_s = 0;
  int32_t rank = 0;  // whose traffic, steps and scratch these are
};

// One rank, as if all ranks did the same at the same time: its waits end when its own signals would arrive.
Cost CostOf(const Plan& plan, const Geometry& geometry, int64_t item_bytes, const Machine& machine);

// All ranks together, as `machine` carries out the algorithm: traffic, steps and scratch of the busiest rank, and the
// time until the last one has finished. Where the plans of all ranks are too many steps to simulate, the time comes
// from a sample of ranks.
struct Algorithm;
// How `machine` exchanges LL messages, if that is how it carries out the algorithm.
const std::optional<LinkModel>& LlLink(const Algorithm& algorithm, const Machine& machine);
Cost CostOf(const Algorithm& algorithm, const Request& request, int64_t item_bytes, const Machine& machine);

}  // namespace jaxcomm
