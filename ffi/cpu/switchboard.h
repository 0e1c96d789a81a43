// Connects calls of this process with their parts on other nodes: puts, signals and farewells of a call travel as
// messages of the network, each call on a channel of its own; what is said of the call as a whole, on another.
//
// Messages may come before this process has entered the call. Then puts wait, small ones here and large ones with their
// sender, and signals are counted, until the call registers. What comes for calls that it never enters is dropped once
// the sender has given up or is lost.
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

// What the switchboard wants of a call. All but PlaceOf may be called by the network's thread.
class Line {
 public:
  virtual ~Line() = default;
  // For a payload from a process that brings this fingerprint. Null: it is not wanted. Otherwise OnLanded follows, when
  // nothing writes there any more.
  virtual void* PlaceOf(uint64_t fingerprint, int32_t rank, Space space, int64_t offset_bytes, int64_t bytes) = 0;
  virtual void OnLanded() = 0;
  virtual void OnSignal(int32_t from, int32_t to) = 0;
  virtual void OnEntered(int32_t process, uint64_t fingerprint, const std::string& what) = 0;
  virtual void OnLeft(int32_t process, uint64_t fingerprint, const std::string& what) = 0;
  virtual void OnGivenUp(int32_t process, const std::string& why) = 0;
  virtual void OnLost(int32_t process) = 0;  // whether or not it takes part
};

class Switchboard : public Receiver {
 public:
  void SetNetwork(std::unique_ptr<Network> network) { network_ = std::move(network); }
  Network* network() const { return network_.get(); }

  // From now on the line gets what comes for `key`, and what has come already.
  void Register(uint64_t key, std::shared_ptr<Line> line);
  // What still comes for `key` is dropped.
  void Unregister(uint64_t key);

  void Put(int32_t process, uint64_t key, uint64_t fingerprint, const Place& to, int64_t offset_bytes,
           std::unique_ptr<char[]> data, int64_t bytes);
  void Signal(int32_t process, uint64_t key, int32_t from, int32_t to);
  // What this process brings to the call. It need not be said unless the call takes long.
  void SayEntered(int32_t process, uint64_t key, uint64_t fingerprint, const std::string& what);
  // This process has put and signalled all it had to.
  void SayLeft(int32_t process, uint64_t key, uint64_t fingerprint, const std::string& what);
  void SayGivenUp(int32_t process, uint64_t key, const std::string& why);

  // Cuts off the processes whose payloads are on their way to places of the line: OnLanded follows for all.
  void Abandon(const Line& line);

  // Success, or why another process can't be reached any more.
  Status Reachable(int32_t process);
  // Calls in which another process is and this one is not, as far as it has said so: " in X and in Y", or empty.
  std::string Elsewhere(int32_t process);

  void* OnMessage(const Message& message) override;
  void OnDelivered(const Message& message) override;
  void OnPeerLost(int process, const std::string& why) override;

 private:
  enum class Kind : uint8_t { kPut, kSignal, kEntered, kLeft, kGivenUp };
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
    std::function<void(Line&)> event;
  };
  // What came for a call that has not registered yet.
  struct Waiting {
    std::vector<WaitingPut> puts;
    std::vector<WaitingEvent> events;
    std::map<int32_t, std::string> entered;  // what processes bring that have not given up
    std::set<int32_t> given_up;
  };
  using MessageId = std::pair<int, uint64_t>;

  static Header HeaderOf(Kind kind, uint64_t key, uint64_t fingerprint = 0);
  void Send(int32_t process, const Header& header, std::unique_ptr<char[]> data, int64_t bytes);
  void SendText(int32_t process, const Header& header, const std::string& text);
  void* GivePlace(int process, uint64_t id, const Header& header, int64_t bytes, const std::shared_ptr<Line>& line);
  void Tell(uint64_t key, WaitingEvent event, const std::function<void(Waiting&)>& note = nullptr);
  void DropWaiting(uint64_t key, int32_t process);
  void Land(const MessageId& id);
  void* PlaceOfText(const Message& message);
  void* Refuse(const Message& message);

  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Line>> lines_;
  std::unordered_map<uint64_t, Waiting> waiting_;
  std::set<uint64_t> closed_;  // keys of calls that are over, the latest
  std::deque<uint64_t> closed_order_;
  std::deque<uint64_t> given_up_;                       // keys of waiting_ that somebody has given up, the latest
  std::map<MessageId, std::shared_ptr<Line>> landing_;  // puts that have a place
  std::map<MessageId, std::unique_ptr<char[]>> texts_;  // of the network's thread alone
  std::map<int32_t, std::string> lost_;
  std::unique_ptr<Network> network_;  // last: it calls until it is destroyed
};

}  // namespace jaxcomm
