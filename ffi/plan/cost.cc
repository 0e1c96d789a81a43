// The cost model. docs/internals/cost-model.md describes it.
#include "plan/cost.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <unordered_map>
#include <utility>

#include "plan/algorithms.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

// Limit on the steps of all ranks in a simulation: a few milliseconds and some ten megabytes. Chains and trees have a
// few steps per rank on average; at least without data, they are simulated for any number of ranks.
constexpr size_t kMaxSteps = 1 << 19;
constexpr size_t kMaxStepsPerRank = 8;

// The times at which the processor and the network link of a rank become free.
struct RankTime {
  double processor_s = 0;
  double network_s = 0;
  double work_s = 0;                                // time of the processor without waits
  double overhead_s = 0;                            // of the moves that run at once
  std::array<double, kNumLinks> concurrent_s = {};  // time on each link of the steps that run at once
  double signals_s = 0;                             // overhead of the signals that run at once

  void EndConcurrent() {
    overhead_s = 0;
    concurrent_s = {};
  }
};

class Model {
 public:
  Model(const Geometry& geometry, int64_t item_bytes, const Machine& machine, double slowdown)
      : geometry_(geometry), item_bytes_(item_bytes), machine_(machine), slowdown_(slowdown) {}

  size_t LinkOf(int32_t rank, int32_t peer) const {
    if (peer == rank) return static_cast<size_t>(Link::kSelf);
    const bool intra_node = geometry_.node(peer) == geometry_.node(rank);
    return static_cast<size_t>(intra_node ? Link::kNode : Link::kNetwork);
  }

  bool SharesLinks() const {
    return machine_.shared_network && geometry_.ranks_per_node > 1 && geometry_.num_nodes > 1 &&
           !geometry_.all_addressable;
  }
  // The number of the link to other nodes that a rank uses.
  size_t LinkNumber(int32_t rank) const { return static_cast<size_t>(SharesLinks() ? geometry_.node(rank) : rank); }

  // The processor itself moves addressable data, also across nodes.
  bool OnProcessor(size_t link) const {
    return geometry_.all_addressable || link != static_cast<size_t>(Link::kNetwork);
  }

  // Adds the bytes and messages of a data step to `traffic`, by link.
  void Moves(const Plan& plan, const Step& step, std::array<Traffic, kNumLinks>* traffic) const {
    const auto move = [&](int32_t peer) {
      Traffic& moved = (*traffic)[LinkOf(plan.rank, peer)];
      ++moved.messages;
      moved.bytes += step.count * item_bytes_;
    };
    if (step.kind != StepKind::kReduce) return move(step.peer >= 0 ? step.peer : plan.rank);
    for (int32_t i = 0; i < step.num_sources; ++i) {
      move(plan.sources[static_cast<size_t>(step.first_source + i)].rank);
    }
  }

  // `link_s`: the time at which the link to other nodes becomes free.
  void RunData(const Plan& plan, const Step& step, RankTime* times, double* link_s) const {
    std::array<Traffic, kNumLinks> traffic;
    Moves(plan, step, &traffic);
    times->signals_s = 0;
    const bool is_short = step.count * item_bytes_ <= machine_.concurrent_bytes;
    if (!is_short) times->EndConcurrent();
    for (size_t link = 0; link < kNumLinks; ++link) {
      if (traffic[link].messages == 0) continue;
      double overhead_s = machine_.links[link].overhead_s;
      double transfer_s = static_cast<double>(traffic[link].bytes) / machine_.links[link].bytes_per_s;
      if (is_short && OnProcessor(link)) {
        if (IsMove(step.kind)) {
          overhead_s = std::max(overhead_s - times->overhead_s, 0.0);
          times->overhead_s += overhead_s;
        }
        const auto longest = [&] { return *std::max_element(times->concurrent_s.begin(), times->concurrent_s.end()); };
        const double before_s = longest();
        times->concurrent_s[link] += transfer_s;
        transfer_s = longest() - before_s;
      }
      Use(link, overhead_s + transfer_s, times, link_s);
    }
  }

  // Moves after the wait do not run at once with those before it.
  void EndWait(RankTime* times) const {
    times->signals_s = 0;
    if (geometry_.num_nodes > 1) times->EndConcurrent();
  }

