#include "transport/tcp_network.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "common/sha256.h"
#include "transport/shared_memory.h"

namespace jaxcomm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kVersion = 1;  // of the protocol
constexpr char kMagic[8] = {'j', 'a', 'x', 'c', 'o', 'm', 'm', 'T'};
constexpr std::chrono::seconds kProofLimit{2};
constexpr size_t kNumSlots = 16;  // of kMaxBulkBytes in the memory of a connection
constexpr int kChunksPerTurn = 4;
constexpr size_t kMaxQueuedBytes = 64 << 20;

// Event ids of what is no connection.
constexpr int kWakeEvent = -1, kListenerEvent = -2, kLocalListenerEvent = -3;

// Kinds of frames of the network itself.
constexpr uint32_t kMemoryFrame = 1 << 16;  // brings the descriptor of the shared memory
constexpr uint32_t kSlotFreeFrame = 2 << 16;
constexpr uint32_t kBulkFlag = 1U << 31;  // the payload has no tag
constexpr uint32_t kSlotFlag = 1U << 30;  // and is in slot `slot` of the shared memory

// Messages of the handshake, of a fixed size each.
struct Hello {  // server to client
  char magic[8];
  uint32_t version;
  uint32_t reserved;
  uint8_t nonce[32];
};
struct Proof {  // client to server
  Hello hello;
  uint64_t incarnation;
  uint64_t server_incarnation;
  char name[kMaxNameBytes];
  char server_name[kMaxNameBytes];
  uint8_t tag[32];
};
enum class Answer : uint32_t { kAccepted, kWrongVersion, kWrongSecret, kOtherIncarnation };
struct Reply {  // server to client
  Answer answer;
  uint32_t version;
  uint8_t tag[32];
};
static_assert(sizeof(Hello) + sizeof(Proof) <= 1024, "a stranger sends at most 1 KiB");

struct Header {
  Frame frame;
  uint32_t slot;
  uint32_t reserved;
  uint8_t tag[16];
};
static_assert(sizeof(Header) == 48, "no padding goes over the wire");

std::string Bytes(const void* data, size_t bytes) { return {static_cast<const char*>(data), bytes}; }

void FillRandom(void* data, size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = getrandom(at, bytes, 0);
    if (got < 0) continue;  // interrupted
    at += got;
    bytes -= static_cast<size_t>(got);
  }
}

std::string Hex(uint64_t number) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(number));
  return text;
}

Status LastError(const std::string& what) { return UnavailableError(what + ": " + std::strerror(errno)); }

bool ValidName(const std::string& name) {
  return !name.empty() && name.size() < kMaxNameBytes &&
         std::all_of(
             name.begin(), name.end(),
             [](char c) {
               return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || ('0' <= c && c <= '9') || c == '.' ||
                      c == '_' || c == '-';
             });
}

sockaddr_un LocalAddress(const std::string& name, socklen_t* bytes) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = "jaxcomm-" + name;  // abstract: after a zero byte
  std::copy_n(path.begin(), std::min(path.size(), sizeof address.sun_path - 1), address.sun_path + 1);
  *bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
  return address;
}

using AddressInfo = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// The interface `host` in digits.
StatusOr<AddressInfo> Numeric(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) return InvalidArgumentError(host + ":" + port + " is no address: " + gai_strerror(error));
  return AddressInfo(found, &freeaddrinfo);
}

}  // namespace

struct TcpNetwork::Connection {
  enum class State : uint8_t { kConnecting, kHello, kProof, kReply, kOpen };

  int peer = -1;
  int fd = -1;
  bool client = false;
  bool local = false;
  State state = State::kHello;
  Clock::time_point deadline;
  EndpointAddress server;  // at the client
  std::string peer_name;
  std::string why;  // it ended; empty: it lives
  bool busy = false;
  bool watched_for_room = false;

  Hello hello{};
  Proof proof{};
  Hmac key;  // of this connection
  uint64_t sent = 0;
  uint64_t received = 0;

  std::vector<char> in;  // the message or control payload that is arriving
  size_t have = 0;       // of it, or of the payload
  bool in_payload = false;
  Header header{};
  char* sink = nullptr;  // of the payload
  int incoming_fd = -1;

  std::vector<char> out;
  size_t out_begin = 0;
  size_t out_end = 0;
  int outgoing_fd = -1;

  std::unique_ptr<SharedMemory> memory;
  std::vector<uint32_t> free_slots;  // at the server

