// Runs the plans of the ranks of this process. Other ranks of the group may be run by other processes of the host.
//
// Any number of threads may work on one execution. Each takes a rank that nobody works for, runs its steps until a wait
// is not yet satisfied, and takes the next. Nobody ever sleeps: a thread that finds nothing to do leaves. If all ranks
// are of this process, the work is done when the last thread leaves; else somebody has to come back.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../plan/plan.h"
#include "../transport/control_segment.h"
#include "copy.h"
#include "reduce.h"

namespace jaxcomm {

// The plans of a group and how to run them. Immutable; shared by all executions of a call site.
struct Program {
  std::vector<Plan> plans;  // of all ranks
  BlockLayout input;
  BlockLayout output;
  int64_t item_bytes = 1;
  int32_t type = 0;           // tells programs apart that differ in nothing else
  ReduceFn reduce = nullptr;  // null where no plan has a reduce step
  int64_t moved_bytes = 0;    // by all data steps of all ranks, each source counted
  bool stream = false;        // write outputs past the caches

  // Fills in moved_bytes and stream.
  static std::shared_ptr<const Program> Make(std::vector<Plan> plans, BlockLayout input, BlockLayout output,
                                             int64_t item_bytes, ReduceFn reduce, int32_t type = 0);
};

// The way to the ranks of other nodes.
class RemoteTransport {
 public:
  virtual ~RemoteTransport() = default;
  virtual void Put(const Place& to, std::unique_ptr<char[]> data, int64_t count) = 0;
  virtual void Signal(int32_t from, int32_t to) = 0;
};

// Where a rank's buffers and counters are.
struct RankBuffers {
  const char* input = nullptr;
  char* output = nullptr;
  char* scratch = nullptr;  // plans[rank].scratch_count elements
  bool local = true;        // this process runs the rank
  int32_t input_pid = 0;    // View::pid of input and output
  int32_t output_pid = 0;
  std::atomic<uint32_t>* signals = nullptr;   // counters of the signals to this rank, by sender; null: private ones
  ControlSegment* control_segment = nullptr;  // of the process that runs it; null: this one
  RemoteTransport* remote = nullptr;          // not null: the rank is on another node, and nothing above is used
};

class Execution {
 public:
  Execution(std::shared_ptr<const Program> program, std::vector<RankBuffers> buffers);

  // Runs what can be run. True for exactly one caller: the one that finished the last rank of this process; all effects
  // of all threads are then visible to it. A caller may leave while others still work.
  bool Work();

  // Makes all threads leave soon.
  void Cancel() { cancelled_.store(true); }
  // A process whose memory could not be read, or 0. The execution can't finish any more.
  int32_t unreadable_pid() const { return unreadable_pid_.load(); }
  // A pair of ranks of which the first waits for the second; -1 if none does. For messages.
  std::pair<int32_t, int32_t> WaitingPair();
  // Counts every stretch of steps.
  uint32_t num_advances() const { return num_advances_.load(); }

 private:
  struct Rank {
    std::atomic<bool> busy{false};  // held by the thread that runs this rank's steps; guards next_step
    std::atomic<bool> finished{false};
    size_t next_step = 0;
    // The next rank's is in another cache line. Not by alignas, which asks for an aligned allocation in every call.
    char unused[48];
  };

  enum class Advance { kNone, kSome, kFinishedLast };
  Advance RunRank(int32_t rank);
  bool RunStep(const Plan& plan, const Step& step);  // false: the memory of unreadable_pid_ could not be read
  bool RunReduce(const Plan& plan, const Step& step);
  bool Read(bool readable, int32_t pid);
  View ViewOf(const Place& place) const;

  const std::shared_ptr<const Program> program_;
  const std::vector<RankBuffers> buffers_;
  const int32_t num_ranks_;
  std::vector<int32_t> local_;  // ranks that this process runs
  std::vector<Rank> ranks_;
  std::vector<std::atomic<uint32_t>> private_signals_;
  std::vector<std::atomic<uint32_t>*> signals_;  // [to][from]
  std::vector<uint32_t> waits_;                  // [to * n + from], guarded by to's `busy`
  std::atomic<int32_t> unfinished_;
  std::atomic<bool> cancelled_{false};
  std::atomic<int32_t> unreadable_pid_{0};
  std::atomic<uint32_t> num_advances_{0};  // raised after every stretch of steps
  std::atomic<uint32_t> next_start_{0};    // where the next thread starts to look
};

}  // namespace jaxcomm
