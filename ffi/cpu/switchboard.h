// Connects calls of this process with their parts on other nodes: puts, signals and farewells of a call travel as
// messages of the network, each call on a channel of its own.
//
// Messages may come before this process has entered the call. Then puts wait, small ones here and large ones with their
// sender, and signals are counted, until the call registers.
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

#include "../plan/plan.h"
#include "../transport/network.h"

namespace jaxcomm {

// What the switchboard wants of a call. All but PlaceOf may be called by the network's thread.
class Line {
 public:
  virtual ~Line() = default;
  virtual void* PlaceOf(int32_t rank, Space space, int64_t offset_bytes, int64_t bytes) = 0;  // null: there is none
  virtual void OnPlaced() = 0;  // once for every place: nothing is written there any more
  virtual void OnSignal(int32_t from, int32_t to) = 0;
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

  void Put(int32_t process, uint64_t key, const Place& to, int64_t offset_bytes, std::unique_ptr<char[]> data,
           int64_t bytes);
  void Signal(int32_t process, uint64_t key, int32_t from, int32_t to);
  // This process has put and signalled all it had to.
  void SayLeft(int32_t process, uint64_t key, uint64_t fingerprint, const std::string& what);
  void SayGivenUp(int32_t process, uint64_t key, const std::string& why);

  // Cuts off the processes whose payloads are on their way to places of the line: OnPlaced follows for all.
  void Abandon(const Line& line);

  // Why another process can't be reached any more; empty if it can.
  std::string Lost(int32_t process);

  void* OnMessage(const Message& message) override;
  void OnDelivered(const Message& message) override;
  void OnPeerLost(int process, const std::string& why) override;

 private:
  enum class Kind : uint8_t { kPut, kSignal, kLeft, kGivenUp };
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
  // What came for a call that has not registered yet.
  struct Waiting {
    std::vector<WaitingPut> puts;
    std::vector<std::function<void(Line&)>> events;
  };

  void Send(int32_t process, const Header& header, std::unique_ptr<char[]> data, int64_t bytes);
  void SendText(int32_t process, Header header, const std::string& text);
  void* GivePlace(int process, uint64_t id, const Header& header, int64_t bytes, const std::shared_ptr<Line>& line);
  void Tell(uint64_t key, std::function<void(Line&)> event);
  void* Trash(const Message& message);

  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Line>> lines_;
  std::unordered_map<uint64_t, Waiting> waiting_;
  std::set<uint64_t> closed_;  // keys of calls that are over, the latest
  std::deque<uint64_t> closed_order_;
  std::map<std::pair<int, uint64_t>, std::unique_ptr<char[]>> texts_;  // of the network's thread alone
  std::map<std::pair<int, uint64_t>, std::shared_ptr<Line>> placed_;   // payloads on their way
  std::map<int32_t, std::string> lost_;
  std::unique_ptr<Network> network_;  // last: it calls until it is destroyed
};

}  // namespace jaxcomm
