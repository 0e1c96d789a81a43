#include "transport/tcp_network.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/tcp_connection.h"

namespace jaxcomm {
namespace {

constexpr int kChunksPerTurn = 4;
constexpr size_t kMaxQueuedBytes = 64 << 20;
constexpr size_t kSmallBytes = 16 << 10;  // frames that wait for others, and go over the socket in any case

}  // namespace

TcpNetwork::TcpNetwork(const Options& options, FrameReceiver* receiver) : options_(options), receiver_(receiver) {}

StatusOr<std::unique_ptr<TcpNetwork>> TcpNetwork::Listen(const Options& options, FrameReceiver* receiver) {
  std::unique_ptr<TcpNetwork> network(new TcpNetwork(options, receiver));
  JAXCOMM_RETURN_IF_ERROR(network->Open());
  return network;
}

TcpNetwork::~TcpNetwork() {
  connections_.clear();
  for (const int fd : {listener_, local_listener_, wake_, epoll_}) {
    if (fd >= 0) close(fd);
  }
}

TcpNetwork::Connection* TcpNetwork::Find(int peer) const {
  const auto found = connections_.find(peer);
  return found == connections_.end() || !found->second->why.empty() ? nullptr : found->second.get();
}

std::string TcpNetwork::name_of(int peer) const {
  const Connection* c = Find(peer);
  return c != nullptr ? c->peer_name : "";
}

void TcpNetwork::Queue(Connection& c, Frame frame, const void* payload) {
  Header header{frame, 0, 0, {}};
  const auto tag = c.TagOf(header, static_cast<const char*>(payload), c.sent++, c.client);
  std::copy(tag.begin(), tag.end(), header.tag);
  c.Put(&header, sizeof header);
  c.Put(payload, frame.bytes);
  if (c.queued() > kMaxQueuedBytes) return Drop(c.peer, "it does not read what it has asked for");
  FlushSoon(c, frame.bytes);
}

// What Progress sends to a peer goes in one call of the kernel, which also wakes the peer once.
void TcpNetwork::FlushSoon(Connection& c, uint32_t bytes) {
  if (!progressing_ || bytes > kSmallBytes || c.queued() > kSmallBytes) Flush(c);
}

void TcpNetwork::Send(int peer, Frame frame, const void* payload) {
  if (Connection* c = Find(peer)) Queue(*c, frame, payload);
}

bool TcpNetwork::HasRoom(int peer) const {
  const Connection* c = Find(peer);
  if (c == nullptr || c->state != Connection::State::kOpen || c->queued() >= kMaxBulkBytes) return false;
  return c->memory == nullptr || !c->free_slots.empty();
}

void TcpNetwork::SendBulk(int peer, Frame frame, const char* payload, const std::function<void(char*)>& fill) {
  Connection* c = Find(peer);
  if (c == nullptr) return;
  frame.kind |= kBulkFlag;
  Header header{frame, 0, 0, {}};
  const bool small = frame.bytes <= kSmallBytes;
  const bool in_slot = c->memory != nullptr && !small;
  const auto write = [&](char* to) {
    if (payload == nullptr) return fill(to);
    std::memcpy(to, payload, frame.bytes);
  };
  if (in_slot) {
    header.frame.kind |= kSlotFlag;
    header.slot = c->free_slots.back();
    c->free_slots.pop_back();
    write(c->memory->data() + header.slot * kMaxBulkBytes);
  }
  const auto tag = c->TagOf(header, nullptr, c->sent++, c->client);
  std::copy(tag.begin(), tag.end(), header.tag);
  c->Put(&header, sizeof header);
  c->traffic().sent_bytes += frame.bytes;
  if (in_slot) return Flush(*c);
  if (payload != nullptr && !small) return Flush(*c, payload, frame.bytes);
  write(c->Extend(frame.bytes));
  FlushSoon(*c, frame.bytes);
}

void TcpNetwork::SetBusy(int peer, bool busy) {
  Connection* c = Find(peer);
  if (c == nullptr) return;
  c->busy = busy;
  if (busy && HasRoom(peer)) more_room_ = true;
}

void TcpNetwork::StopPlacing(int peer) {
  Connection* c = Find(peer);
  if (c == nullptr || !c->in_payload || c->sink == nullptr || c->sink == c->in.data()) return;
  c->in.resize(kMaxBulkBytes);
  c->sink = c->in.data();
  c->header.frame.kind = kBulkFlag;  // of no kind of the owner
}

void TcpNetwork::Drop(int peer, const std::string& why) {
  if (Connection* c = Find(peer)) {
    c->why = why;
    lost_ = true;
    Wake();
  }
}

void TcpNetwork::Close(const std::string& why) {
  for (const auto& [peer, c] : connections_) Drop(peer, why);
  EndLost();
  for (int* fd : {&listener_, &local_listener_, &wake_, &epoll_}) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
  }
}