  char* Extend(size_t bytes) {
    if (out_begin == out_end) out_begin = out_end = 0;
    if (out.size() < out_end + bytes) out.resize(std::max(out_end + bytes, 2 * out.size()));
    out_end += bytes;
    return out.data() + out_end - bytes;
  }
  void Put(const void* data, size_t bytes) {
    if (bytes > 0) std::memcpy(Extend(bytes), data, bytes);
  }
  size_t queued() const { return out_end - out_begin; }

  std::array<uint8_t, 16> TagOf(const Header& header, const char* payload, uint64_t number, bool from_client) const {
    Hmac mac = key;
    const uint64_t numbers[2] = {number, from_client ? 1U : 0U};
    mac.Update(numbers, sizeof numbers);
    mac.Update(&header, offsetof(Header, tag));
    if (payload != nullptr) mac.Update(payload, header.frame.bytes);
    const Digest digest = mac.Finish();
    std::array<uint8_t, 16> tag;
    std::copy_n(digest.begin(), tag.size(), tag.begin());
    return tag;
  }

  ~Connection() {
    for (const int each : {fd, incoming_fd}) {
      if (each >= 0) close(each);
    }
  }
};

StatusOr<EndpointAddress> EndpointAddress::Parse(const std::string& text) {
  const auto fail = [&] {
    return InvalidArgumentError("'" + text.substr(0, 200) + "' is no address of an endpoint (Endpoint.address)");
  };
  const std::string scheme = "tcp://";
  if (text.compare(0, scheme.size(), scheme) != 0) return fail();
  std::vector<std::string> parts;
  for (size_t begin = scheme.size(); begin <= text.size();) {
    const size_t end = std::min(text.find('/', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  const size_t colon = parts[0].rfind(':');
  if (parts.size() != 4 || colon == std::string::npos || !ValidName(parts[1]) || parts[2].size() != 16 ||
      parts[2].find_first_not_of("0123456789abcdef") != std::string::npos || parts[3].size() > 32) {
    return fail();
  }
  EndpointAddress address;
  address.host = parts[0].substr(0, colon);
  address.port = parts[0].substr(colon + 1);
  if (address.host.size() > 2 && address.host.front() == '[') {
    address.host = address.host.substr(1, address.host.size() - 2);
  }
  address.name = parts[1];
  address.incarnation = std::strtoull(parts[2].c_str(), nullptr, 16);
  address.local = parts[3];
  return address;
}

TcpNetwork::TcpNetwork(const Options& options, FrameReceiver* receiver) : options_(options), receiver_(receiver) {}

StatusOr<std::unique_ptr<TcpNetwork>> TcpNetwork::Listen(const Options& options, FrameReceiver* receiver) {
  std::unique_ptr<TcpNetwork> network(new TcpNetwork(options, receiver));
  JAXCOMM_RETURN_IF_ERROR(network->Open());
  return network;
}

Status TcpNetwork::Open() {
  if (!ValidName(options_.name)) {
    return InvalidArgumentError("the name of an endpoint has 1 to 63 letters, digits, '.', '_' or '-', got '" +
                                options_.name.substr(0, 80) + "'");
  }
  FillRandom(&incarnation_, sizeof incarnation_);
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) return LastError("cannot wait for sockets");
  StatusOr<AddressInfo> numeric = Numeric(options_.host, options_.port);
  JAXCOMM_RETURN_IF_ERROR(numeric.status());
  const AddressInfo found = *std::move(numeric);
  const std::string where = options_.host + ":" + options_.port;
  listener_ = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (listener_ < 0 || setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(listener_, found->ai_addr, found->ai_addrlen) != 0 || listen(listener_, 128) != 0) {
    return LastError("cannot listen on " + where);
  }
  sockaddr_storage own{};
  socklen_t bytes = sizeof own;
  char port[16];
  if (getsockname(listener_, reinterpret_cast<sockaddr*>(&own), &bytes) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&own), bytes, nullptr, 0, port, sizeof port, NI_NUMERICSERV) != 0) {
    return LastError("cannot tell the port of " + where);
  }
  std::vector<std::pair<int, int>> watched = {{wake_, kWakeEvent}, {listener_, kListenerEvent}};
  if (options_.shared_memory) {
    uint64_t random[2];
    FillRandom(random, sizeof random);
    local_name_ = Hex(random[0]) + Hex(random[1]);
    socklen_t size = 0;
    const sockaddr_un address = LocalAddress(local_name_, &size);
    local_listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (local_listener_ < 0 || bind(local_listener_, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
        listen(local_listener_, 128) != 0) {
      return LastError("cannot listen on a Unix socket");
    }
    watched.emplace_back(local_listener_, kLocalListenerEvent);
  }
  for (const auto& [fd, id] : watched) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = id;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) return LastError("cannot watch a socket");
  }
  const bool v6 = options_.host.find(':') != std::string::npos;
  address_ = "tcp://" + (v6 ? "[" + options_.host + "]" : options_.host) + ":" + port + "/" + options_.name + "/" +
             Hex(incarnation_) + "/" + local_name_;
  return OkStatus();
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

