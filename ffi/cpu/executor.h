// Runs the plans of a whole group whose buffers all lie in this process.
//
// Any number of threads may work on one execution. Each takes a rank that nobody works for, runs its steps until a wait
// is not yet satisfied, and takes the next. Nobody ever sleeps: a thread that finds nothing to do leaves.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "../plan/plan.h"
#include "copy.h"
#include "reduce.h"

namespace jaxcomm {

// The plans of a group and how to run them. Immutable; shared by all executions of a call site.
struct Program {
  std::vector<Plan> plans;  // of all ranks
  Layout input;
  Layout output;
  int64_t item_bytes = 1;
  ReduceFn reduce = nullptr;  // null where no plan has a reduce step
  int64_t moved_bytes = 0;    // by all data steps of all ranks, each source counted
  bool stream = false;        // write outputs past the caches

  // Fills in moved_bytes and stream.
  static std::shared_ptr<const Program> Make(std::vector<Plan> plans, Layout input, Layout output, int64_t item_bytes,
                                             ReduceFn reduce);
};

struct RankBuffers {
  const char* input = nullptr;
  char* output = nullptr;
  char* scratch = nullptr;  // plans[rank].scratch_count elements
};

class Execution {
 public:
  Execution(std::shared_ptr<const Program> program, std::vector<RankBuffers> buffers);

  // Runs what can be run. True for exactly one caller: the one that finished the last rank; all effects of all threads
  // are then visible to it. A caller may leave while others still work.
  bool Work();

 private:
  struct alignas(64) Rank {
    std::atomic<bool> busy{false};  // held by the thread that runs this rank's steps; guards next_step
    std::atomic<bool> finished{false};
    size_t next_step = 0;
  };

  enum class Progress { kNone, kSome, kFinishedLast };
  Progress RunRank(int32_t rank);
  void RunStep(const Plan& plan, const Step& step);
  void RunReduce(const Plan& plan, const Step& step);
  View ViewOf(const Place& place) const;

  const std::shared_ptr<const Program> program_;
  const std::vector<RankBuffers> buffers_;
  const int32_t num_ranks_;
  std::vector<Rank> ranks_;
  std::vector<std::atomic<uint32_t>> signals_;  // [from * n + to]
  std::vector<uint32_t> waits_;                 // [to * n + from], guarded by to's `busy`
  std::atomic<int32_t> unfinished_;
  std::atomic<uint32_t> progress_{0};     // raised after every stretch of steps
  std::atomic<uint32_t> next_helper_{0};  // where the next thread starts to look
};

}  // namespace jaxcomm