void TcpNetwork::Watch(Connection& c) {
  const bool sends = c.queued() > 0 || c.state == Connection::State::kConnecting;
  const uint32_t wanted = (c.num_pollers == 0 ? EPOLLIN : 0U) | (sends ? EPOLLOUT : 0U);
  if (wanted == c.watched) return;
  c.watched = wanted;
  epoll_event event{};
  event.events = wanted;
  event.data.fd = c.peer;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, c.fd, &event);
}

void TcpNetwork::Flush(Connection& c, const char* more, size_t more_bytes) {
  while (c.queued() + more_bytes > 0 && c.why.empty() && c.state != Connection::State::kConnecting) {
    iovec pieces[] = {{c.out.data() + c.out_begin, c.queued()}, {const_cast<char*>(more), more_bytes}};
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = 2;
    alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
    if (c.outgoing_fd >= 0) {
      message.msg_control = space;
      message.msg_controllen = sizeof space;
      cmsghdr* control = CMSG_FIRSTHDR(&message);
      control->cmsg_level = SOL_SOCKET;
      control->cmsg_type = SCM_RIGHTS;
      control->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(control), &c.outgoing_fd, sizeof(int));
    }
    const ssize_t sent = sendmsg(c.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) Drop(c.peer, std::string("the connection ended: ") + std::strerror(errno));
      break;
    }
    c.outgoing_fd = -1;
    const size_t queued = std::min(static_cast<size_t>(sent), c.queued());
    c.out_begin += queued;
    more += static_cast<size_t>(sent) - queued;
    more_bytes -= static_cast<size_t>(sent) - queued;
  }
  c.Put(more, more_bytes);
  Watch(c);
}

