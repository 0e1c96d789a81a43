// Runs the plans of the ranks of this process. Other processes may run the other ranks of the group.
//
// Any number of threads may work on one execution. A thread takes a rank that no other thread holds, runs its steps
// until a wait is not yet satisfied, and takes the next rank. Threads never sleep: a thread without work returns. If
// this process runs all ranks, the execution is complete when the last thread returns. Otherwise Work() must be called
// again.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/copy.h"
#include "cpu/reduce.h"
#include "cpu/token_layout.h"
#include "plan/plan.h"
#include "plan/slices.h"
#include "transport/control_segment.h"

namespace jaxcomm {

// Measured on AMD EPYC (2 cores, 2026-11): for outputs of a few cache sizes, streamed stores save the read of every
// line that is about to be overwritten. For smaller outputs, they evict results that the next op would find in the
// cache.
constexpr int64_t kStreamBytes = 32 << 20;

// The plans of a group with what is needed to run them. Immutable; shared by all executions of a call site.
struct Program {
  std::vector<Plan> plans;  // of all ranks
  BlockLayout input;
  BlockLayout output;
  int64_t item_bytes = 1;
  int32_t type = 0;           // distinguishes programs that differ only in dtype
  ReduceFn reduce = nullptr;  // null if no plan has a reduce step
  int64_t moved_bytes = 0;    // by all data steps of all ranks; every source of a reduce counts
  bool stream = false;        // writes to outputs bypass the caches
  // Elements of a row, if the elements of the plans are lists of rows; -1: they are those of the buffers.
  int64_t row_count = -1;
  TokenLayout tokens;     // dispatch, combine
  std::string algorithm;  // as selected, for the recorder
  // reshard: the buffers are boxes, which replace `input` and `output`.
  std::shared_ptr<const Boxes> boxes;
  bool output_in_order = false;  // reshard: outputs lie in their logical order

  // Fills in moved_bytes and stream.
  static std::shared_ptr<Program> Make(std::vector<Plan> plans, BlockLayout input, BlockLayout output,
                                       int64_t item_bytes, ReduceFn reduce, int32_t type = 0);
  // Plans over lists of rows. `input_count`, `output_count`: elements of the buffers of a rank.
  static std::shared_ptr<Program> MakeOfLists(std::vector<Plan> plans, int64_t input_count, int64_t output_count,
                                              int64_t row_count, int64_t item_bytes, int32_t type);
  bool of_lists() const { return row_count >= 0; }
  int64_t scratch_bytes(size_t rank) const {
    const int64_t count = plans[rank].scratch_count;
    return tokens.choices > 0 ? tokens.ScratchBytes(count) : count * item_bytes;
  }
};

// Puts and signals to the ranks of other nodes.
class RemoteTransport {
 public:
  virtual ~RemoteTransport() = default;
  virtual void Put(const Place& to, std::unique_ptr<char[]> data, int64_t count) = 0;
  // `input` is memory of the caller's, which keeps it until the network has sent it.
  virtual void PutInput(const Place& to, const char* input, int64_t count) = 0;
  virtual void Signal(int32_t from, int32_t to) = 0;
};

// The buffers and counters of one rank.
struct RankBuffers {
  const char* input = nullptr;
  char* output = nullptr;
  char* scratch = nullptr;  // plans[rank].scratch_count elements
  bool local = true;        // this process runs the rank
  int32_t input_pid = 0;    // View::pid of input and output
  int32_t output_pid = 0;
  std::atomic<uint32_t>* signals = nullptr;   // counts signals to this rank, by sender; null: private counters
  ControlSegment* control_segment = nullptr;  // of the process that runs the rank; null: this process
  RemoteTransport* remote = nullptr;          // not null: the rank is on another node; the fields above are unused
  // dispatch: the row of the input for each packed choice. combine: the slot of each choice.
  const int32_t* index = nullptr;
  const int32_t* expert = nullptr;  // combine: of each choice
  const void* weights = nullptr;    // combine: of each choice, or null
};

class Execution {
 public:
  // `slices`: of the lists of the program; they have passed CheckSlices.
  Execution(std::shared_ptr<const Program> program, std::vector<RankBuffers> buffers, Slices slices = {});

  // Runs all steps that are ready. Returns true to exactly one caller: the one that finished the last rank of this
  // process. All effects of all threads are then visible to that caller. Other threads may still be inside Work() when
  // it returns false.
  bool Work();

  // Makes all threads return soon.
  void Cancel() { cancelled_.store(true); }
  // The pid of a process whose memory could not be read, or 0. If not 0, the execution never finishes.
  int32_t unreadable_pid() const { return unreadable_pid_.load(); }
  // A rank that waits and the rank that it waits for; -1 if no rank waits. For error messages.
  std::pair<int32_t, int32_t> WaitingPair();
  // Grows whenever a thread has run steps.
  uint32_t num_advances() const { return num_advances_.load(); }

 private:
  struct Rank {
    std::atomic<bool> busy{false};  // held by the thread that runs this rank's steps; guards next_step
    std::atomic<bool> finished{false};
    size_t next_step = 0;
    // Puts the next Rank into another cache line. alignas would need an aligned allocation in every call.
    char unused[48];
  };

  enum class Advance { kNone, kSome, kFinishedLast };
  Advance RunRank(int32_t rank);
  bool RunStep(const Plan& plan, const Step& step);  // false: the memory of unreadable_pid_ could not be read
  bool RunReduce(const Plan& plan, const Step& step);
  bool Move(const Place& dst, const Place& src, int64_t count);
  bool MoveLists(const Step& step);
  bool Read(bool readable, int32_t pid);
  View ViewOf(const Place& place) const;

  const std::shared_ptr<const Program> program_;
  const std::vector<RankBuffers> buffers_;
  const Slices slices_;
  const int32_t num_ranks_;
  std::vector<int32_t> local_;  // ranks that this process runs
  std::vector<Rank> ranks_;
  std::vector<std::atomic<uint32_t>> private_signals_;
  std::vector<std::atomic<uint32_t>*> signals_;  // [to][from]
  std::vector<uint32_t> waits_;                  // [to * n + from], guarded by to's `busy`
  std::atomic<int32_t> unfinished_;
  std::atomic<bool> cancelled_{false};
  std::atomic<int32_t> unreadable_pid_{0};
  std::atomic<uint32_t> num_advances_{0};  // grows whenever steps have run
  std::atomic<uint32_t> next_start_{0};    // the rank that the next thread tries first
};

}  // namespace jaxcomm