  // Returns the time at which the peer gets the signal.
  double RunSignal(const Plan& plan, const Step& step, RankTime* times, double* link_s) const {
    const size_t link = LinkOf(plan.rank, step.peer);
    times->EndConcurrent();
    double overhead_s = machine_.links[link].overhead_s;
    if (machine_.concurrent_bytes > 0 && OnProcessor(link)) {  // by a thread each
      overhead_s = std::max(overhead_s - times->signals_s, 0.0);
      times->signals_s += overhead_s;
    }
    return Use(link, overhead_s, times, link_s) + machine_.links[link].latency_s;
  }

 private:
  double Use(size_t link, double time_s, RankTime* times, double* link_s) const {
    if (OnProcessor(link)) {
      times->work_s += time_s * slowdown_;
      return times->processor_s += time_s * slowdown_;
    }
    // The processor only starts the transfer. The link finishes earlier transfers first.
    *link_s = std::max(*link_s, times->processor_s) + time_s;
    return times->network_s = *link_s;
  }

  const Geometry& geometry_;
  int64_t item_bytes_;
  const Machine& machine_;
  double slowdown_;
};

Cost Count(const Plan& plan, const Model& model, int64_t item_bytes) {
  Cost cost;
  cost.steps = static_cast<int64_t>(plan.steps.size());
  cost.scratch_bytes = plan.scratch_count * item_bytes;
  for (const Step& step : plan.steps) {
    if (step.kind == StepKind::kSignal) {
      ++cost.traffic[model.LinkOf(plan.rank, step.peer)].signals;
    } else if (step.kind != StepKind::kWait) {
      model.Moves(plan, step, &cost.traffic);
    }
  }
  return cost;
}

double End(const RankTime& times) { return std::max(times.processor_s, times.network_s); }

// The latency of a rank's last message, which follows its data, to the other nodes.
double LastWord(const Geometry& geometry, const Machine& machine) {
  const bool apart = geometry.num_nodes > 1 && !geometry.all_addressable;
  return apart ? machine.links[static_cast<size_t>(Link::kNetwork)].latency_s : 0;
}

// Simulates all ranks, each on its own processor.
std::vector<RankTime> Simulate(const std::vector<Plan>& plans, const Model& model) {
  struct Channel {
    std::vector<double> arrivals_s;
    size_t received = 0;
    bool waits = false;
  };
  const size_t n = plans.size();
  std::unordered_map<uint64_t, Channel> channels;
  std::vector<RankTime> times(n);
  std::vector<size_t> next(n, 0);
  std::vector<double> links_s(n, 0);  // by rank, or by node if its ranks share a link
  // If ranks share a link, the rank with the earliest time runs next, so that they use the link in order of time. A
  // rank whose wait is not satisfied gets its next turn with the signal.
  using Turn = std::pair<double, size_t>;
  std::priority_queue<Turn, std::vector<Turn>, std::greater<Turn>> turns;
  for (size_t rank = 0; rank < n; ++rank) turns.push({0, rank});
  while (!turns.empty()) {
    const size_t rank = turns.top().second;
    turns.pop();
    const std::vector<Step>& steps = plans[rank].steps;
    double& now_s = times[rank].processor_s;
    double& link_s = links_s[model.LinkNumber(plans[rank].rank)];
    for (size_t& i = next[rank]; i < steps.size(); ++i) {
      if (model.SharesLinks() && !turns.empty() && now_s > turns.top().first) {
        turns.push({now_s, rank});
        break;
      }
      const auto peer = static_cast<size_t>(steps[i].peer);
      if (steps[i].kind == StepKind::kWait) {
        Channel& channel = channels[peer * n + rank];
        channel.waits = channel.received == channel.arrivals_s.size();
        if (channel.waits) break;
        now_s = std::max(now_s, channel.arrivals_s[channel.received++]);
        model.EndWait(&times[rank]);
      } else if (steps[i].kind == StepKind::kSignal) {
        Channel& channel = channels[rank * n + peer];
        channel.arrivals_s.push_back(model.RunSignal(plans[rank], steps[i], &times[rank], &link_s));
        if (std::exchange(channel.waits, false)) turns.push({times[peer].processor_s, peer});
      } else {
        model.RunData(plans[rank], steps[i], &times[rank], &link_s);
      }
    }
  }
  return times;
}

