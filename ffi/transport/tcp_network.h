// Frames between endpoints of different jobs, over TCP or, on one host, over a Unix socket and shared memory.
//
// Peers come and go. A connection is made by a client and accepted by a server. Before anything else, each proves to
// the other that it knows the secret: a challenge and a response by HMAC-SHA256, bound to the names and incarnations of
// both and to random numbers of both. Until then, the server reads one message of a fixed size and keeps the connection
// for at most 2 s. Afterwards, a tag by a key of the connection protects headers, control frames and their order. The
// payload of bulk frames is neither tagged nor encrypted.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/status.h"

namespace jaxcomm {

constexpr size_t kMaxBulkBytes = 512 << 10;  // each frame costs two tags and a call of the kernel at either side
constexpr size_t kMaxControlBytes = 16 << 20;
constexpr size_t kMaxNameBytes = 64;

struct Frame {
  uint32_t kind = 0;   // of the owner, below 2^16
  uint32_t bytes = 0;  // of the payload
  uint64_t id = 0;
  uint64_t at = 0;
};

// Gets the frames of a network. All calls come from TcpNetwork::Progress, or from Send and SendBulk for OnLost. They
// may call the network.
class FrameReceiver {
 public:
  virtual ~FrameReceiver() = default;

  // The peer has proved that it knows the secret, and this side has. `client`: this side has connected.
  virtual void OnPeer(int peer, bool client) = 0;

  // Where the payload of a bulk frame goes. Null: OnFrame gets it. The network may write there until OnFrame, OnLost or
  // StopPlacing.
  virtual char* OnBulk(int peer, const Frame& frame) = 0;

  // `payload` is valid during the call; null if it is where OnBulk said.
  virtual void OnFrame(int peer, const Frame& frame, const char* payload) = 0;

  // There is room for a bulk frame. Called while SetBusy(peer, true) holds.
  virtual void OnRoom(int peer) = 0;

  // The connection has ended. No other call for the peer follows.
  virtual void OnLost(int peer, const std::string& why) = 0;
};

// Not thread-safe: its owner holds a lock in all calls but Wait and Wake.
class TcpNetwork {
 public:
  struct Options {
    std::string name;  // of this endpoint: letters, digits, '.', '_' and '-'
    std::string secret;
    std::string host;  // of one interface, in digits
    std::string port;  // "0": any
    bool shared_memory = true;
    int max_strangers = 64;  // connections without a proof, at least 1; the oldest makes room
    // A connection ends if the peer's host, which also answers for a stopped process, is silent for as long.
    int64_t max_silence_ms = 600'000;
  };

  struct Traffic {
    uint64_t sent_bytes = 0;  // of bulk payloads, as below
    uint64_t received_bytes = 0;
  };
  struct PeerTraffic {
    Traffic tcp;
    Traffic shared_memory;
  };

  static StatusOr<std::unique_ptr<TcpNetwork>> Listen(const Options& options, FrameReceiver* receiver);
  ~TcpNetwork();

  // tcp://host:port/name/incarnation/local: all that a client needs besides the secret. `local` names the Unix socket.
  const std::string& address() const { return address_; }
  uint64_t incarnation() const { return incarnation_; }

  // OnPeer or OnLost of the peer follows. Fails if the address has another form.
  StatusOr<int> Connect(const std::string& address);

  // Copies the payload. Does nothing if the peer is lost.
  void Send(int peer, Frame frame, const void* payload);
  // Takes the payload from `payload` before it returns or, if that is null, from `fill`, which writes it. Requires
  // HasRoom.
  void SendBulk(int peer, Frame frame, const char* payload, const std::function<void(char*)>& fill);
  bool HasRoom(int peer) const;
  void SetBusy(int peer, bool busy);
  // The rest of the bulk frame that is arriving is discarded.
  void StopPlacing(int peer);
  // OnLost follows, from Progress.
  void Drop(int peer, const std::string& why);
  // Drops all peers and frees all descriptors. OnLost of each follows inside. Nobody waits meanwhile or afterwards.
  void Close(const std::string& why);

  // Blocks until there is something to do for Progress. One thread waits.
  using Events = std::vector<std::pair<int, uint32_t>>;
  Events Wait(int timeout_ms);
  void Progress(const Events& events);
  // What arrives from a polled peer does not end Wait: other threads call Progress with Poll() instead. Each
  // SetPolled(peer, true) needs a SetPolled(peer, false).
  void SetPolled(int peer, bool polled);
  Events Poll(int peer) const;
  void Wake();
  bool waits_for_slot() const { return waits_for_slot_; }  // in shared memory, for what is to be sent

  std::string name_of(int peer) const;
  const std::map<std::string, PeerTraffic>& traffic() const { return traffic_; }  // by name of the peer
  uint64_t rejected() const { return rejected_; }                                 // connections that proved nothing

 private:
  struct Connection;

  TcpNetwork(const Options& options, FrameReceiver* receiver);
  Status Open();
  void AcceptAll(int listener, bool local);
  int Add(int fd, bool client, bool local);
  void Queue(Connection& c, Frame frame, const void* payload);
  // Sends what is queued, then `more`, and queues what the kernel does not take.
  void Flush(Connection& c, const char* more = nullptr, size_t more_bytes = 0);
  void FlushSoon(Connection& c, uint32_t bytes);
  void Receive(Connection& c);
  // Each returns false if there is nothing more to read.
  bool ReceiveHandshake(Connection& c);
  bool ReceiveFrame(Connection& c);
  bool ReceiveHeader(Connection& c);
  void OnHello(Connection& c);
  void OnProof(Connection& c);
  void OnReply(Connection& c);
  void BecomeOpen(Connection& c);
  void Deliver(Connection& c);
  void OfferRoom(Connection& c);
  void Watch(Connection& c);
  void EndLate();
  void EndLost();
  Connection* Find(int peer) const;

  Options options_;
  FrameReceiver* receiver_;
  uint64_t incarnation_ = 0;
  std::string address_;
  std::string local_name_;
  int epoll_ = -1;
  int wake_ = -1;
  int listener_ = -1;
  int local_listener_ = -1;
  std::map<int, std::unique_ptr<Connection>> connections_;
  int next_peer_ = 0;
  bool progressing_ = false;  // Progress sends small frames at its end
  bool more_room_ = false;    // a busy peer has room: Wait must not block
  bool waits_for_slot_ = false;
  bool lost_ = false;  // a connection waits for EndLost
  std::map<std::string, PeerTraffic> traffic_;
  uint64_t rejected_ = 0;
};

// The parts of an address.
struct EndpointAddress {
  std::string host;
  std::string port;
  std::string name;
  uint64_t incarnation = 0;
  std::string local;

  static StatusOr<EndpointAddress> Parse(const std::string& text);
};

}  // namespace jaxcomm
