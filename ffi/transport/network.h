// Reliable messages between the processes of a job.
//
// A message is a short header and a payload of any size. Messages of one sender on the same `channel` are delivered in
// the order of Send. Messages on different channels or of different senders are not ordered. A message whose payload
// has no destination yet delays its own channel only, so independent calls use different channels.
//
// A message either arrives completely or its sender is reported lost. The network never waits for a peer. Its owner
// sets the deadline for missing messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "common/status.h"

namespace jaxcomm {

// The largest header. Payloads have no limit.
constexpr size_t kMaxHeaderBytes = 64;

// Over TCP, a handshake precedes a larger payload. Smaller ones fit into one segment of UCX, which would otherwise
// assemble them in memory of its own (benchmarks/README.md, "Permutations between hosts").
constexpr size_t kEagerBytes = 512 << 10;

struct Message {
  int process = -1;  // the sender
  uint64_t channel = 0;
  uint64_t id = 0;  // unique among the messages of one sender
  const void* header = nullptr;
  size_t header_bytes = 0;
  size_t bytes = 0;  // of the payload
};

// Receives the messages of a network. The network's one progress thread makes all calls. They must not block, and they
// may call Send and Accept. Message and header are valid during the call.
class Receiver {
 public:
  virtual ~Receiver() = default;

  // Announces a message with a payload, in the order of Send. Returns the destination of the payload, which the network
  // may write at any time until OnDelivered or OnPeerLost. Null: Network::Accept will give the destination later. Until
  // then, the network keeps a small payload here and leaves a large one at the sender.
  virtual void* OnMessage(const Message& message) = 0;

  // The payload is at its destination, and all earlier messages of the sender's channel have been delivered.
  virtual void OnDelivered(const Message& message) = 0;

  // The peer has left, died or become unreachable. Called at most once per peer, and no other call for the peer
  // follows. From now on the network does not write to the destinations of its messages, and messages to it fail. (A
  // cut cable is detected only after minutes, or never if nothing is sent: the owner's own deadline comes first.)
  virtual void OnPeerLost(int process, const std::string& why) = 0;
};

// The data may be reused. `ok`: the message arrives unless the peer is lost. Not ok: the peer is lost.
using SentFn = std::function<void(bool ok)>;

// Thread-safe. The destructor notifies the peers, completes every outstanding Send and makes no further call to the
// receiver. It must not run on the progress thread.
class Network {
 public:
  virtual ~Network() = default;

  // Opaque bytes, the argument of a peer's Connect.
  virtual std::string address() const = 0;

  // Required before the first Send to the process, but not for receiving from it. Fails if the address cannot be used.
  // Must not be called from a Receiver.
  virtual Status Connect(int process, const std::string& address) = 0;

  // Copies the header. `data` must stay valid until `sent` is called, which happens exactly once: on the progress
  // thread, or inside Send if the data is small enough to copy or the peer is lost or not connected. `sent` may be
  // null. Never blocks.
  virtual void Send(int process, uint64_t channel, const void* header, size_t header_bytes, const void* data,
                    size_t bytes, SentFn sent) = 0;

  // Gives the destination of a payload for which OnMessage returned null. Null drops the message: it is not delivered.
  virtual void Accept(int process, uint64_t id, void* destination) = 0;

  // Ends the connection from this side, including transfers in progress. OnPeerLost follows on both sides, here at
  // once.
  virtual void Drop(int process, const std::string& why) = 0;

  // Messages that were dropped because they do not belong to this job.
  virtual uint64_t rejected() const = 0;
};

}  // namespace jaxcomm