StatusOr<int> TcpNetwork::Connect(const std::string& address) {
  StatusOr<EndpointAddress> server = EndpointAddress::Parse(address);
  JAXCOMM_RETURN_IF_ERROR(server.status());
  // The Unix socket of an endpoint on another host or in another network namespace cannot be found.
  if (options_.shared_memory && !server->local.empty()) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    socklen_t bytes = 0;
    const sockaddr_un local = LocalAddress(server->local, &bytes);
    if (fd >= 0 && connect(fd, reinterpret_cast<const sockaddr*>(&local), bytes) == 0) {
      const int peer = Add(fd, true, true);
      connections_[peer]->server = *std::move(server);
      return peer;
    }
    if (fd >= 0) close(fd);
  }
  StatusOr<AddressInfo> numeric = Numeric(server->host, server->port);
  JAXCOMM_RETURN_IF_ERROR(numeric.status());
  const AddressInfo found = *std::move(numeric);
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return LastError("cannot open a socket");
  const bool refused = connect(fd, found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS;
  const std::string why = refused ? std::strerror(errno) : "";
  const int peer = Add(fd, true, false);
  Connection& c = *connections_[peer];
  c.state = Connection::State::kConnecting;
  c.server = *std::move(server);
  Watch(c);
  if (refused) Drop(peer, "cannot connect: " + why);
  return peer;
}

int TcpNetwork::Add(int fd, bool client, bool local) {
  auto c = std::make_unique<Connection>();
  const int peer = next_peer_++;
  c->peer = peer;
  c->fd = fd;
  c->client = client;
  c->local = local;
  c->deadline = Clock::now() + kProofLimit;
  c->in.resize(client ? sizeof(Hello) : sizeof(Proof));
  if (!local) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = peer;
  const bool watched = epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0;
  connections_[peer] = std::move(c);
  if (!watched) Drop(peer, "cannot watch its socket");
  return peer;
}

void TcpNetwork::AcceptAll(int listener, bool local) {
  for (int turn = 0; turn < 256; ++turn) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE) usleep(1000);  // the strangers that hold descriptors time out
      return;
    }
    int strangers = 0;
    Connection* oldest = nullptr;
    for (const auto& [peer, c] : connections_) {
      if (c->client || c->state == Connection::State::kOpen || !c->why.empty()) continue;
      if (oldest == nullptr) oldest = c.get();
      ++strangers;
    }
    if (strangers >= options_.max_strangers) {
      Drop(oldest->peer, "too many connections without a proof");
      EndLost();
    }
    Connection& c = *connections_[Add(fd, false, local)];
    c.state = Connection::State::kProof;
    std::memcpy(c.hello.magic, kMagic, sizeof kMagic);
    c.hello.version = kVersion;
    FillRandom(c.hello.nonce, sizeof c.hello.nonce);
    c.Put(&c.hello, sizeof c.hello);
    Flush(c);
  }
}

void TcpNetwork::OnHello(Connection& c) {
  std::memcpy(&c.hello, c.in.data(), sizeof c.hello);
  if (std::memcmp(c.hello.magic, kMagic, sizeof kMagic) != 0) return Drop(c.peer, "it is no endpoint of jaxcomm");
  if (c.hello.version != kVersion) {
    return Drop(c.peer, "it speaks version " + std::to_string(c.hello.version) + " of the protocol, this endpoint " +
                            std::to_string(kVersion));
  }
  std::memcpy(c.proof.hello.magic, kMagic, sizeof kMagic);
  c.proof.hello.version = kVersion;
  FillRandom(c.proof.hello.nonce, sizeof c.proof.hello.nonce);
  c.proof.incarnation = incarnation_;
  c.proof.server_incarnation = c.server.incarnation;
  std::copy(options_.name.begin(), options_.name.end(), c.proof.name);
  std::copy(c.server.name.begin(), c.server.name.end(), c.proof.server_name);
  const std::string said = Bytes(&c.hello, sizeof c.hello) + Bytes(&c.proof, offsetof(Proof, tag));
  const Digest tag = Hmac(options_.secret).Of("client" + said);
  std::copy(tag.begin(), tag.end(), c.proof.tag);
  c.Put(&c.proof, sizeof c.proof);
  c.state = Connection::State::kReply;
  c.in.resize(sizeof(Reply));
  Flush(c);
}

