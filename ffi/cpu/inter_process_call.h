// One process's part in a collective that several processes run together.
//
// With the processes of its node it works through shared memory:
// enter    The call is put on the own control segment: a slot, and a block of shared memory with windows and signals.
// entering Until every other process has put it on its control segment.
// running         The plans of the own ranks; the other processes run theirs.
// exit barrier    Every process counts itself out of every other's slot: its buffers are free once all have.
//
// To those of other nodes it sends messages (active_messages.h). They need not have entered: what comes early is kept
// there. A process sends an exit message, with its fingerprint, once it has sent all; a process that waits long sends
// its fingerprint before.
//
// After a failure, slot and block are free once no other process can touch them: those of the node can't find the slot
// any more and are over with their parts, never had any, or have ended; and no put of another node is on its way there.
//
// Nothing here blocks. Any thread may call Advance(), many at once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../transport/node.h"
#include "active_messages.h"
#include "bounded_wait.h"
#include "completion_pool.h"
#include "inter_process_program.h"

namespace jaxcomm {

// Of a call site and group, for messages.
struct CallNames {
  std::string prefix;
  std::string what;            // for the messages of others
  std::vector<int64_t> ranks;  // by position
};

class InterProcessCall : public MessageHandler,
                         private RemoteTransport,
                         public std::enable_shared_from_this<InterProcessCall> {
 public:
  using Clock = std::chrono::steady_clock;
  // Called once, when nobody touches the group's buffers any more. own_position: as given to Advance().
  using Finish = std::function<void(int64_t own_position, const Status& status)>;

  struct Spec {
    uint64_t key = 0;    // the same in all processes, different for all calls in flight
    int64_t run_id = 0;  // XLA's run id
    std::shared_ptr<const CallNames> names;
    BoundedWait wait;  // since the first device of this process arrived
  };
  enum class AdvanceResult { kWaiting, kMoved, kOver };

  // `buffers` by position; null where another process runs the rank. `active_messages` may be null if all are of one
  // node.
  InterProcessCall(Node& node, ActiveMessages* active_messages, int32_t process,
                   std::shared_ptr<const InterProcessProgram> program, Spec spec, std::vector<RankBuffers> buffers,
                   Finish finish);

  // Tells the other processes. Before the first Advance().
  void Enter();
  // kMoved: something happened, so look again. kOver: this was the last thread, and `finish` has been called.
  AdvanceResult Advance(int64_t own_position = -1);
  // Aborts, if it isn't over; `finish` is called when the last thread has left.
  void Fail(const Status& error);
  // Looks at the clock and at whether the other processes live and go along. For the thread that waits.
  void Check(Clock::time_point now);

  int64_t run_id() const { return spec_.run_id; }
  bool over() const { return finished_.load(); }
  bool failed() const { return (state_.load() & kFailed) != 0; }
  const InterProcessProgram& program() const { return *program_; }

  void* DestinationOf(uint64_t fingerprint, int32_t rank, Space space, int64_t offset_bytes, int64_t bytes) override;
  void OnPutDone() override;
  void OnSignal(int32_t from, int32_t to) override;
  void OnEntered(int32_t process, uint64_t fingerprint, const std::string& what) override;
  void OnExited(int32_t process, uint64_t fingerprint, const std::string& what) override;
  void OnAborted(int32_t process, const std::string& why) override;
  void OnLost(int32_t process) override;

  // After failure, for one thread: whether all others are done with the slot and the block, which are then free.
  bool Reclaim();

 private:
  enum class Phase : uint8_t { kEntryBarrier, kRunning, kExitBarrier };
  struct Other {
    Peer* peer = nullptr;
    int slot = -1;
    char* block = nullptr;
    bool exited = false;
  };

  void Put(const Place& to, std::unique_ptr<char[]> data, int64_t count) override;
  void Signal(int32_t from, int32_t to) override;

  bool Step();
  bool FindOthers();
  void Begin();
  void SubmitToWorkers();
  void LeaveSlot(Other& other);
  bool AllExited() const;
  bool Close();
  bool Leave(int64_t own_position);
  const Other* Failed() const;  // another process that has aborted
  void FailLike(const Other& other);
  Status Wrong(StatusCode code, const std::string& text) const;  // with op, call site and phase
  bool Agrees(int32_t process, uint64_t fingerprint, const std::string& what);
  std::string RanksOf(int32_t process) const;
  std::string DescribeLate(const std::string& within) const;

  Node& node_;
  ActiveMessages* const active_messages_;
  const int32_t process_;
  const std::shared_ptr<const InterProcessProgram> program_;
  const Spec spec_;
  std::vector<RankBuffers> buffers_;  // as XLA gave them
  const Finish finish_;

  int64_t num_local_ = 0;
  std::vector<Other> others_;     // of this node
  std::vector<int32_t> distant_;  // processes of other nodes
  std::atomic<uint32_t> num_distant_exited_{0};
  std::unique_ptr<std::atomic<bool>[]> has_exited_;  // for messages; as distant_
  bool registered_ = false;                          // with the active messages
  Block block_;
  int slot_ = -1;
  std::unique_ptr<Execution> execution_;
  std::atomic<Phase> phase_{Phase::kEntryBarrier};
  std::atomic<bool> claimed_{false};  // held by the thread that changes the phase

  // Threads inside Advance() or Fail() and payloads that the network may be writing, and how it ended. The last one out
  // finishes.
  static constexpr uint32_t kDone = 1u << 30, kFailed = 1u << 31, kThreads = kDone - 1;
  std::atomic<uint32_t> state_{0};
  std::atomic<bool> finished_{false};
  std::atomic<bool> released_{false};  // after failure: of everything that belongs to others
  std::mutex error_mutex_;
  Status error_;  // success until the call has failed
  // The progress thread's.
  Clock::time_point cancel_puts_at_{};  // when it stops to wait for such payloads
  bool said_entered_ = false;
  BoundedWait wait_{spec_.wait};
};

}  // namespace jaxcomm
