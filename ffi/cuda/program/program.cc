#include "cuda/program/program.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <set>

#include "cuda/program/packing.h"
#include "plan/channels.h"
#include "plan/partition.h"

namespace jaxcomm::cuda {
namespace {

struct Access {
  Place place;
  int64_t count;
  bool write;
};

bool Conflict(const Access& a, const Access& b) {
  return (a.write || b.write) && a.place.rank == b.place.rank && a.place.space == b.place.space &&
         a.place.offset < b.place.offset + b.count && b.place.offset < a.place.offset + a.count;
}

std::vector<Access> AccessesOf(const Plan& plan, const Step& step) {
  std::vector<Access> accesses = {{step.dst, step.count, true}};
  if (step.kind == StepKind::kReduce) {
    for (int32_t s = 0; s < step.num_sources; ++s) {
      accesses.push_back({plan.sources[step.first_source + s], step.count, false});
    }
  } else if (step.kind != StepKind::kZero) {
    accesses.push_back({step.src, step.count, false});
  }
  return accesses;
}

bool Synchronizes(StepKind kind) { return kind == StepKind::kSignal || kind == StepKind::kWait; }

// Marks consecutive signals, and consecutive waits, with different peers as steps that can run concurrently.
void Group(std::vector<ProgramStep>& steps) {
  for (size_t i = 0; i < steps.size();) {
    size_t end = i + 1;
    if (Synchronizes(steps[i].step.kind)) {
      std::set<int32_t> peers = {steps[i].step.peer};
      while (end < steps.size() && steps[end].step.kind == steps[i].step.kind && !steps[end].flush &&
             peers.insert(steps[end].step.peer).second) {
        ++end;
      }
    }
    steps[i].num_concurrent = static_cast<int32_t>(end - i);
    i = end;
  }
}

void AddBarrierSteps(std::vector<ProgramStep>& steps, PseudoStep phase, StepKind kind,
                     const std::vector<int32_t>& peers) {
  for (const int32_t peer : peers) {
    ProgramStep step;
    step.step.kind = kind;
    step.step.peer = peer;
    step.origin = phase;
    steps.push_back(step);
  }
}

// The ranks of other nodes that this rank puts to or receives puts from.
struct InterNodePuts {
  std::vector<int32_t> from_own, to_own;            // receivers of this rank's puts; senders of puts to this rank
  std::vector<int32_t> open_from_own, open_to_own;  // the subsets where no signal of the plan follows the last put
};

InterNodePuts FindInterNodePuts(const std::vector<Plan>& plans, const Geometry& geometry, int32_t own) {
  InterNodePuts found;
  for (const Plan& plan : plans) {
    std::map<int32_t, bool> open;  // by peer
    for (const Step& step : plan.steps) {
      if (IsInterNodePut(geometry, plan, step)) open[step.peer] = true;
      if (step.kind == StepKind::kSignal && open.count(step.peer) > 0) open[step.peer] = false;
    }
    for (const auto& [peer, is_open] : open) {
      if (plan.rank == own) {
        found.from_own.push_back(peer);
        if (is_open) found.open_from_own.push_back(peer);
      } else if (peer == own) {
        found.to_own.push_back(plan.rank);
        if (is_open) found.open_to_own.push_back(plan.rank);
      }
    }
  }
  return found;
}

// A put to another node whose source the network may not have read yet.
struct InterNodePut {
  int32_t peer;
  Access source;
};

bool Overwrites(const std::vector<Access>& accesses, const InterNodePut& put) {
  return std::any_of(accesses.begin(), accesses.end(),
                     [&](const Access& access) { return Conflict(access, put.source); });
}

// Finds the writes of other ranks to the memory of rank `own` that follow one of its signals. The key is the position
// in its plan of the last signal that precedes the write. Runs the plans in an arbitrary schedule, because the k-th
// wait always meets the k-th signal.
std::map<int32_t, std::vector<Access>> FindWritesBehindSignals(const std::vector<Plan>& plans, int32_t own) {
  std::map<int32_t, std::vector<Access>> found;
  std::vector<size_t> next(plans.size());
  std::vector<int32_t> behind(plans.size(), -1);  // by rank: the last signal of `own` that precedes its next step
  std::map<std::array<int32_t, 2>, std::deque<int32_t>> signals;  // from, to: the signal of `own` that precedes each
  // Runs the next step. False: the rank has to wait for another.
  const auto run = [&](const Plan& plan) {
    const auto index = static_cast<int32_t>(next[plan.rank]);
    const Step& step = plan.steps[index];
    if (step.kind == StepKind::kSignal) {
      signals[{plan.rank, step.peer}].push_back(plan.rank == own ? index : behind[plan.rank]);
    } else if (step.kind == StepKind::kWait) {
      std::deque<int32_t>& sent = signals[{step.peer, plan.rank}];
      if (sent.empty()) return false;
      behind[plan.rank] = std::max(behind[plan.rank], sent.front());
      sent.pop_front();
    } else if (plan.rank != own && step.dst.rank == own) {
      found[behind[plan.rank]].push_back({step.dst, step.count, true});
    }
    ++next[plan.rank];
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (const Plan& plan : plans) {
      while (next[plan.rank] < plan.steps.size() && run(plan)) moved = true;
    }
  }
  return found;
}

// Whether the network must have read the sources of outstanding puts before step `step`.
bool NeedsFlush(const Plan& plan, const Step& step, const std::vector<InterNodePut>& sending,
                const std::vector<Access>& behind) {
  if (step.kind == StepKind::kWait) return false;
  if (step.kind == StepKind::kSignal) {
    // The receiver of a signal already has the puts to it. But it may overwrite the source of an outstanding put to
    // another rank, or signal a rank that does.
    return std::any_of(sending.begin(), sending.end(),
                       [&](const InterNodePut& put) { return put.peer != step.peer && Overwrites(behind, put); });
  }
  const std::vector<Access> accesses = AccessesOf(plan, step);
  return std::any_of(sending.begin(), sending.end(),
                     [&](const InterNodePut& put) { return Overwrites(accesses, put); });
}

// The entries of the channel in NCCL's queues to other nodes, at most device::kMostEntries each. At the start of a
// program, the queues have nothing of the channel that matters: before its first put to a rank, this rank waits for the
// entry barrier of that rank, which has then received all earlier signals. A plan has few signals to a rank to which it
// puts nothing, and no flush shows that they have left; test_gin_queues.cc checks that they fit.
class Queues {
 public:
  // Whether `num_puts` more puts to `peer`, or one more signal, need a flush first.
  bool IsFull(int32_t peer, int64_t num_puts) {
    const Queue& queue = queues_[peer];
    if (queue.num_puts + num_puts > kMostPutsUnderWay) return true;
    const int64_t num_more = num_puts > 0 ? num_puts : 1;
    return queue.covered + queue.num_signals + num_more > device::kMostEntries;
  }