// The time of the link that receives the most bytes. Ranks of a reshard may receive more than any rank sends.
double ReceiveTime(const std::vector<Plan>& plans, const Model& model, int64_t item_bytes, const Machine& machine) {
  constexpr auto kNetwork = static_cast<size_t>(Link::kNetwork);
  std::vector<int64_t> received(plans.size(), 0);  // elements, by link
  for (const Plan& plan : plans) {
    for (const Step& step : plan.steps) {
      const bool put = step.kind == StepKind::kPut && step.peer >= 0;
      if (!put || model.LinkOf(plan.rank, step.peer) != kNetwork || model.OnProcessor(kNetwork)) continue;
      received[model.LinkNumber(step.peer)] += step.count;
    }
  }
  const int64_t most = *std::max_element(received.begin(), received.end());
  return static_cast<double>(most * item_bytes) / machine.links[kNetwork].bytes_per_s;
}

// The same machine, but each rank has its own share of the network link of its node.
Machine Divided(Machine machine, const Geometry& geometry) {
  const bool shares = Model(geometry, 0, machine, 1).SharesLinks();
  if (shares) machine.links[static_cast<size_t>(Link::kNetwork)].bytes_per_s /= geometry.ranks_per_node;
  return machine;
}

// Simulates one rank among equal ranks: the i-th wait on a link ends when its own i-th signal over that link arrives.
RankTime SimulateOne(const Plan& plan, const Model& model) {
  std::array<std::vector<double>, kNumLinks> arrivals_s;
  std::array<size_t, kNumLinks> received = {};
  RankTime times;
  double link_s = 0;
  for (const Step& step : plan.steps) {
    if (step.kind == StepKind::kWait) {
      const size_t link = model.LinkOf(plan.rank, step.peer);
      if (received[link] < arrivals_s[link].size()) {
        times.processor_s = std::max(times.processor_s, arrivals_s[link][received[link]++]);
      }
      model.EndWait(&times);
    } else if (step.kind == StepKind::kSignal) {
      arrivals_s[model.LinkOf(plan.rank, step.peer)].push_back(model.RunSignal(plan, step, &times, &link_s));
    } else {
      model.RunData(plan, step, &times, &link_s);
    }
  }
  return times;
}

// The rank with the most messages to other nodes.
int32_t BusiestSource(const Request& request) {
  std::vector<int32_t> sent(static_cast<size_t>(request.geometry.num_ranks()), 0);
  for (size_t r = 0; r < sent.size(); ++r) {
    const int32_t source = request.source_of[r];
    const bool inter_node =
        source >= 0 && request.geometry.node(source) != request.geometry.node(static_cast<int32_t>(r));
    if (inter_node) ++sent[static_cast<size_t>(source)];
  }
  return static_cast<int32_t>(std::max_element(sent.begin(), sent.end()) - sent.begin());
}

// A sample that includes the ends of chains, the roots of trees and their neighbours, which differ from other ranks.
std::vector<int32_t> SampleRanks(const Request& request) {
  const int32_t n = request.geometry.num_ranks();
  const CollectiveTraits& traits = TraitsOf(request.collective);
  int32_t root = traits.TakesRoot() ? request.root : 0;
  if (traits.TakesPermutation()) root = BusiestSource(request);
  std::vector<int32_t> ranks;
  for (int32_t distance : {0, 1, n / 2, n - 1}) ranks.push_back((root + distance) % n);
  return ranks;
}

// A reduction takes time and memory for each of its operands.
size_t Length(const Plan& plan) { return plan.steps.size() + plan.sources.size(); }

