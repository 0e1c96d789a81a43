// Active messages between the processes of a call on several nodes. Each call has a channel of its own for its puts,
// its signals and its exit. Entry and abort of a call travel on a second channel.
//
// Messages may arrive before this process has entered the call. Until the call registers, puts wait (small ones here,
// large ones at their sender) and signals are kept. Messages for a call that this process never enters are dropped once
// their sender has aborted or is lost.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/status.h"
#include "plan/plan.h"
#include "transport/fingerprint.h"
#include "transport/network.h"

namespace jaxcomm {

// Receives the active messages of one call, on the network's thread and on the thread that registers it.
class MessageHandler {
 public:
  virtual ~MessageHandler() = default;
  // Where to write a payload from `process`, which has this fingerprint. Null: drop it. Otherwise OnPutDone follows
  // once nothing writes there any more.
  virtual void* DestinationOf(int32_t process, const Fingerprint& fingerprint, int32_t rank, Space space,
                              int64_t offset_bytes, int64_t bytes) = 0;
  virtual void OnPutDone() = 0;
  virtual void OnSignal(int32_t from, int32_t to) = 0;
  virtual void OnEntered(int32_t process, const Fingerprint& fingerprint, const std::string& what) = 0;
  virtual void OnExited(int32_t process, const Fingerprint& fingerprint, const std::string& what) = 0;
  virtual void OnAborted(int32_t process, const std::string& why) = 0;
  virtual void OnLost(int32_t process) = 0;  // any process, also one outside of the call
};

class ActiveMessages : public Receiver {
 public:
  void SetNetwork(std::unique_ptr<Network> network) { network_ = std::move(network); }
  Network* network() const { return network_.get(); }

  // The handler receives the messages for `key`, including those that have already arrived.
  void Register(uint64_t key, std::shared_ptr<MessageHandler> handler);
  // Later messages for `key` are dropped.
  void Unregister(uint64_t key);

  void Put(int32_t process, uint64_t key, const Fingerprint& fingerprint, const Place& to, int64_t offset_bytes,
           std::unique_ptr<char[]> data, int64_t bytes);
  // Copies nothing. OnPutDone of the sender follows once nothing reads the data any more.
  void PutInput(int32_t process, uint64_t key, const Fingerprint& fingerprint, const Place& to, int64_t offset_bytes,
                const char* data, int64_t bytes, std::shared_ptr<MessageHandler> sender);
  void Signal(int32_t process, uint64_t key, int32_t from, int32_t to);
  // This process has entered the call; `what` describes the call. Sent only if the call takes long.
  void SendEntered(int32_t process, uint64_t key, const Fingerprint& fingerprint, const RunAndGroup& run,
                   const std::string& what);
  // This process has sent all its puts and signals.
  void SendExited(int32_t process, uint64_t key, const Fingerprint& fingerprint, const std::string& what);
  void SendAborted(int32_t process, uint64_t key, const std::string& why);
  // This process has aborted all calls of the run, also those that it has not entered.
  void SendRunFailed(int32_t process, int64_t run_id, const std::string& why);

  // Drops the connections to all processes that are still sending payloads to this handler, or have not taken those
  // that it sends. OnPutDone follows for each payload. Returns these processes.
  std::vector<int32_t> CancelPuts(const MessageHandler& handler);

  // Success, or the reason why the process is unreachable.
  Status Reachable(int32_t process);
  // The error of a run that `process` has aborted; none if it has not. Only the last 16 failed runs are known.
  std::optional<std::string> FailureOf(int32_t process, int64_t run_id);
  // Calls that `process` has announced and that this process has not entered: " in X and in Y", or empty.
  std::string OtherCallsOf(int32_t process);
  // A call of the same group in another run that `process` has announced and that this process has not entered. None if
  // `process` is in several runs, or also in `own`.
  struct OtherCall {
    uint64_t key = 0;
    int64_t run_id = 0;
    std::string what;
  };
  std::optional<OtherCall> CallOfOtherRun(int32_t process, const RunAndGroup& own);

  void* OnMessage(const Message& message) override;
  void OnDelivered(const Message& message) override;
  void OnPeerLost(int process, const std::string& why) override;

 private:
  enum class Kind : uint8_t { kPut, kSignal, kEntered, kExited, kAborted, kRunFailed };
  struct Header {
    uint64_t key = 0;
    int64_t offset_bytes = 0;
    Fingerprint fingerprint;
    RunAndGroup run;  // kEntered, kRunFailed
    int32_t from = -1;
    int32_t to = -1;
    Kind kind = Kind::kPut;
    Space space = Space::kOutput;
  };
  static_assert(sizeof(Header) <= kMaxHeaderBytes, "a header is short");
  struct WaitingPut {
    int process;
    uint64_t id;
    Header header;
    int64_t bytes;
  };
  struct WaitingEvent {
    int process;
    std::function<void(MessageHandler&)> event;
  };
  // Messages for a call that has not registered yet.
  struct Waiting {
    std::vector<WaitingPut> puts;
    std::vector<WaitingEvent> events;
    struct Entered {
      RunAndGroup run;
      std::string what;
    };
    std::map<int32_t, Entered> entered;  // by processes that have not aborted
    std::set<int32_t> aborted;
  };
  struct FailedRun {
    int64_t run_id;
    std::map<int32_t, std::string> why;  // by process that has aborted the run
  };
  using MessageId = std::pair<int, uint64_t>;

  static Header PutHeader(uint64_t key, const Fingerprint& fingerprint, const Place& to, int64_t offset_bytes);
  static Header HeaderOf(Kind kind, uint64_t key, const Fingerprint& fingerprint = {});
  void Send(int32_t process, const Header& header, std::unique_ptr<char[]> data, int64_t bytes);
  void SendText(int32_t process, const Header& header, const std::string& text);
  void* AssignDestination(int process, uint64_t id, const Header& header, int64_t bytes,
                          const std::shared_ptr<MessageHandler>& handler);
  void Dispatch(uint64_t key, WaitingEvent event, const std::function<void(Waiting&)>& note = nullptr);
  void DropWaiting(uint64_t key, int32_t process);
  void OnRunFailed(int32_t process, int64_t run_id, const std::string& why);
  void FinishPut(const MessageId& id);
  void* TextDestination(const Message& message);
  void* Refuse(const Message& message);

  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<MessageHandler>> handlers_;
  std::unordered_map<uint64_t, Waiting> waiting_;
  std::set<uint64_t> closed_;  // keys of the most recent calls that are over
  std::deque<uint64_t> closed_order_;
  std::deque<uint64_t> aborted_;  // the most recent keys of waiting_ that a peer has aborted
  std::map<MessageId, std::shared_ptr<MessageHandler>> puts_in_progress_;    // puts that have a destination
  std::multiset<std::pair<const MessageHandler*, int>> inputs_in_progress_;  // senders of PutInput, and to whom
  std::map<MessageId, std::unique_ptr<char[]>> texts_;                       // network's thread only
  std::map<int32_t, std::string> lost_;                                      // and why
  std::deque<FailedRun> failed_runs_;
  std::unique_ptr<Network> network_;  // declared last: it calls this object until it is destroyed
};

}  // namespace jaxcomm
