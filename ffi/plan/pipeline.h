// The order of the stages of a pipelined plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <initializer_list>

namespace jaxcomm {

// One stage of a pipeline: `run(i)` writes the steps for item i, `delay` items behind the first stage.
struct PipelineStage {
  int64_t delay = 0;
  std::function<void(int64_t item)> run;
};

// Runs every stage for every item 0 .. num_items - 1. In step t, a stage of delay d handles item t - d; within a step
// the stages run in the order of the list. So a stage issues item i + d before the stage d behind it waits for item i.
inline void RunPipeline(int64_t num_items, std::initializer_list<PipelineStage> stages) {
  int64_t last_delay = 0;
  for (const PipelineStage& stage : stages) last_delay = std::max(last_delay, stage.delay);
  for (int64_t step = 0; num_items > 0 && step < num_items + last_delay; ++step) {
    for (const PipelineStage& stage : stages) {
      const int64_t item = step - stage.delay;
      if (item >= 0 && item < num_items) stage.run(item);
    }
  }
}

}  // namespace jaxcomm
