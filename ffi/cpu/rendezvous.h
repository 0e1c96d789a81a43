// The rendezvous of the devices of one process for a collective. It also starts calls between processes.
//
// There is one Rendezvous per call site and executable. Calls are matched by identity (run, iteration of the call site
// within the run, group), never by order of arrival. So independent calls may run in any order on any device and never
// mix.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "cpu/bounded_wait.h"
#include "cpu/completion_pool.h"
#include "cpu/inter_process_program.h"
#include "cpu/planner.h"

namespace jaxcomm {

// One device in one call.
struct Participant {
  int64_t run_id = 0;  // XLA's run id: equal on all devices of an execution
  int64_t rank = 0;    // logical device id
  const char* input = nullptr;
  char* output = nullptr;
  DType dtype = DType::kF32;
  int64_t input_count = 0;
  int64_t output_count = 0;
  const void* table = nullptr;  // all_to_all_v, dispatch, combine: of Slices; the same on all ranks
  bool wide_table = false;
  int64_t table_count = 0;
  uint64_t table_hash = 0;  // set by Arrive()
  // As in RankBuffers.
  const int32_t* index = nullptr;
  int64_t index_count = 0;
  const int32_t* expert = nullptr;
  const void* weights = nullptr;
};

class Rendezvous : public std::enable_shared_from_this<Rendezvous> {
 public:
  // Fails if the ranks cannot be split into groups and nodes of the given sizes, or a rank is in two groups.
  static StatusOr<std::shared_ptr<Rendezvous>> Make(CallSpec spec);

  // Never blocks. The last participant to arrive does the work of its group, with worker threads if the data is large.
  // If the call is asynchronous, a worker thread does it instead. `done` is completed on the thread of the last
  // participant, or by the CompletionPool for the others and for asynchronous calls. The buffers must stay valid until
  // then.
  void Arrive(Participant participant, std::unique_ptr<Completion> done);

  // Marks the end of a program. Call sites are numbered within a program in the order in which XLA makes them, which is
  // the same in all processes.
  static void EndProgram();

  // Fails the open and later calls of a run at all call sites, also in other processes.
  static void FailRun(int64_t run_id, const Status& error);

  // Limits of the wait from the first arrival in a group to the last.
  static void SetLimits(const WaitLimits& limits);

 private:
  struct GroupCall;
  struct InterProcess;
  using Clock = std::chrono::steady_clock;
  using Key = std::tuple<int64_t, int64_t, int64_t>;  // run, iteration, group

  explicit Rendezvous(CallSpec spec) : spec_(std::move(spec)) {}
  Status CountLocal();
  StatusOr<std::shared_ptr<GroupCall>> Join(const Participant& participant, std::unique_ptr<Completion>& done);
  void Start(const std::shared_ptr<GroupCall>& group_call, const Participant& participant, int64_t own_position);
  void Work(const std::shared_ptr<GroupCall>& group_call, int64_t own_position);
  void Finish(GroupCall& group_call, int64_t own_position);
  bool SpansProcesses(int64_t group) const { return local_count_[group] < spec_.group_size; }
  void StartInterProcess(const std::shared_ptr<GroupCall>& group_call, int64_t own_position, const Status& checked);
  StatusOr<const InterProcess*> InterProcessFor(const Participant& participant, int64_t group);
  void FailCall(GroupCall& group_call, const Status& error);
  StatusOr<std::shared_ptr<const Program>> ProgramFor(const Participant& participant);
  std::unique_ptr<char[]> TakeScratch(size_t bytes);
  std::string Prefix() const { return spec_.Where() + ": "; }
  std::string DescribeLate(const GroupCall& group_call, const Key& key, const std::string& within) const;
  void FailCalls(int64_t run_id, const Status& error);
  void FailExpired(Clock::time_point now);
  static void SweepForever();

  CallSpec spec_;  // constant after Make
  // Read when the call site is made: all processes do that at the same point of their program.
  const CostParams cost_params_ = CostParams::Current();
  uint64_t identity_ = 0, devices_hash_ = 0;    // of the call site, if it spans processes
  std::unordered_map<int64_t, int64_t> slots_;  // rank -> group * group_size + position
  std::vector<int64_t> local_count_;            // ranks of this process, by group
  const std::shared_ptr<Pace> pace_ = std::make_shared<Pace>();

  std::mutex mutex_;  // guards the members below; held for bookkeeping only, never during work or completion
  // Counts the calls of one device in each of its latest runs. XLA:CPU 0.10 to 0.12 executes one run at a time; four
  // are kept apart in case that changes.
  class Iterations {
   public:
    int64_t Next(int64_t run_id);  // 0, 1, ...

   private:
    struct Count {
      int64_t run_id = 0;
      int64_t next = 0;
    };
    std::array<Count, 4> counts_;
    size_t oldest_ = 0;
  };
  std::vector<Iterations> iterations_;  // by slot
  std::map<Key, std::shared_ptr<GroupCall>> open_;
  std::shared_ptr<const Program> program_;
  std::map<int64_t, std::shared_ptr<const InterProcess>> inter_process_;  // by group
  std::vector<std::unique_ptr<char[]>> scratch_;                          // reused: fresh memory costs page faults
};

}  // namespace jaxcomm