bool TcpNetwork::ReceiveHeader(Connection& c) {
  iovec piece = {reinterpret_cast<char*>(&c.header) + c.have, sizeof c.header - c.have};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))];
  if (c.local && c.client && c.memory == nullptr) {
    message.msg_control = space;
    message.msg_controllen = sizeof space;
  }
  const ssize_t got = recvmsg(c.fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got == 0) Drop(c.peer, "the connection ended");
  if (got < 0 && errno != EAGAIN && errno != EINTR)
    Drop(c.peer, std::string("the connection ended: ") + std::strerror(errno));
  if (got <= 0) return false;
  if (message.msg_control != nullptr) {
    const cmsghdr* control = CMSG_FIRSTHDR(&message);
    if (control != nullptr && control->cmsg_level == SOL_SOCKET && control->cmsg_type == SCM_RIGHTS &&
        control->cmsg_len == CMSG_LEN(sizeof(int))) {
      if (c.incoming_fd >= 0) close(c.incoming_fd);
      std::memcpy(&c.incoming_fd, CMSG_DATA(control), sizeof(int));
    }
  }
  c.have += static_cast<size_t>(got);
  if (c.have < sizeof c.header) return false;
  c.have = 0;
  const Frame& frame = c.header.frame;
  const bool bulk = (frame.kind & kBulkFlag) != 0, in_slot = (frame.kind & kSlotFlag) != 0;
  // The tag of a control frame covers its payload, which has not arrived yet: only lengths are used before the check.
  if (frame.bytes > (bulk ? kMaxBulkBytes : kMaxControlBytes) ||
      (in_slot && (!bulk || c.memory == nullptr || !c.client || c.header.slot >= kNumSlots))) {
    Drop(c.peer, "it sent a frame of " + std::to_string(frame.bytes) + " bytes, which is not possible");
    return false;
  }
  if (bulk) {
    const auto tag = c.TagOf(c.header, nullptr, c.received++, !c.client);
    if (!SameBytes(tag.data(), c.header.tag, tag.size())) {
      Drop(c.peer, "it sent a frame with a wrong tag");
      return false;
    }
  }
  c.in_payload = true;
  c.sink = nullptr;
  if (in_slot) return true;
  if (bulk) {
    Frame of_owner = frame;
    of_owner.kind &= ~kBulkFlag;
    c.sink = receiver_->OnBulk(c.peer, of_owner);
  }
  if (c.sink == nullptr) {
    if (c.in.size() < frame.bytes) c.in.resize(frame.bytes);
    c.sink = c.in.data();
  }
  return c.why.empty();
}

bool TcpNetwork::ReceiveFrame(Connection& c) {
  if (!c.in_payload && !ReceiveHeader(c)) return false;
  const bool in_slot = (c.header.frame.kind & kSlotFlag) != 0;
  while (!in_slot && c.have < c.header.frame.bytes) {
    const ssize_t got = recv(c.fd, c.sink + c.have, c.header.frame.bytes - c.have, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) Drop(c.peer, "the connection ended");
    if (got < 0 && errno != EAGAIN) Drop(c.peer, std::string("the connection ended: ") + std::strerror(errno));
    if (got <= 0) return false;
    c.have += static_cast<size_t>(got);
  }
  c.have = 0;
  c.in_payload = false;
  Deliver(c);
  return c.why.empty();
}

void TcpNetwork::Deliver(Connection& c) {
  Frame frame = c.header.frame;
  if ((frame.kind & kBulkFlag) != 0) {
    const bool in_slot = (frame.kind & kSlotFlag) != 0;
    frame.kind &= ~(kBulkFlag | kSlotFlag);
    c.traffic().received_bytes += frame.bytes;
    if (in_slot) {
      receiver_->OnFrame(c.peer, frame, c.memory->data() + c.header.slot * kMaxBulkBytes);
      Queue(c, {kSlotFreeFrame, 0, c.header.slot, 0}, nullptr);
      Flush(c);
    } else {
      receiver_->OnFrame(c.peer, frame, c.sink == c.in.data() ? c.sink : nullptr);
    }
    return;
  }
  const char* payload = frame.bytes > 0 ? c.sink : nullptr;
  const auto tag = c.TagOf(c.header, payload, c.received++, !c.client);
  if (!SameBytes(tag.data(), c.header.tag, tag.size())) return Drop(c.peer, "it sent a frame with a wrong tag");
  if (frame.kind < kMemoryFrame) return receiver_->OnFrame(c.peer, frame, payload);
  if (frame.kind == kMemoryFrame && c.client && c.incoming_fd >= 0 && c.memory == nullptr) {
    StatusOr<std::unique_ptr<SharedMemory>> memory =
        SharedMemory::Map(std::exchange(c.incoming_fd, -1), kNumSlots * kMaxBulkBytes, "its shared memory");
    if (!memory.ok()) return Drop(c.peer, memory.status().message());
    c.memory = *std::move(memory);
    return;
  }
  const bool free = std::find(c.free_slots.begin(), c.free_slots.end(), frame.id) != c.free_slots.end();
  if (frame.kind == kSlotFreeFrame && !c.client && frame.id < kNumSlots && c.memory != nullptr && !free) {
    c.free_slots.push_back(static_cast<uint32_t>(frame.id));
    return;
  }
  Drop(c.peer, "it sent a frame of unknown kind " + std::to_string(frame.kind));
}