// The plans of all ranks; none if they have too many steps or take too long to make. (Making one plan of a permutation
// takes time proportional to the number of ranks.) `sampled`: lengths of the plans of a sample.
std::vector<Plan> BuildWithinLimit(const Algorithm& algorithm, const Request& request, std::vector<size_t> sampled) {
  constexpr int32_t kMaxPermuted = 1 << 13;
  const int32_t n = request.geometry.num_ranks();
  if (TraitsOf(request.collective).TakesPermutation() && n > kMaxPermuted) return {};
  const size_t max_steps = std::max(kMaxSteps, kMaxStepsPerRank * static_cast<size_t>(n));
  // Stops early if all but one plan of the sample have far too many steps.
  std::sort(sampled.begin(), sampled.end());
  if (sampled[1] > 2 * max_steps / static_cast<size_t>(n)) return {};
  std::vector<Plan> plans;
  size_t num_steps = 0;
  for (int32_t rank = 0; rank < n; ++rank) {
    plans.push_back(BuildPlan(algorithm, request, rank));
    num_steps += Length(plans.back());
    if (num_steps > max_steps) return {};
  }
  return plans;
}

// The plan in the order in which its steps run.
Plan InOrder(Plan plan, const Geometry& geometry, int64_t item_bytes, const Machine& machine) {
  if (geometry.num_nodes > 1 || machine.concurrent_bytes == 0) return plan;
  std::vector<Step> steps;
  for (const size_t i : WaitsFirst(plan, machine.concurrent_bytes / std::max<int64_t>(item_bytes, 1)))
    steps.push_back(plan.steps[i]);
  plan.steps = std::move(steps);
  return plan;
}

// Each rank sends a block to every peer. `twice`: two such exchanges, each of one n-th of a block.
Cost CostOfExchange(const Request& request, int64_t item_bytes, const Machine& machine, const LinkModel& link,
                    bool twice) {
  Cost cost;
  const int64_t n = request.geometry.num_ranks(), exchanges = twice ? 2 : 1;
  const int64_t count = twice ? CeilDiv(request.block_count, n) : request.block_count;
  Traffic& traffic = cost.traffic[static_cast<size_t>(Link::kNode)];
  traffic.messages = exchanges * (n - 1);
  traffic.bytes = traffic.messages * count * item_bytes;
  const double latencies_s = static_cast<double>(n > 1 ? exchanges : 0) * link.latency_s;
  cost.time_s = machine.launch_s + latencies_s + static_cast<double>(traffic.messages) * link.overhead_s +
                static_cast<double>(traffic.bytes) / link.bytes_per_s;
  return cost;
}

}  // namespace

const std::optional<LinkModel>& LlLink(const Algorithm& algorithm, const Machine& machine) {
  static const std::optional<LinkModel> none;
  if (algorithm.protocol == Protocol::kLl) return machine.ll;
  return algorithm.protocol == Protocol::kLlTwoShot ? machine.ll_two_shot : none;
}

Cost CostOf(const Plan& plan, const Geometry& geometry, int64_t item_bytes, const Machine& machine) {
  const Machine divided = Divided(machine, geometry);
  const Model model(geometry, item_bytes, divided, machine.ranks_per_processor);
  Cost cost = Count(plan, model, item_bytes);
  cost.time_s = machine.launch_s + machine.sync_overhead_s +
                End(SimulateOne(InOrder(plan, geometry, item_bytes, machine), model)) + LastWord(geometry, machine);
  return cost;
}

ArenaCopies CopiesOf(const Algorithm& algorithm, const Request& request) {
  if (request.geometry.num_nodes > 1 || request.block_count == 0 || request.staged_count > 0) return {};
  // Kernels copy the rows of tokens, whose number is not in the request.
  const CollectiveTraits& traits = TraitsOf(request.collective);
  if (traits.elements == ElementKind::kTokens) return {};
  // Which buffers peers access does not depend on the size. The root of a broadcast and its neighbours are in a sample.
  Request small = request;
  small.block_count = std::min<int64_t>(request.block_count, request.geometry.num_ranks());
  small.chunk_count = 0;
  bool input = false, output = false;
  std::vector<int32_t> sample = SampleRanks(small);
  if (traits.TakesPermutation()) {
    // Pairs may leave out the ranks of the sample, so it needs a pair.
    for (int32_t r = 0; r < request.geometry.num_ranks(); ++r) {
      if (request.source_of[r] < 0 || request.source_of[r] == r) continue;
      sample.insert(sample.end(), {r, request.source_of[r]});
      break;
    }
  }
  for (const int32_t sampled : sample) {
    const Plan plan = BuildPlan(algorithm, small, sampled);
    const auto add = [&](const Place& place) {
      if (place.rank == plan.rank) return;
      input = input || place.space == Space::kInput;
      output = output || place.space == Space::kOutput;
    };
    for (const Step& step : plan.steps) {
      if (step.kind == StepKind::kSignal || step.kind == StepKind::kWait) continue;
      add(step.dst);
      if (IsMove(step.kind)) add(step.src);
      for (int32_t s = 0; s < step.num_sources; ++s) add(plan.sources[static_cast<size_t>(step.first_source + s)]);
    }
  }
  return {input ? InputCount(request) : 0, output ? OutputCount(request) : 0};
}

