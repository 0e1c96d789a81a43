// Builds the plan of one rank. Enforces rules of plan.h: no empty data step, the right kind of step for each pair of
// places. RunPipeline() orders the stages of a pipelined plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#include "plan/plan.h"

namespace jaxcomm {

class Builder {
 public:
  Builder(const Request& request, int32_t rank);

  Place Input(int64_t offset) const { return {rank_, Space::kInput, offset}; }
  Place Output(int64_t offset) const { return {rank_, Space::kOutput, offset}; }
  Place Scratch(int64_t offset) const { return {rank_, Space::kScratch, offset}; }
  static Place At(int32_t peer, Space space, int64_t offset) { return {peer, space, offset}; }

  // Makes room for this many steps and operands of reductions. A plan may have more.
  void Reserve(int64_t steps, int64_t sources);
  // dst = src: a copy, put or get, depending on the ranks of src and dst. No step if count is 0 or src and dst are the
  // same place.
  void Move(Place src, Place dst, int64_t count);
  // dst = sources[0] op sources[1] ...; dst is in this rank's memory.
  void Reduce(const std::vector<Place>& sources, Place dst, int64_t count);
  void Zero(Place dst, int64_t count);
  void Signal(int32_t peer);
  void Wait(int32_t peer);

  // Returns the plan. scratch_count: elements of scratch at every rank.
  Plan Finish(int64_t scratch_count) &&;

 private:
  int32_t rank_;
  Plan plan_;
};

// One stage of a pipeline: `run(i)` adds the steps for item i, `delay` items behind the first stage.
struct PipelineStage {
  int64_t delay = 0;
  std::function<void(int64_t item)> run;
};

// Runs every stage for every item 0 .. num_items - 1. In iteration t, a stage of delay d handles item t - d. Within an
// iteration, the stages run in the order of the list. So a stage issues item i + d before the stage d behind it waits
// for item i.
inline void RunPipeline(int64_t num_items, std::initializer_list<PipelineStage> stages) {
  int64_t last_delay = 0;
  for (const PipelineStage& stage : stages) last_delay = std::max(last_delay, stage.delay);
  for (int64_t t = 0; num_items > 0 && t < num_items + last_delay; ++t) {
    for (const PipelineStage& stage : stages) {
      const int64_t item = t - stage.delay;
      if (item >= 0 && item < num_items) stage.run(item);
    }
  }
}

}  // namespace jaxcomm
