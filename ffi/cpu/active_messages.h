// Active messages between the parts of a call on several nodes: its puts, its signals and its end travel as
// messages of the network, each call on a channel of its own; what is said of the call as a whole, on another.
//
// Messages may come before this process has entered the call. Then puts wait, small ones here and large ones with their
// sender, and signals are counted, until the call registers. What comes for calls that it never enters is dropped once
// the sender has aborted or is lost.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "../common/status.h"
#include "../plan/plan.h"
#include "../transport/network.h"

namespace jaxcomm {

// Receives the active messages of one call. All but DestinationOf may be called by the network's thread.
class MessageHandler {
 public:
  virtual ~MessageHandler() = default;
  // For a payload from a process that brings this fingerprint. Null: it is not wanted. Otherwise OnPutDone follows,
  // when nothing writes there any more.
  virtual void* DestinationOf(uint64_t fingerprint, int32_t rank, Space space, int64_t offset_bytes, int64_t bytes) = 0;
  virtual void OnPutDone() = 0;
  virtual void OnSignal(int32_t from, int32_t to) = 0;
  virtual void OnEntered(int32_t process, uint64_t fingerprint, const std::string& what) = 0;
  virtual void OnExited(int32_t process, uint64_t fingerprint, const std::string& what) = 0;
  virtual void OnAborted(int32_t process, const std::string& why) = 0;
  virtual void OnLost(int32_t process) = 0;  // whether or not it takes part
};

class ActiveMessages : public Receiver {
 public:
  void SetNetwork(std::unique_ptr<Network> network) { network_ = std::move(network); }
  Network* network() const { return network_.get(); }

  // From now on the handler gets the messages for `key`, those that have already arrived included.
  void Register(uint64_t key, std::shared_ptr<MessageHandler> handler);
  // What still comes for `key` is dropped.
  void Unregister(uint64_t key);

  void Put(int32_t process, uint64_t key, uint64_t fingerprint, const Place& to, int64_t offset_bytes,
           std::unique_ptr<char[]> data, int64_t bytes);
  void Signal(int32_t process, uint64_t key, int32_t from, int32_t to);
  // What this process brings to the call. Sent only if the call takes long.
  void SendEntered(int32_t process, uint64_t key, uint64_t fingerprint, const std::string& what);
  // This process has put and signalled all it had to.
  void SendExited(int32_t process, uint64_t key, uint64_t fingerprint, const std::string& what);
  void SendAborted(int32_t process, uint64_t key, const std::string& why);

  // Cuts off the processes whose payloads are on their way to destinations of the handler: OnPutDone follows for all.
  void CancelPuts(const MessageHandler& handler);

  // Success, or why another process can't be reached any more.
  Status Reachable(int32_t process);
  // Calls in which another process is and this one is not, as far as it has said so: " in X and in Y", or empty.
  std::string OtherCallsOf(int32_t process);

  void* OnMessage(const Message& message) override;
  void OnDelivered(const Message& message) override;
  void OnPeerLost(int process, const std::string& why) override;

 private:
  enum class Kind : uint8_t { kPut, kSignal, kEntered, kExited, kAborted };
  struct Header {
    uint64_t key = 0;
    int64_t offset_bytes = 0;
    uint64_t fingerprint = 0;
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
  // What came for a call that has not registered yet.
  struct Waiting {
    std::vector<WaitingPut> puts;
    std::vector<WaitingEvent> events;
    std::map<int32_t, std::string> entered;  // what processes bring that have not aborted
    std::set<int32_t> aborted;
  };
  using MessageId = std::pair<int, uint64_t>;

  static Header HeaderOf(Kind kind, uint64_t key, uint64_t fingerprint = 0);
  void Send(int32_t process, const Header& header, std::unique_ptr<char[]> data, int64_t bytes);
  void SendText(int32_t process, const Header& header, const std::string& text);
  void* AssignDestination(int process, uint64_t id, const Header& header, int64_t bytes,
                          const std::shared_ptr<MessageHandler>& handler);
  void Dispatch(uint64_t key, WaitingEvent event, const std::function<void(Waiting&)>& note = nullptr);
  void DropWaiting(uint64_t key, int32_t process);
  void FinishPut(const MessageId& id);
  void* TextDestination(const Message& message);
  void* Refuse(const Message& message);

  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<MessageHandler>> handlers_;
  std::unordered_map<uint64_t, Waiting> waiting_;
  std::set<uint64_t> closed_;  // keys of calls that are over, the latest
  std::deque<uint64_t> closed_order_;
  std::deque<uint64_t> aborted_;  // keys of waiting_ that somebody has aborted, the latest
  std::map<MessageId, std::shared_ptr<MessageHandler>> puts_in_progress_;  // puts that have a place
  std::map<MessageId, std::unique_ptr<char[]>> texts_;                     // of the network's thread alone
  std::map<int32_t, std::string> lost_;
  std::unique_ptr<Network> network_;  // last: it calls until it is destroyed
};

}  // namespace jaxcomm