int64_t CopiedBytes(const Algorithm& algorithm, const Request& request, int64_t item_bytes) {
  const ArenaCopies copies = CopiesOf(algorithm, request);
  return (copies.before + copies.after) * item_bytes;
}

Cost CostOf(const Algorithm& algorithm, const Request& request, int64_t item_bytes, const Machine& machine) {
  if (const auto& link = LlLink(algorithm, machine)) {
    return CostOfExchange(request, item_bytes, machine, *link, algorithm.protocol == Protocol::kLlTwoShot);
  }
  const Model model(request.geometry, item_bytes, machine, 1);
  const Machine divided = Divided(machine, request.geometry);
  const Model alone(request.geometry, item_bytes, divided, 1);
  std::vector<RankTime> times;
  std::vector<Cost> counted;  // of the sample
  std::vector<size_t> sampled;
  // One plan at a time: that of a ring has as many steps as there are ranks.
  for (const int32_t rank : SampleRanks(request)) {
    const Plan plan = InOrder(BuildPlan(algorithm, request, rank), request.geometry, item_bytes, machine);
    sampled.push_back(Length(plan));
    counted.push_back(Count(plan, model, item_bytes));
    counted.back().rank = rank;
    times.push_back(SimulateOne(plan, alone));
  }
  double least_s = 0;
  std::vector<Plan> plans = BuildWithinLimit(algorithm, request, sampled);
  if (!plans.empty()) {
    for (Plan& plan : plans) plan = InOrder(std::move(plan), request.geometry, item_bytes, machine);
    times = Simulate(plans, model);
    least_s = ReceiveTime(plans, model, item_bytes, machine);
  } else {
    // A sample does not show the length of a chain or the depth of a tree of ranks. The same plan without data does.
    Request skeleton = request;
    skeleton.block_count = std::min<int64_t>(request.block_count, 1);
    skeleton.chunk_count = 0;
    sampled.clear();
    for (const int32_t rank : SampleRanks(skeleton)) {
      sampled.push_back(Length(BuildPlan(algorithm, skeleton, rank)));
    }
    for (const RankTime& rank : Simulate(BuildWithinLimit(algorithm, skeleton, sampled), model)) {
      least_s = std::max(least_s, End(rank));
    }
  }

  size_t busiest = 0;
  double end_s = least_s;
  double work_s = 0;
  const auto effort = [&](size_t i) { return times[i].work_s + times[i].network_s; };
  for (size_t i = 0; i < times.size(); ++i) {
    end_s = std::max(end_s, End(times[i]));
    work_s += times[i].work_s / static_cast<double>(times.size());
    if (effort(i) > effort(busiest)) busiest = i;
  }
  Cost cost = plans.empty() ? counted[busiest] : Count(plans[busiest], model, item_bytes);
  cost.rank = plans.empty() ? counted[busiest].rank : plans[busiest].rank;
  // Ranks that share a processor take turns. The time is that of all their work, but at least that of the dependent
  // steps.
  cost.time_s = machine.launch_s + machine.sync_overhead_s + std::max(end_s, work_s * machine.ranks_per_processor) +
                LastWord(request.geometry, machine);
  if (machine.arena) {
    Traffic& own = cost.traffic[static_cast<size_t>(Link::kSelf)];
    const int64_t copied = CopiedBytes(algorithm, request, item_bytes);
    own.bytes += copied;
    cost.time_s += static_cast<double>(copied) / machine.links[static_cast<size_t>(Link::kSelf)].bytes_per_s;
  }
  return cost;
}

}  // namespace jaxcomm
