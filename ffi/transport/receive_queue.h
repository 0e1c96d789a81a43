// Order and destinations of incoming messages, for every network. Restores the order of Send, gets the destinations of
// payloads from the receiver, and delivers each channel in order although large payloads take longer than small ones.
//
// Only the progress thread uses it, except for the functions marked below.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/network.h"

namespace jaxcomm {

// A payload that is still at its sender. Destruction without Fetch drops the payload.
class RemotePayload {
 public:
  virtual ~RemotePayload() = default;
  // Writes the payload to `destination`, then calls `done` on the progress thread, possibly before returning. Called at
  // most once. This object may be destroyed before `done` is called, or by `done`. Not ok: the peer is lost.
  virtual void Fetch(void* destination, std::function<void(bool ok)> done) = 0;
};

// Precedes every message on the wire.
struct Envelope {
  enum Kind : uint16_t {
    kMessage,
    kDisconnect,     // the sender's last message
    kDisconnectAck,  // acknowledges a disconnect: all messages of the peer have arrived; has no sequence number
  };
  uint64_t token = 0;     // of the job
  uint64_t sequence = 0;  // counts the messages of one process to another, from 0; Message::id
  uint64_t channel = 0;
  int32_t process = -1;  // the sender
  uint16_t header_bytes = 0;
  uint16_t kind = kMessage;
  char header[kMaxHeaderBytes] = {};

  size_t size_bytes() const { return offsetof(Envelope, header) + header_bytes; }
};

class ReceiveQueue {
 public:
  using Clock = std::chrono::steady_clock;

  ReceiveQueue(Receiver* receiver, int process, int num_processes, uint64_t token,
               Clock::duration warn_every = std::chrono::minutes(1));

  // The peer has disconnected, or has acknowledged this side's disconnect.
  struct Disconnect {
    int process = -1;
    Envelope::Kind kind = Envelope::kMessage;  // kMessage: neither
  };
  // Takes an incoming message. Its payload is at `data` until return, or it is `remote`, or there is none. Messages
  // that do not belong to this job are dropped and counted, with a warning at most once in `warn_every`. Returns
  // whether the message was a disconnect or its acknowledgement.
  Disconnect Arrive(const void* envelope, size_t envelope_bytes, size_t bytes, const void* data,
                    std::unique_ptr<RemotePayload> remote);

  void Accept(int process, uint64_t id, void* destination);

  // Drops undelivered messages of the peer and reports it lost once no fetch from it is in progress. A peer that has
  // disconnected is reported after its remaining messages have been delivered.
  void Lose(int process, const std::string& why);

  // Makes no further call to the receiver. Drops all held and later messages.
  void Mute();

  // The peer has disconnected, or is lost.
  bool disconnected(int process) const { return peers_[process].disconnected || peers_[process].lost; }

  // Thread-safe. A peer becomes lost by Lose, its disconnect or a failed fetch.
  bool lost(int process) const { return peers_[process].lost; }
  uint64_t rejected() const { return rejected_; }

 private:
  // A message that is early, has no destination yet, is being fetched, or waits for an earlier one of its channel.
  struct Held {
    Envelope envelope;
    size_t bytes = 0;
    std::unique_ptr<char[]> data;
    std::unique_ptr<RemotePayload> remote;
    bool placed = false;
    bool ready = false;    // payload at its destination
    bool dropped = false;  // by the receiver
  };
  struct Peer {
    uint64_t next = 0;  // sequence number to announce next; held messages from there on are early
    std::map<uint64_t, Held> held;
    std::unordered_map<uint64_t, std::deque<uint64_t>> channels;  // announced and held, by sequence; never empty
    int64_t num_fetches = 0;
    bool disconnected = false;
    bool reported = false;
    std::string why;
    std::atomic<bool> lost{false};
  };

  void Announce(Peer& peer, const Envelope& envelope, size_t bytes, const void* data,
                std::unique_ptr<RemotePayload> remote);
  void Place(Peer& peer, uint64_t sequence, void* destination);
  void Fetched(Peer& peer, uint64_t sequence, bool ok);
  void DeliverChannel(Peer& peer, uint64_t channel);
  void Deliver(const Envelope& envelope, size_t bytes);
  void ReportIfQuiet(Peer& peer);
  void Reject();
  void WarnOfRejected();

  Receiver* const receiver_;
  const int process_;
  const uint64_t token_;
  const Clock::duration warn_every_;
  std::vector<Peer> peers_;
  bool muted_ = false;
  std::atomic<uint64_t> rejected_{0};
  uint64_t warned_ = 0;  // value of rejected_ at the last warning
  Clock::time_point first_rejected_, last_warning_;
};

}  // namespace jaxcomm