void TcpNetwork::Receive(Connection& c) {
  if (c.state == Connection::State::kConnecting) {
    int error = 0;
    socklen_t bytes = sizeof error;
    getsockopt(c.fd, SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error != 0) return Drop(c.peer, std::string("cannot connect: ") + std::strerror(error));
    c.state = Connection::State::kHello;
  }
  for (int turn = 0; turn < 2 * kChunksPerTurn; ++turn) {  // epoll repeats what is left
    if (!(c.state == Connection::State::kOpen ? ReceiveFrame(c) : ReceiveHandshake(c))) return;
  }
}

void TcpNetwork::OfferRoom(Connection& c) {
  for (int turn = 0; turn < kChunksPerTurn && c.busy && HasRoom(c.peer); ++turn) receiver_->OnRoom(c.peer);
  more_room_ = more_room_ || (c.busy && HasRoom(c.peer));
  waits_for_slot_ = waits_for_slot_ || (c.busy && c.memory != nullptr && c.free_slots.empty());
}

TcpNetwork::Events TcpNetwork::Wait(int timeout_ms) {
  epoll_event found[64];
  const int count = epoll_wait(epoll_, found, 64, timeout_ms);
  Events events;
  for (int i = 0; i < count; ++i) events.emplace_back(int{found[i].data.fd}, uint32_t{found[i].events});
  return events;
}

void TcpNetwork::SetPolled(int peer, bool polled) {
  Connection* c = Find(peer);
  if (c == nullptr) return;
  c->num_pollers += polled ? 1 : -1;
  Watch(*c);
}

TcpNetwork::Events TcpNetwork::Poll(int peer) const {
  const Connection* c = Find(peer);
  return c != nullptr && c->state == Connection::State::kOpen ? Events{{peer, EPOLLIN}} : Events();
}

void TcpNetwork::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof one);
}

void TcpNetwork::Progress(const Events& events) {
  progressing_ = true;
  for (const auto& [id, happened] : events) {
    if (id == kWakeEvent) {
      uint64_t count;
      [[maybe_unused]] const ssize_t got = read(wake_, &count, sizeof count);
    } else if (id == kListenerEvent || id == kLocalListenerEvent) {
      AcceptAll(id == kListenerEvent ? listener_ : local_listener_, id == kLocalListenerEvent);
    } else if (Connection* c = Find(id)) {
      if ((happened & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0 || c->state == Connection::State::kConnecting) Receive(*c);
      Flush(*c);
    }
  }
  more_room_ = false;
  waits_for_slot_ = false;
  for (const auto& [peer, c] : connections_) {
    if (c->busy && c->why.empty()) OfferRoom(*c);
  }
  progressing_ = false;
  for (const auto& [peer, c] : connections_) {
    if (c->queued() > 0 && c->why.empty()) Flush(*c);
  }
  if (more_room_) Wake();
  EndLate();
  EndLost();
}

void TcpNetwork::EndLost() {
  while (std::exchange(lost_, false)) {
    std::vector<std::unique_ptr<Connection>> ended;
    for (auto at = connections_.begin(); at != connections_.end();) {
      if (at->second->why.empty()) {
        ++at;
      } else {
        ended.push_back(std::move(at->second));
        at = connections_.erase(at);
      }
    }
    for (const auto& c : ended) {
      const bool stranger = !c->client && c->state != Connection::State::kOpen;
      if (stranger) {
        ++rejected_;
      } else {
        receiver_->OnLost(c->peer, c->why);
      }
    }
  }
}

}  // namespace jaxcomm
