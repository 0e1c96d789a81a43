// Traffic of a plan over each class of link, and its predicted time.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "plan/plan.h"

namespace jaxcomm {

enum class Link : uint8_t { kSelf, kNode, kNetwork };  // own memory, peers of the node, peers of other nodes
constexpr int kNumLinks = 3;

struct LinkModel {
  double overhead_s = 0;   // time that the sender spends on a step or a signal, in addition to its bytes
  double bytes_per_s = 1;  // of one rank, or of the shared link of a node
  double latency_s = 0;    // until the data reaches the peer; the sender does not wait for that
};

// kSelf and kNode: what one rank gets while all ranks of the group work at once.
struct Machine {
  std::array<LinkModel, kNumLinks> links;
  double launch_s = 0;  // once per call
  // Multiplies the time on kSelf and kNode. 1 if each rank has a processor of its own.
  double ranks_per_processor = 1;
  // The ranks of a node take turns on one link to other nodes. Otherwise each rank has a link of its own.
  bool shared_network = false;
  // Entry and exit barrier of a plan.
  double sync_overhead_s = 0;
  // Protocol::kLl, kLlTwoShot: messages to peers of the node. None: no LL for a request of this size.
  std::optional<LinkModel> ll;
  std::optional<LinkModel> ll_two_shot;
  // Copies, puts and gets inside the node run at once if none has more bytes and no signal comes between them: together
  // they take the largest overhead of one, and the time of the link that has most to do. Reductions of no more bytes
  // use the links at the same time, too, and consecutive signals take one overhead. 0: no two steps run at once. In a
  // group of several nodes, waits end such a row of steps as well.
  int64_t concurrent_bytes = 0;
  // Chunks between nodes are not larger: UCX needs a handshake for larger messages over TCP, and reshard keeps four
  // chunks per sender in buffers. 0: no limit.
  int64_t most_message_bytes = 0;
  // Peers access only an arena. Large operands pass through it in chunks (staging.h). Otherwise, a rank copies its
  // operand into it before a plan that reads operands of peers, and its result out of it after a plan that accesses
  // results of peers.
  bool arena = false;
};

struct Traffic {
  int64_t messages = 0;  // put, get, and one per remote operand of a reduce
  int64_t bytes = 0;     // moved by this rank: its puts, its gets and the remote operands of its reduces
  int64_t signals = 0;
};

struct Cost {
  std::array<Traffic, kNumLinks> traffic;
  int64_t steps = 0;
  int64_t scratch_bytes = 0;
  double time_s = 0;
  int32_t rank = 0;  // the rank whose traffic, steps and scratch these are
};

// The cost of one rank, under the assumption that all ranks do the same at the same time: its waits end when its own
// signals arrive.
Cost CostOf(const Plan& plan, const Geometry& geometry, int64_t item_bytes, const Machine& machine);

struct Algorithm;
// The link model of LL messages if `machine` executes the algorithm by LL; none otherwise.
const std::optional<LinkModel>& LlLink(const Algorithm& algorithm, const Machine& machine);
// The elements that a rank copies into an arena before the plan, and out of it after the plan, in a group of one node.
// A staged plan has steps for this instead.
struct ArenaCopies {
  int64_t before = 0;
  int64_t after = 0;
};
ArenaCopies CopiesOf(const Algorithm& algorithm, const Request& request);
// The bytes of both.
int64_t CopiedBytes(const Algorithm& algorithm, const Request& request, int64_t item_bytes);
// The cost of all ranks on `machine`: traffic, steps and scratch of the busiest rank, and the time until the last rank
// has finished. If the plans of all ranks have too many steps to simulate, the time comes from a sample of ranks.
Cost CostOf(const Algorithm& algorithm, const Request& request, int64_t item_bytes, const Machine& machine);

}  // namespace jaxcomm
