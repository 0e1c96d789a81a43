// Reliable messages between the processes of one run.
//
// A message is a short header and a payload of any size. Messages from one sender with the same `channel` are delivered
// in the order of Send; messages of different channels, or of different senders, pass each other. A message whose
// payload has no place yet holds up its own channel only, so independent calls use different channels.
//
// A message either arrives whole or its sender is reported lost. The network never waits for a peer: how long a missing
// message is waited for is the owner's business.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "../common/status.h"

namespace jaxcomm {

// The largest header. Payloads have no limit.
constexpr size_t kMaxHeaderBytes = 64;

struct Message {
  int process = -1;  // the sender
  uint64_t channel = 0;
  uint64_t id = 0;  // tells the messages of one sender apart
  const void* header = nullptr;
  size_t header_bytes = 0;
  size_t bytes = 0;  // of the payload
};

// What comes in. All calls are made by the network's one progress thread, which they must not block; they may call Send
// and Accept. Message and header are valid during the call.
class Receiver {
 public:
  virtual ~Receiver() = default;

  // A payload is announced (not called for messages without one), in the order of Send. Returns where to write its
  // bytes, which the network may then do at any time until OnDelivered or OnPeerLost; or null if the place is not known
  // yet: Network::Accept gives it later. Until then a small payload is kept here, a large one stays with the sender.
  virtual void* OnMessage(const Message& message) = 0;

  // The payload is in place, and all earlier messages of the sender's channel have been delivered.
  virtual void OnDelivered(const Message& message) = 0;

  // Called at most once for a peer, which left, died or cannot be reached. (A cable that is cut shows only after
  // minutes, or never if nothing is sent: the owner's own deadline comes first.) Nothing is written to memory that was
  // given for its messages from now on, no other call for it follows, and messages to it fail.
  virtual void OnPeerLost(int process, const std::string& why) = 0;
};

// `ok`: the data may be reused, and the message arrives unless the peer is lost. Not ok: the peer is lost.
using SentFn = std::function<void(bool ok)>;

struct PeerTraffic {
  uint64_t messages_sent = 0;
  uint64_t bytes_sent = 0;  // payloads only, here and below
  uint64_t messages_received = 0;
  uint64_t bytes_received = 0;
};

// Thread-safe. Destruction tells the peers, ends every outstanding Send and makes no further call to the receiver; it
// must not happen on the progress thread.
class Network {
 public:
  virtual ~Network() = default;

  // Opaque bytes that a peer gives to its Connect.
  virtual std::string address() const = 0;

  // Must come before the first Send to the process; a process that has not connected yet may receive. Fails if the
  // address cannot be used. Not from a Receiver's call.
  virtual Status Connect(int process, const std::string& address) = 0;

  // Copies the header. `data` stays valid until `sent` is called, exactly once: by the progress thread, or by Send
  // itself if the data was small enough to copy or the peer is not there. `sent` may be null. Never blocks.
  virtual void Send(int process, uint64_t channel, const void* header, size_t header_bytes, const void* data,
                    size_t bytes, SentFn sent) = 0;

  // The place for a payload for which OnMessage returned null; null drops the message, which is then not delivered.
  virtual void Accept(int process, uint64_t id, void* destination) = 0;

  // Ends the connection from this side, whatever is under way. OnPeerLost follows, here at once, and at the peer.
  virtual void Drop(int process, const std::string& why) = 0;

  virtual PeerTraffic traffic(int process) const = 0;

  // Messages that were dropped because they are not of this run.
  virtual uint64_t rejected() const = 0;
};

}  // namespace jaxcomm
