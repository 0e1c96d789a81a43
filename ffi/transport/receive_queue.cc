#include "transport/receive_queue.h"

#include <cstdio>
#include <cstring>
#include <iterator>
#include <utility>

namespace jaxcomm {
namespace {

Message MessageOf(const Envelope& envelope, size_t bytes) {
  Message message;
  message.process = envelope.process;
  message.channel = envelope.channel;
  message.id = envelope.sequence;
  message.header = envelope.header;
  message.header_bytes = envelope.header_bytes;
  message.bytes = bytes;
  return message;
}

std::unique_ptr<char[]> Copy(const void* data, size_t bytes) {
  if (!data) return nullptr;
  std::unique_ptr<char[]> copy(new char[bytes]);
  std::memcpy(copy.get(), data, bytes);
  return copy;
}

}  // namespace

ReceiveQueue::ReceiveQueue(Receiver* receiver, int process, int num_processes, uint64_t token,
                           Clock::duration warn_every)
    : receiver_(receiver), process_(process), token_(token), warn_every_(warn_every), peers_(num_processes) {}

ReceiveQueue::Disconnect ReceiveQueue::Arrive(const void* envelope_data, size_t envelope_bytes, size_t bytes,
                                              const void* data, std::unique_ptr<RemotePayload> remote) {
  // The data is not trusted: the token is checked first, then every number before it is used.
  Envelope envelope;
  if (envelope_bytes < offsetof(Envelope, header) || envelope_bytes > sizeof(Envelope)) {
    Reject();
    return {};
  }
  std::memcpy(&envelope, envelope_data, envelope_bytes);
  if (envelope.token != token_ || envelope.header_bytes > kMaxHeaderBytes || envelope.size_bytes() != envelope_bytes ||
      envelope.process < 0 || envelope.process >= static_cast<int64_t>(peers_.size()) || envelope.process == process_) {
    Reject();
    return {};
  }
  if (envelope.kind == Envelope::kDisconnectAck) return {envelope.process, Envelope::kDisconnectAck};
  Peer& peer = peers_[envelope.process];
  if (peer.lost) return {};
  const uint64_t sequence = envelope.sequence;
  if (sequence < peer.next || peer.held.count(sequence)) {  // a duplicate: from an earlier start of that process
    Reject();
    return {};
  }
  if (sequence > peer.next) {
    Held& held = peer.held[sequence];
    held.envelope = envelope;
    held.bytes = bytes;
    if (muted_) return {};
    held.data = Copy(data, bytes);
    held.remote = std::move(remote);
    return {};
  }
  ++peer.next;
  Announce(peer, envelope, bytes, data, std::move(remote));
  for (auto early = peer.held.find(peer.next); early != peer.held.end(); early = peer.held.find(peer.next)) {
    Held held = std::move(early->second);
    peer.held.erase(early);
    ++peer.next;
    Announce(peer, held.envelope, held.bytes, held.data.get(), std::move(held.remote));
  }
  if (peer.disconnected) return {envelope.process, Envelope::kDisconnect};
  return {};
}

void ReceiveQueue::Announce(Peer& peer, const Envelope& envelope, size_t bytes, const void* data,
                            std::unique_ptr<RemotePayload> remote) {
  if (envelope.kind == Envelope::kDisconnect) {
    peer.disconnected = true;
    return Lose(envelope.process, "it disconnected");
  }
  if (muted_) return;
  void* const destination = bytes > 0 ? receiver_->OnMessage(MessageOf(envelope, bytes)) : nullptr;
  if (destination && data) std::memcpy(destination, data, bytes);
  const bool ready = bytes == 0 || (destination && data);
  if (ready && !peer.channels.count(envelope.channel)) return Deliver(envelope, bytes);

  const uint64_t sequence = envelope.sequence;
  Held& held = peer.held[sequence];
  held.envelope = envelope;
  held.bytes = bytes;
  held.ready = held.placed = ready;
  if (!ready) held.data = Copy(data, bytes);
  held.remote = std::move(remote);
  peer.channels[envelope.channel].push_back(sequence);
  if (!ready && destination) Place(peer, sequence, destination);
}

void ReceiveQueue::Accept(int process, uint64_t id, void* destination) {
  Peer& peer = peers_[process];
  const auto it = peer.held.find(id);
  if (peer.lost || muted_ || it == peer.held.end() || id >= peer.next || it->second.placed) return;
  Place(peer, id, destination);
}

void ReceiveQueue::Place(Peer& peer, uint64_t sequence, void* destination) {
  Held& held = peer.held[sequence];
  held.placed = true;
  if (destination && held.remote) {
    ++peer.num_fetches;
    held.remote->Fetch(destination, [this, &peer, sequence](bool ok) { Fetched(peer, sequence, ok); });
    return;
  }
  if (destination) std::memcpy(destination, held.data.get(), held.bytes);
  held.dropped = !destination;
  held.remote.reset();
  held.data.reset();
  held.ready = true;
  DeliverChannel(peer, held.envelope.channel);
}

void ReceiveQueue::Fetched(Peer& peer, uint64_t sequence, bool ok) {
  --peer.num_fetches;
  if (muted_) return;
  if (peer.lost) return ReportIfQuiet(peer);
  const auto it = peer.held.find(sequence);
  if (!ok) return Lose(it->second.envelope.process, "fetching a payload from it failed");
  it->second.ready = true;
  DeliverChannel(peer, it->second.envelope.channel);
}

void ReceiveQueue::DeliverChannel(Peer& peer, uint64_t channel) {
  const auto it = peer.channels.find(channel);
  std::deque<uint64_t>& queue = it->second;
  while (!queue.empty()) {
    const auto first = peer.held.find(queue.front());
    if (!first->second.ready) return;
    if (!first->second.dropped) Deliver(first->second.envelope, first->second.bytes);
    peer.held.erase(first);
    queue.pop_front();
  }
  peer.channels.erase(it);
  if (peer.disconnected && peer.held.empty()) Lose(static_cast<int>(&peer - peers_.data()), "it disconnected");
}

void ReceiveQueue::Deliver(const Envelope& envelope, size_t bytes) {
  if (!muted_) receiver_->OnDelivered(MessageOf(envelope, bytes));
}

void ReceiveQueue::Reject() {
  ++rejected_;
  if (rejected_ == 1) first_rejected_ = Clock::now();
  if (warned_ == 0 || Clock::now() - last_warning_ >= warn_every_) WarnOfRejected();
}

void ReceiveQueue::WarnOfRejected() {
  last_warning_ = Clock::now();
  warned_ = rejected_;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(last_warning_ - first_rejected_).count();
  std::fprintf(
      stderr,
      "jaxcomm: process %d has dropped %llu message(s) that do not belong to this job, the first %lld s ago: another "
      "program uses its port, see docs/guide/security.md\n",
      process_, static_cast<unsigned long long>(warned_), static_cast<long long>(seconds));
}

void ReceiveQueue::Mute() {
  muted_ = true;
  if (rejected_ > warned_) WarnOfRejected();
  for (Peer& peer : peers_) {
    // Early messages keep their sequence numbers, so that later ones are still announced.
    for (auto it = peer.held.begin(); it != peer.held.end();) {
      it->second.data.reset();
      it->second.remote.reset();
      it = it->first < peer.next ? peer.held.erase(it) : std::next(it);
    }
    peer.channels.clear();
  }
}

void ReceiveQueue::Lose(int process, const std::string& why) {
  Peer& peer = peers_[process];
  if (peer.lost) return;
  if (peer.disconnected) {
    // All messages of the peer have been announced. Those whose payloads have arrived are still delivered.
    bool all_here = !peer.held.empty();
    for (const auto& [sequence, held] : peer.held) all_here = all_here && (held.ready || !held.remote);
    if (all_here) return;
  }
  peer.lost = true;
  peer.why = why;
  peer.held.clear();
  peer.channels.clear();
  ReportIfQuiet(peer);
}

void ReceiveQueue::ReportIfQuiet(Peer& peer) {
  if (peer.num_fetches > 0 || peer.reported) return;
  peer.reported = true;
  if (!muted_) receiver_->OnPeerLost(static_cast<int>(&peer - peers_.data()), peer.why);
}

}  // namespace jaxcomm
