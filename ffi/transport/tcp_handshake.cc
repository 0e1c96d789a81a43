// How a connection begins: addresses, sockets, and the proof of the secret.
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

#include "transport/tcp_connection.h"

namespace jaxcomm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kMagic[8] = {'j', 'a', 'x', 'c', 'o', 'm', 'm', 'T'};
constexpr std::chrono::milliseconds kProofLimit{2000};
// Of a client, with the time until someone looks: an address at which nobody answers is lost within 2 s.
constexpr std::chrono::milliseconds kAnswerLimit{1900};

// Ends a connection to a host that has vanished, as errors of the socket: neither data nor probes are acknowledged.
void LimitSilence(int fd, int64_t max_silence_ms) {
  const int limit_ms = static_cast<int>(std::clamp<int64_t>(max_silence_ms, 2'000, 10'000'000));
  const int on = 1, idle_s = limit_ms / 2'000, interval_s = std::max(1, limit_ms / 4'000);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, sizeof limit_ms);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

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

Status TcpNetwork::Open() {
  if (!ValidName(options_.name)) {
    return InvalidArgumentError("the name of an endpoint has 1 to 63 letters, digits, '.', '_' or '-', got '" +
                                options_.name.substr(0, 80) + "'");
  }
  FillRandom(&incarnation_, sizeof incarnation_);
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) return ErrnoToStatus("cannot wait for sockets");
  StatusOr<AddressInfo> numeric = Numeric(options_.host, options_.port);
  JAXCOMM_RETURN_IF_ERROR(numeric.status());
  const AddressInfo found = *std::move(numeric);
  const std::string where = options_.host + ":" + options_.port;
  listener_ = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (listener_ < 0 || setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(listener_, found->ai_addr, found->ai_addrlen) != 0 || listen(listener_, 128) != 0) {
    return ErrnoToStatus("cannot listen on " + where);
  }
  sockaddr_storage own{};
  socklen_t bytes = sizeof own;
  char port[16];
  if (getsockname(listener_, reinterpret_cast<sockaddr*>(&own), &bytes) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&own), bytes, nullptr, 0, port, sizeof port, NI_NUMERICSERV) != 0) {
    return ErrnoToStatus("cannot tell the port of " + where);
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
      return ErrnoToStatus("cannot listen on a Unix socket");
    }
    watched.emplace_back(local_listener_, kLocalListenerEvent);
  }
  for (const auto& [fd, id] : watched) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = id;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) return ErrnoToStatus("cannot watch a socket");
  }
  const bool v6 = options_.host.find(':') != std::string::npos;
  address_ = "tcp://" + (v6 ? "[" + options_.host + "]" : options_.host) + ":" + port + "/" + options_.name + "/" +
             Hex(incarnation_) + "/" + local_name_;
  return OkStatus();
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
  if (fd < 0) return ErrnoToStatus("cannot open a socket");
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
  c->deadline = Clock::now() + (client ? kAnswerLimit : kProofLimit);
  c->in.resize(client ? sizeof(Hello) : sizeof(Proof));
  if (!local) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    LimitSilence(fd, options_.max_silence_ms);
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
    c.hello.version = kProtocolVersion;
    FillRandom(c.hello.nonce, sizeof c.hello.nonce);
    c.Put(&c.hello, sizeof c.hello);
    Flush(c);
  }
}

void TcpNetwork::OnHello(Connection& c) {
  std::memcpy(&c.hello, c.in.data(), sizeof c.hello);
  if (std::memcmp(c.hello.magic, kMagic, sizeof kMagic) != 0) return Drop(c.peer, "it is no endpoint of jaxcomm");
  if (c.hello.version != kProtocolVersion) {
    return Drop(c.peer, "it speaks version " + std::to_string(c.hello.version) + " of the protocol, this endpoint " +
                            std::to_string(kProtocolVersion));
  }
  std::memcpy(c.proof.hello.magic, kMagic, sizeof kMagic);
  c.proof.hello.version = kProtocolVersion;
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
  reply.version = kProtocolVersion;
  if (std::memcmp(c.proof.hello.magic, kMagic, sizeof kMagic) != 0) return Drop(c.peer, "no proof");
  if (c.proof.hello.version != kProtocolVersion) {
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
                              std::to_string(kProtocolVersion));
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
  c.by_peer = &traffic_[c.peer_name];
  c.in.clear();
  receiver_->OnPeer(c.peer, c.client);
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

void TcpNetwork::EndLate() {
  const Clock::time_point now = Clock::now();
  for (const auto& [peer, c] : connections_) {
    if (c->state == Connection::State::kOpen || now < c->deadline) continue;
    Drop(peer, c->state == Connection::State::kConnecting ? "it does not answer" : "no proof of the secret within 2 s");
  }
}

}  // namespace jaxcomm