void TcpNetwork::OnProof(Connection& c) {
  std::memcpy(&c.proof, c.in.data(), sizeof c.proof);
  const std::string said = Bytes(&c.hello, sizeof c.hello) + Bytes(&c.proof, offsetof(Proof, tag));
  const Hmac secret(options_.secret);
  const Digest expected = secret.Of("client" + said);
  Reply reply{};
  reply.version = kVersion;
  if (std::memcmp(c.proof.hello.magic, kMagic, sizeof kMagic) != 0) return Drop(c.peer, "no proof");
  if (c.proof.hello.version != kVersion) {
    reply.answer = Answer::kWrongVersion;
  } else if (!SameBytes(expected.data(), c.proof.tag, expected.size())) {
    reply.answer = Answer::kWrongSecret;
  } else if (c.proof.server_incarnation != incarnation_ ||
             std::string(c.proof.server_name, strnlen(c.proof.server_name, kMaxNameBytes)) != options_.name) {
    reply.answer = Answer::kOtherIncarnation;
  } else {
    const Digest tag = secret.Of("server" + said);
    std::copy(tag.begin(), tag.end(), reply.tag);
  }
  c.Put(&reply, sizeof reply);
  Flush(c);
  if (reply.answer != Answer::kAccepted) return Drop(c.peer, "wrong proof");
  c.peer_name.assign(c.proof.name, strnlen(c.proof.name, kMaxNameBytes));
  BecomeOpen(c);
  if (!c.local || !options_.shared_memory) return;
  StatusOr<std::unique_ptr<SharedMemory>> memory = SharedMemory::Create(kNumSlots * kMaxBulkBytes);
  if (!memory.ok()) return;  // payloads go over the socket
  c.memory = *std::move(memory);
  c.outgoing_fd = c.memory->fd();
  for (uint32_t slot = 0; slot < kNumSlots; ++slot) c.free_slots.push_back(slot);
  Queue(c, {kMemoryFrame, 0, 0, 0}, nullptr);
}

void TcpNetwork::OnReply(Connection& c) {
  Reply reply;
  std::memcpy(&reply, c.in.data(), sizeof reply);
  const std::string said = Bytes(&c.hello, sizeof c.hello) + Bytes(&c.proof, offsetof(Proof, tag));
  const Digest expected = Hmac(options_.secret).Of("server" + said);
  switch (reply.answer) {
    case Answer::kAccepted:
      if (!SameBytes(expected.data(), reply.tag, expected.size())) {
        return Drop(c.peer, "it does not know the secret of this endpoint");
      }
      c.peer_name = c.server.name;
      return BecomeOpen(c);
    case Answer::kWrongVersion:
      return Drop(c.peer, "it speaks version " + std::to_string(reply.version) + " of the protocol, this endpoint " +
                              std::to_string(kVersion));
    case Answer::kWrongSecret:
      return Drop(c.peer, "its secret is another one");
    case Answer::kOtherIncarnation:
      return Drop(c.peer, "it has been restarted: ask for its new address");
  }
  Drop(c.peer, "it sent an unknown answer");
}

void TcpNetwork::BecomeOpen(Connection& c) {
  const std::string said = Bytes(&c.hello, sizeof c.hello) + Bytes(&c.proof, offsetof(Proof, tag));
  const Digest key = Hmac(options_.secret).Of("connection" + said);
  c.key = Hmac(Bytes(key.data(), key.size()));
  c.state = Connection::State::kOpen;
  c.in.clear();
  receiver_->OnPeer(c.peer, c.client);
}

void TcpNetwork::Queue(Connection& c, Frame frame, const void* payload) {
  Header header{frame, 0, 0, {}};
  const auto tag = c.TagOf(header, static_cast<const char*>(payload), c.sent++, c.client);
  std::copy(tag.begin(), tag.end(), header.tag);
  c.Put(&header, sizeof header);
  c.Put(payload, frame.bytes);
  if (c.queued() > kMaxQueuedBytes) return Drop(c.peer, "it does not read what it has asked for");
  Flush(c);
}