  void Add(int32_t peer, int64_t num_puts) {
    Queue& queue = queues_[peer];
    if (num_puts == 0) {
      ++queue.num_signals;
      return;
    }
    queue.num_puts += num_puts;
    queue.covered += queue.num_signals + num_puts;
    queue.num_signals = 0;
  }

  // Entries leave in order, so those in front of a put have left with it. Signals behind the last put may remain.
  void Flush() {
    for (auto& [peer, queue] : queues_) queue.num_puts = queue.covered = 0;
  }

 private:
  struct Queue {
    int64_t num_puts = 0;     // since the last flush
    int64_t covered = 0;      // the entries up to the last put
    int64_t num_signals = 0;  // behind it
  };
  std::map<int32_t, Queue> queues_;  // by peer
};

// The most elements of a short move. Short moves that do not depend on each other run concurrently.
int64_t ShortMove(int64_t item_bytes) { return std::max<int64_t>(kConcurrentBytes / item_bytes, 1); }

// The steps of one channel's plan, with the entry and exit barriers. Of the other ranks' plans, only puts to other
// nodes and writes to this rank's memory matter. In a group of one node, the order is that of WaitsFirst.
std::vector<ProgramStep> StepsOf(const std::vector<Plan>& plans, const Request& request, const Fragments& fragments,
                                 int32_t rank, int64_t short_move) {
  const Plan& plan = plans[rank];
  const Geometry& geometry = request.geometry;
  const InterNodePuts inter_node = FindInterNodePuts(plans, geometry, rank);
  std::vector<int32_t> intra_node;
  for (int32_t local = 0; local < geometry.ranks_per_node; ++local) {
    const int32_t peer = geometry.node(plan.rank) * geometry.ranks_per_node + local;
    if (peer != plan.rank) intra_node.push_back(peer);
  }
  const auto other_node = [&](int32_t peer) { return geometry.node(peer) != geometry.node(plan.rank); };
  Queues queues;
  std::vector<ProgramStep> steps;
  // Barriers are needed only if the plan accesses memory. The condition is the same on all ranks.
  const bool moves = request.block_count > 0;
  if (moves) {
    AddBarrierSteps(steps, kEntryBarrier, StepKind::kSignal, intra_node);
    AddBarrierSteps(steps, kEntryBarrier, StepKind::kSignal, inter_node.to_own);
    AddBarrierSteps(steps, kEntryBarrier, StepKind::kWait, intra_node);
    AddBarrierSteps(steps, kEntryBarrier, StepKind::kWait, inter_node.from_own);
    for (const int32_t peer : inter_node.to_own) queues.Add(peer, 0);
  }
  std::vector<Access> open;           // accesses since the last barrier of the thread block
  std::vector<InterNodePut> sending;  // puts since the last flush
  std::map<int32_t, std::vector<Access>> behind;
  if (!inter_node.from_own.empty()) behind = FindWritesBehindSignals(plans, rank);
  for (const size_t i : WaitsFirst(plan, geometry.num_nodes == 1 ? short_move : 0)) {
    ProgramStep step;
    step.step = plan.steps[i];
    step.origin = static_cast<int32_t>(i);
    const int32_t peer = step.step.peer;
    const bool inter_node_put = IsInterNodePut(geometry, plan, step.step);
    const bool queued = inter_node_put || (step.step.kind == StepKind::kSignal && other_node(peer));
    const int64_t num_puts = inter_node_put ? fragments.MostPuts(step.step) : 0;
    step.flush = (!sending.empty() && NeedsFlush(plan, step.step, sending, behind[step.origin])) ||
                 (queued && queues.IsFull(peer, num_puts));
    if (step.flush) sending.clear();
    if (step.flush) queues.Flush();
    if (queued) queues.Add(peer, num_puts);
    if (inter_node_put) sending.push_back({peer, {step.step.src, step.step.count, false}});
    if (Synchronizes(step.step.kind)) {
      open.clear();
    } else {
      const std::vector<Access> accesses = AccessesOf(plan, step.step);
      for (const Access& access : accesses) {
        for (const Access& earlier : open) step.sync = step.sync || Conflict(access, earlier);
      }
      if (step.sync) open.clear();
      open.insert(open.end(), accesses.begin(), accesses.end());
    }
    steps.push_back(step);
  }
  if (moves) {
    AddBarrierSteps(steps, kExitBarrier, StepKind::kSignal, intra_node);
    for (const int32_t peer : inter_node.open_from_own) {
      AddBarrierSteps(steps, kExitBarrier, StepKind::kSignal, {peer});
      steps.back().flush = queues.IsFull(peer, 0);
      if (steps.back().flush) queues.Flush();
    }
    AddBarrierSteps(steps, kExitBarrier, StepKind::kWait, intra_node);
    AddBarrierSteps(steps, kExitBarrier, StepKind::kWait, inter_node.open_to_own);
  }
  Group(steps);
  return steps;
}

// Marks a step as flat and converts its offsets if blocks lie one after the other, and the step touches no more than
// one block of each buffer or the channel has all elements of the blocks.
void Flatten(const Fragments& fragments, ProgramStep& step, std::vector<Place>& sources) {
  if (Synchronizes(step.step.kind)) return;
  std::vector<Place*> places = {&step.step.dst};
  if (step.step.kind == StepKind::kReduce) {
    for (int32_t s = 0; s < step.step.num_sources; ++s) places.push_back(&sources[step.step.first_source + s]);
  } else if (step.step.kind != StepKind::kZero) {
    places.push_back(&step.step.src);
  }
  for (const Place* place : places) {
    if (!fragments.IsFlat(*place, step.step.count)) return;
  }
  step.flat = true;
  for (Place* place : places) place->offset = fragments.Position(*place);
}

// Marks consecutive short moves inside the node that run concurrently. Precondition: flat steps are marked.
void GroupMoves(std::vector<ProgramStep>& steps, const Geometry& geometry, int64_t short_move) {
  const auto fits = [&](const ProgramStep& step) {
    return IsMove(step.step.kind) && step.flat && step.step.count <= short_move &&
           geometry.node(step.step.dst.rank) == geometry.node(step.step.src.rank);
  };
  for (size_t i = 0; i < steps.size();) {
    size_t end = i + 1;
    int64_t most_count = steps[i].step.count;
    if (fits(steps[i])) {
      for (; end < steps.size() && fits(steps[end]) && !steps[end].sync && !steps[end].flush; ++end) {
        most_count = std::max(most_count, steps[end].step.count);
      }
      steps[i].num_concurrent = static_cast<int32_t>(end - i);
      for (size_t k = i; k < end; ++k) steps[k].longest_count = most_count;
    }
    i = end;
  }
}

// Records which buffers peers access and which the network reads.
void AddShares(const std::vector<Plan>& plans, const Geometry& geometry, RankProgram& program) {
  for (const Plan& plan : plans) {
    for (const Step& step : plan.steps) {
      if (Synchronizes(step.kind)) continue;
      for (const Access& access : AccessesOf(plan, step)) {
        if (access.place.rank == plan.rank && !IsInterNodePut(geometry, plan, step)) continue;
        program.shares_input = program.shares_input || access.place.space == Space::kInput;
        program.shares_output = program.shares_output || access.place.space == Space::kOutput;
      }
    }
  }
}

// The plans of all ranks, in rank order. A staged plan has many steps and depends on no other rank's, so the others
// stay empty.
std::vector<Plan> BuildNeeded(const Algorithm& algorithm, const Request& request, int32_t rank) {
  if (request.staged_count == 0) return BuildAll(algorithm, request);
  std::vector<Plan> plans(request.geometry.num_ranks());
  for (int32_t r = 0; r < request.geometry.num_ranks(); ++r) plans[r].rank = r;
  plans[rank] = BuildPlan(algorithm, request, rank);
  return plans;
}

}  // namespace

ChannelSlice SliceOf(int64_t buffer_count, int64_t block_count, Range range, int64_t contiguous_count) {
  ChannelSlice slice;
  slice.count = range.count;
  slice.begin = range.begin;
  slice.num_blocks = std::max<int64_t>(block_count > 0 ? buffer_count / block_count : 1, 1);
  slice.contiguous_count = contiguous_count > 0 ? contiguous_count : std::max<int64_t>(block_count, 1);
  return slice;
}

RankProgram MakeRankProgram(const Choice& choice, int64_t block_count, ContiguousCounts contiguous, int64_t item_bytes,
                            int32_t num_channels, int32_t rank, PackLimits limits) {
  RankProgram program;
  Request whole = choice.request;
  whole.block_count = block_count;
  // Data that channels with the same number of elements per block share.
  struct Built {
    int32_t first_step, num_steps, first_source;
    int64_t scratch_count;
  };
  std::map<int64_t, Built> built;
  for (int32_t c = 0; c < num_channels; ++c) {
    const Range range = ChannelRange(block_count, item_bytes, num_channels, c);
    if (built.count(range.count) == 0) {
      Request request = choice.request;
      request.block_count = range.count;
      const Fragments fragments(range.count, block_count, contiguous);
      PackedPlans packed = PackInterNodePuts(BuildNeeded(*choice.algorithm, request, rank), request.geometry, fragments,
                                             item_bytes, num_channels, limits);
      std::vector<Plan>& plans = packed.plans;
      std::vector<ProgramStep> steps;
      // A channel without elements would only signal. A barrier has none in any channel.
      if (range.count > 0 || block_count == 0) {
        steps = StepsOf(plans, request, fragments, rank, ShortMove(item_bytes));
      }
      for (ProgramStep& step : steps) {
        if (step.origin >= 0) step.origin = packed.origins[rank][step.origin];
      }
      AddShares(plans, request.geometry, program);
      Plan& plan = plans[rank];
      for (ProgramStep& step : steps) Flatten(fragments, step, plan.sources);
      GroupMoves(steps, request.geometry, ShortMove(item_bytes));
      int64_t scratch_count = 0;  // the same on all ranks: a rank addresses its own and its peers' scratch alike
      for (const Plan& any : plans) scratch_count = std::max(scratch_count, any.scratch_count);
      built[range.count] = {static_cast<int32_t>(program.steps.size()), static_cast<int32_t>(steps.size()),
                            static_cast<int32_t>(program.sources.size()), scratch_count};
      program.steps.insert(program.steps.end(), steps.begin(), steps.end());
      program.sources.insert(program.sources.end(), plan.sources.begin(), plan.sources.end());
    }
    const Built& found = built[range.count];
    ChannelProgram channel;
    channel.first_step = found.first_step;
    channel.num_steps = found.num_steps;
    channel.first_source = found.first_source;
    channel.input = SliceOf(InputCount(whole), block_count, range, contiguous.input);
    channel.output = SliceOf(OutputCount(whole), block_count, range, contiguous.output);
    channel.scratch_begin = program.scratch_count;
    program.channels.push_back(channel);
    const int64_t grain = std::max<int64_t>(kGrainBytes / item_bytes, 1);
    program.scratch_count += CeilDiv(found.scratch_count, grain) * grain;
  }
  return program;
}

}  // namespace jaxcomm::cuda
