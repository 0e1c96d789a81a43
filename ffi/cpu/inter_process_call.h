// One process's part in a collective that several processes run together.
//
// Processes of one node work through shared memory:
// enter           The process publishes the call in its own control segment: a slot, and a block of shared memory with
//                 windows and signals.
// entry barrier   It waits until every other process has published the call.
// running         It runs the plans of its own ranks; the other processes run theirs.
// exit barrier    Every process increments `exited` in the slot of every other process. The buffers of a process are
//                 free once all others have done so.
//
// Processes of other nodes exchange active messages (active_messages.h). The receiver need not have entered the call:
// early messages are kept there. After its last put and signal, a process sends an exit message with its fingerprint. A
// process that waits long sends its fingerprint earlier.
//
// The keys of calls contain XLA's run id, so processes that execute different programs never meet. The call fails if
// a process of its group is in another run for JAXCOMM_WARN_S. XLA:CPU orders the programs of one device that
// one thread dispatches. Programs that several threads dispatch may enter their calls in another order, for a while.
//
// After a failure, slot and block are free once no other process can touch them: every process of the node has finished
// its part, never entered or has ended, and cannot find the slot any more; and no put from another node is in progress.
//
// No function blocks. Any number of threads may call Advance() at once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cpu/active_messages.h"
#include "cpu/bounded_wait.h"
#include "cpu/completion_pool.h"
#include "cpu/inter_process_program.h"
#include "recorder/recorder.h"
#include "transport/node.h"

