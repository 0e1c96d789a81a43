// The rendezvous of the devices of one process for a collective. It also starts calls between processes.
//
// There is one Rendezvous per call site and executable. Calls are matched by identity (run, iteration of the call site
// within the run, group), never by order of arrival. So independent calls may run in any order on any device and never
// mix.
#pragma once

#include <array>
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
#include "cpu/executor.h"
#include "cpu/planner.h"
#include "cpu/run_failures.h"
#include "recorder/recorder.h"

namespace jaxcomm {

class InterProcessProgram;
struct CallNames;

// One device in one call.
struct Participant {
  int64_t run_id = 0;      // XLA's run id: equal on all devices of an execution; of a numbered call, RunOf()
  int64_t iteration = -1;  // of the call site in the run; -1: Arrive() counts
  int64_t rank = 0;        // logical device id
  const char* input = nullptr;
  char* output = nullptr;
  DType dtype = DType::kF32;
  int64_t input_count = 0;
  int64_t output_count = 0;
  const void* table = nullptr;  // all_to_all_v, dispatch, combine: of Slices; the same on all ranks
  bool int64_table = false;
  int64_t table_count = 0;
  uint64_t table_hash = 0;  // set by Arrive()
  // These are as in RankBuffers.
  const int32_t* index = nullptr;
  int64_t index_count = 0;
  const int32_t* expert = nullptr;
  const void* weights = nullptr;

  std::string Sizes() const {  // for messages
    return std::to_string(input_count) + " -> " + std::to_string(output_count) + " elements of " + Name(dtype);
  }
};

class Rendezvous : public OpenCalls, public std::enable_shared_from_this<Rendezvous> {
 public:
  // Fails if the ranks cannot be split into groups and nodes of the given sizes, or a rank is in two groups.
  static StatusOr<std::shared_ptr<Rendezvous>> Make(CallSpec spec);

  // Never blocks. The last participant to arrive does the work of its group, with worker threads if the data is large.
  // If the call is asynchronous, a worker thread does it instead. `done` is completed on the thread of the last
  // participant, or by the CompletionPool for the others and for asynchronous calls. The buffers must stay valid until
  // then.
  void Arrive(Participant participant, std::unique_ptr<Completion> done);

  // The run of a numbered call: the same in all its processes, whatever they have executed before. Runs of the same
  // processes differ in the lower half of their bits, which has the number.
  int64_t RunOf(uint32_t number) const;

  // Marks the end of a program. Call sites are numbered within a program in the order in which XLA makes them, which is
  // the same in all processes.
  static void EndProgram();

  // Limits of the wait from the first arrival in a group to the last.
  static void SetLimits(const WaitLimits& limits);

  void FailCalls(int64_t run_id, const Status& error) override;
  std::vector<std::pair<int64_t, Status>> CheckWaits(std::chrono::steady_clock::time_point now) override;

 private:
  struct Key {
    int64_t run_id, iteration, group;
    bool operator<(const Key& other) const {
      return std::tie(run_id, iteration, group) < std::tie(other.run_id, other.iteration, other.group);
    }
  };
  // One call of a group.
  struct GroupCall {
    Key key;
    std::vector<RankBuffers> buffers;                      // by position
    std::vector<std::unique_ptr<Completion>> completions;  // by position; null: not arrived
    Participant first;
    int64_t num_arrived = 0;
    BoundedWait wait;
    uint64_t arrived = 0;  // as RecordedCall::arrived_mask
    CallRecord record;     // begun by Record()
    std::unique_ptr<char[]> scratch;
    std::unique_ptr<Execution> execution;
    Slices slices;  // all_to_all_v, dispatch, combine

    // The completions of all that have arrived, with this error.
    std::vector<CompletionPool::Item> Failed(const Status& error);
  };
  // Shared by all calls of a group that spans processes.
  struct InterProcess {
    std::shared_ptr<const InterProcessProgram> program;
    std::shared_ptr<const CallNames> names;
    std::string what;  // as InterProcessCall::Spec::what, without the number of the iteration
  };

  explicit Rendezvous(CallSpec spec) : spec_(std::move(spec)) {}
  std::string Prefix() const { return spec_.Where() + ": "; }

  // Matching: rendezvous.cc.
  Status CountLocal();
  void AddToRecorder();
  // Begins the record of a call, once, and notes who has arrived: when all devices of the process have, or the call
  // fails or lasts. If each device stored its arrival, the lines of the record would move between their processors.
  void Record(GroupCall& group_call);
  StatusOr<std::shared_ptr<GroupCall>> Join(const Participant& participant, std::unique_ptr<Completion>& done);
  std::string DescribeLate(const GroupCall& group_call, const std::string& within) const;

  // From the last arrival to completion: rendezvous_start.cc. own_position < 0: not on the thread of a participant.
  void Start(const std::shared_ptr<GroupCall>& group_call, const Participant& participant, int64_t own_position);
  void Work(const std::shared_ptr<GroupCall>& group_call, int64_t own_position);
  void Finish(GroupCall& group_call, int64_t own_position);
  void Fail(GroupCall& group_call, const Status& error);
  void StartInterProcess(const std::shared_ptr<GroupCall>& group_call, int64_t own_position, uint64_t key);
  StatusOr<const InterProcess*> InterProcessFor(const Participant& participant, int64_t group);
  StatusOr<std::shared_ptr<const Program>> ProgramFor(const Participant& participant);
  std::unique_ptr<char[]> TakeScratch(size_t bytes);

  CallSpec spec_;  // constant after Make
  // Read when the call site is made: all processes do that at the same point of their program.
  const CostParams cost_params_ = CostParams::Current();
  // Of a call site that spans processes.
  uint64_t identity_ = 0, devices_hash_ = 0;
  uint64_t number_ = 0;                         // among equal call sites of the program
  std::unordered_map<int64_t, int64_t> slots_;  // rank -> group * group_size + position
  std::vector<int64_t> local_count_;            // ranks of this process, by group
  std::vector<uint64_t> arrived_bits_;          // by slot: in RecordedCall::arrived_mask
  std::vector<uint32_t> recorded_sites_;        // by group: of the recorder
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
