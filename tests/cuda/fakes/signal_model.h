// A model of the signals and waits of kernels in which blocks stop: it finds the stuck blocks and their possible
// reports.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "virtual_ranks.h"

namespace jaxcomm {
namespace cuda {

using Block = std::pair<int32_t, int32_t>;  // rank, channel

// The point at which a thread block ends for good: it runs the calls before `call`, and `num_steps` steps of that call.
struct Stop {
  size_t call = 0;
  int32_t num_steps = 0;
};

// Calls in sequence, on the same counters.
using Calls = std::vector<VirtualRanks::Call>;

// Signals and waits of thread blocks that run until they are stuck. Counts that only grow order the blocks, so every
// schedule ends in the same state. A rank's next call begins when all of its blocks have ended the previous call. If
// one of them is stuck, it aborts, and the next call does nothing.
class Model {
 public:
  Model(int32_t num_ranks, int32_t num_channels) : num_ranks_(num_ranks), num_channels_(num_channels) {}

  // Runs `calls`, where the blocks in `stops` run only up to their stop. Stuck blocks never continue.
  void Run(const Calls& calls, const std::map<Block, Stop>& stops) {
    std::map<Block, Stop> at;  // the next call and step
    for (int32_t rank = 0; rank < num_ranks_; ++rank) {
      for (int32_t channel = 0; channel < num_channels_; ++channel) {
        if (stuck_.count({rank, channel}) == 0) at[{rank, channel}] = {};
      }
    }
    for (bool moved = true; moved;) {
      moved = false;
      for (auto& [block, next] : at) {
        while (!Done(calls, stops, block, next) && MayGoOn(calls, stops, at, block) && Advance(calls, block, next)) {
          moved = true;
        }
      }
    }
    for (const auto& [block, next] : at) {
      if (Done(calls, stops, block, next) || !MayGoOn(calls, stops, at, block)) continue;
      stuck_[block] = Missing(calls, block, next);
    }
  }

  // The possible reports of the threads of stuck blocks.
  const std::map<Block, std::vector<device::Report>>& stuck() const { return stuck_; }

 private:
  static const ChannelProgram& ProgramOf(const Calls& calls, const Block& block, const Stop& at) {
    return calls[at.call].args[block.first].channels[block.second];
  }
  static const ProgramStep* StepsOf(const Calls& calls, const Block& block, const Stop& at) {
    return calls[at.call].args[block.first].steps + ProgramOf(calls, block, at).first_step + at.num_steps;
  }

  static bool Done(const Calls& calls, const std::map<Block, Stop>& stops, const Block& block, const Stop& at) {
    if (at.call == calls.size()) return true;
    const auto stop = stops.find(block);
    return stop != stops.end() &&
           std::make_pair(at.call, at.num_steps) >= std::make_pair(stop->second.call, stop->second.num_steps);
  }

  // Whether no block of the rank is at a call before that of `block`.
  bool MayGoOn(const Calls& calls, const std::map<Block, Stop>& stops, const std::map<Block, Stop>& at,
               const Block& block) const {
    const size_t call = at.at(block).call;
    for (int32_t channel = 0; channel < num_channels_ && call > 0; ++channel) {
      const Block mate(block.first, channel);
      const auto found = at.find(mate);
      if (found == at.end() || (found->second.call < call && !Done(calls, stops, mate, found->second))) return false;
    }
    return true;
  }

  bool Advance(const Calls& calls, const Block& block, Stop& at) {
    const auto [rank, channel] = block;
    if (at.num_steps < ProgramOf(calls, block, at).num_steps) {
      const ProgramStep* steps = StepsOf(calls, block, at);
      if (steps->step.kind == StepKind::kWait && !Missing(calls, block, at).empty()) return false;
      for (int32_t k = 0; k < steps->num_concurrent; ++k) {
        const Step& step = steps[k].step;
        if (step.kind == StepKind::kSignal) ++signals_[{channel, rank, step.peer}];
        if (step.kind == StepKind::kWait) ++waits_[{channel, rank, step.peer}];
      }
      at.num_steps += steps->num_concurrent;
    }
    if (at.num_steps == ProgramOf(calls, block, at).num_steps) at = {at.call + 1, 0};
    return true;
  }

  std::vector<device::Report> Missing(const Calls& calls, const Block& block, const Stop& at) {
    const auto [rank, channel] = block;
    const ProgramStep* steps = StepsOf(calls, block, at);
    std::vector<device::Report> missing;
    for (int32_t k = 0; k < steps->num_concurrent; ++k) {
      device::Report report;
      report.state = device::Report::kComplete;
      report.call_id = calls[at.call].args[rank].comm.call_id;
      report.channel = channel;
      report.step = steps[k].origin;
      report.rank = rank;
      report.peer = steps[k].step.peer;
      report.expected = waits_[{channel, rank, report.peer}] + 1;
      report.seen = signals_[{channel, report.peer, rank}];
      if (report.seen < report.expected) missing.push_back(report);
    }
    return missing;
  }

  using Counter = std::tuple<int32_t, int32_t, int32_t>;  // channel, of rank, for peer
  const int32_t num_ranks_, num_channels_;
  std::map<Counter, uint64_t> signals_, waits_;
  std::map<Block, std::vector<device::Report>> stuck_;
};

}  // namespace cuda
}  // namespace jaxcomm