namespace jaxcomm {

// Names of a call site and its group, for error messages.
struct CallNames {
  std::string prefix;
  std::vector<int64_t> ranks;  // by position
};

class InterProcessCall : public MessageHandler,
                         private RemoteTransport,
                         public std::enable_shared_from_this<InterProcessCall> {
 public:
  using Clock = std::chrono::steady_clock;
  // Called once, when no thread or process touches the group's buffers any more. own_position: as given to Advance().
  using Finish = std::function<void(int64_t own_position, const Status& status)>;

  struct Spec {
    uint64_t key = 0;  // equal in all processes, unique among the calls in flight
    RunAndGroup run;
    std::shared_ptr<const CallNames> names;
    std::string what;           // describes the call in the messages of other processes; cut to fit in a Slot
    BoundedWait wait;           // since the first device of this process arrived
    Slices slices;              // all_to_all_v, dispatch, combine
    uint64_t table_hash = 0;    // of the table of the slices, which all processes must have
    bool numbered = false;      // CallSpec::numbered
    bool asynchronous = false;  // XLA's threads do no work of the call
    CallRecord record;
  };
  enum class AdvanceResult { kWaiting, kMoved, kOver };

  // `buffers` by position; null where another process runs the rank. `active_messages` may be null if all processes are
  // on one node.
  InterProcessCall(Node& node, ActiveMessages* active_messages, int32_t process,
                   std::shared_ptr<const InterProcessProgram> program, Spec spec, std::vector<RankBuffers> buffers,
                   Finish finish);

  // Publishes the call to the other processes. Must be called before the first Advance().
  void Enter();
  // kMoved: the call has advanced; call again. kOver: this was the last thread, and `finish` has been called.
  AdvanceResult Advance(int64_t own_position = -1);
  // Aborts the call unless it is over. `finish` is called when the last thread has left.
  void Fail(const Status& error);
  // Fails the call if it has timed out or another process has ended or aborted. For the progress thread.
  void Check(Clock::time_point now);

  int64_t run_id() const { return spec_.run.run_id; }
  bool over() const { return finished_.load(); }
  bool failed() const { return (state_.load() & kFailed) != 0; }
  const InterProcessProgram& program() const { return *program_; }

  void* DestinationOf(int32_t process, const Fingerprint& fingerprint, int32_t rank, Space space, int64_t offset_bytes,
                      int64_t bytes) override;
  void OnPutDone() override;
  void OnSignal(int32_t from, int32_t to) override;
  void OnEntered(int32_t process, const Fingerprint& fingerprint, const std::string& what) override;
  void OnExited(int32_t process, const Fingerprint& fingerprint, const std::string& what) override;
  void OnAborted(int32_t process, const std::string& why) override;
  void OnLost(int32_t process) override;

  // After a failure, for one thread: frees the slot and the block if no other process can touch them any more. Returns
  // whether they are free.
  bool Reclaim();

 private:
  enum class Phase : uint8_t { kEntryBarrier, kRunning, kExitBarrier };
  struct Other {
    Peer* peer = nullptr;
    int slot = -1;
    char* block = nullptr;
    bool exited = false;
  };
  // A call of another process in the same group and another run.
  struct OtherRun {
    int32_t process = -1;
    uint64_t key = 0;
    int64_t run_id = 0;
    std::string what;
  };

  void Put(const Place& to, std::unique_ptr<char[]> data, int64_t count) override;
  void PutInput(const Place& to, const char* input, int64_t count) override;
  void Signal(int32_t from, int32_t to) override;

  bool Step();
  bool FindOthers();
  void Begin();
  void SubmitToWorkers();
  void LeaveSlot(Other& other);
  bool AllExited() const;
  void EndSends();
  bool Close();
  bool Leave(int64_t own_position);
  const Other* Failed() const;  // a process that has aborted, or null
  void FailLike(const Other& other);
  Status Wrong(StatusCode code, const std::string& text) const;  // with op, call site and phase
  bool Agrees(int32_t process, const Fingerprint& fingerprint, const std::string& what);
  std::string Mismatch(int32_t process, const std::string& what) const;
  std::optional<OtherRun> FindOtherRun() const;
  void CompareRuns(Clock::time_point now);
  std::string RanksOf(int32_t process) const;
  std::string DescribeLate(const std::string& within) const;

  Node& node_;
  ActiveMessages* const active_messages_;
  const int32_t process_;
  const std::shared_ptr<const InterProcessProgram> program_;
  const Spec spec_;
  const Fingerprint fingerprint_{program_->fingerprint(), spec_.table_hash};
  std::vector<RankBuffers> buffers_;  // XLA's
  const Finish finish_;

  int64_t num_local_ = 0;
  std::vector<Other> others_;     // of this node
  std::vector<int32_t> distant_;  // processes of other nodes
  std::atomic<uint32_t> num_distant_exited_{0};
  // In the order of distant_.
  std::unique_ptr<std::atomic<bool>[]> has_entered_;   // and has announced it
  std::unique_ptr<std::atomic<bool>[]> has_received_;  // a payload from that process; it may not be complete
  std::unique_ptr<std::atomic<bool>[]> has_exited_;
  bool registered_ = false;  // with the active messages
  Block block_;
  int slot_ = -1;
  std::unique_ptr<Execution> execution_;
  std::atomic<Phase> phase_{Phase::kEntryBarrier};
  std::atomic<bool> claimed_{false};  // held by the thread that changes the phase

  // The number of threads inside Advance() or Fail() plus payloads that the network may be writing or reading, and two
  // bits for the outcome. The last one to leave calls finish_.
  static constexpr uint32_t kDone = 1u << 30, kFailed = 1u << 31, kThreads = kDone - 1;
  std::atomic<uint32_t> state_{0};
  std::atomic<bool> finished_{false};
  std::atomic<bool> released_{false};  // after failure: nothing here touches the memory of other processes any more
  std::mutex error_mutex_;
  Status error_;  // success until the call has failed
  // Used by the progress thread only.
  uint32_t pending_ = 0;                // payloads of a call that should end, on their way at the last Check()
  Clock::time_point cancel_puts_at_{};  // when it stops waiting for the next of them and drops their peers
  bool sent_entered_ = false;
  std::optional<OtherRun> other_run_;
  int num_comparisons_ = 0;  // that have found other_run_, one after the other
  Clock::time_point next_comparison_{}, next_record_{};
  BoundedWait wait_{spec_.wait};
};

}  // namespace jaxcomm