void TcpNetwork::Send(int peer, Frame frame, const void* payload) {
  if (Connection* c = Find(peer)) Queue(*c, frame, payload);
}

bool TcpNetwork::HasRoom(int peer) const {
  const Connection* c = Find(peer);
  if (c == nullptr || c->state != Connection::State::kOpen || c->queued() >= kMaxBulkBytes) return false;
  return c->memory == nullptr || !c->free_slots.empty();
}

void TcpNetwork::SendBulk(int peer, Frame frame, const std::function<void(char*)>& fill) {
  Connection* c = Find(peer);
  if (c == nullptr) return;
  frame.kind |= kBulkFlag;
  Header header{frame, 0, 0, {}};
  if (c->memory != nullptr) {
    header.frame.kind |= kSlotFlag;
    header.slot = c->free_slots.back();
    c->free_slots.pop_back();
    fill(c->memory->data() + header.slot * kMaxBulkBytes);
  }
  const auto tag = c->TagOf(header, nullptr, c->sent++, c->client);
  std::copy(tag.begin(), tag.end(), header.tag);
  c->Put(&header, sizeof header);
  if (c->memory == nullptr) fill(c->Extend(frame.bytes));
  traffic_[c->memory != nullptr ? 1 : 0].sent_bytes += frame.bytes;
  Flush(*c);
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
  for (int* fd : {&listener_, &local_listener_}) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
  }
  for (const auto& [peer, c] : connections_) Drop(peer, why);
  EndLost();
}

void TcpNetwork::Watch(Connection& c) {
  const bool wanted = c.queued() > 0 || c.state == Connection::State::kConnecting;
  if (wanted == c.watched_for_room) return;
  c.watched_for_room = wanted;
  epoll_event event{};
  event.events = EPOLLIN | (wanted ? EPOLLOUT : 0U);
  event.data.fd = c.peer;
  epoll_ctl(epoll_, EPOLL_CTL_MOD, c.fd, &event);
}

void TcpNetwork::Flush(Connection& c) {
  while (c.queued() > 0 && c.why.empty() && c.state != Connection::State::kConnecting) {
    iovec piece = {c.out.data() + c.out_begin, c.queued()};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
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
    c.out_begin += static_cast<size_t>(sent);
  }
  Watch(c);
}

bool TcpNetwork::ReceiveHandshake(Connection& c) {
  const ssize_t got = recv(c.fd, c.in.data() + c.have, c.in.size() - c.have, MSG_DONTWAIT);
  if (got == 0) Drop(c.peer, "the connection ended before the proof");
  if (got < 0 && errno != EAGAIN && errno != EINTR) Drop(c.peer, std::strerror(errno));
  if (got <= 0) return false;
  c.have += static_cast<size_t>(got);
  if (c.have < c.in.size()) return false;
  c.have = 0;
  if (c.state == Connection::State::kHello) {
    OnHello(c);
  } else if (c.state == Connection::State::kProof) {
    OnProof(c);
  } else {
    OnReply(c);
  }
  return c.why.empty();
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
    traffic_[in_slot ? 1 : 0].received_bytes += frame.bytes;
    if (in_slot) {
      receiver_->OnFrame(c.peer, frame, c.memory->data() + c.header.slot * kMaxBulkBytes);
      Queue(c, {kSlotFreeFrame, 0, c.header.slot, 0}, nullptr);
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
}

void TcpNetwork::Wait(int timeout_ms) {
  epoll_event events[64];
  const int found = epoll_wait(epoll_, events, 64, timeout_ms);
  events_.clear();
  for (int i = 0; i < found; ++i) events_.emplace_back(int{events[i].data.fd}, uint32_t{events[i].events});
}

void TcpNetwork::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof one);
}

void TcpNetwork::Progress() {
  for (const auto& [id, happened] : events_) {
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
  events_.clear();
  more_room_ = false;
  for (const auto& [peer, c] : connections_) {
    if (c->busy && c->why.empty()) OfferRoom(*c);
  }
  if (more_room_) Wake();
  EndLate();
  EndLost();
}

void TcpNetwork::EndLate() {
  const Clock::time_point now = Clock::now();
  for (const auto& [peer, c] : connections_) {
    if (c->state == Connection::State::kOpen || now < c->deadline) continue;
    Drop(peer, c->state == Connection::State::kConnecting ? "it does not answer" : "no proof of the secret within 2 s");
  }
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
