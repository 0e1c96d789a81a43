#include "cuda/runtime/liveness.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <utility>
#include <vector>

#include "cuda/nccl/failed_processes.h"
#include "cuda/nccl/first_contact.h"
#include "cuda/nccl/threads.h"
#include "cuda/runtime/communicator.h"

namespace jaxcomm::cuda {
namespace {

constexpr int kPollMs = 50;
constexpr size_t kMostBytes = 8192;  // of a line

std::atomic<bool> leaves{false};

bool MustEnd() { return !Threads::Sleep(std::chrono::milliseconds(0)); }

// One end of a connection.
struct Connection {
  int fd = -1;
  std::string received;  // the begin of a line
  bool open = true;
  bool said_bye = false;
  int32_t process = -1;  // the other one, once it is known
  uint64_t incarnation = 0;
};

void SetKeepalive(int fd) {
  const int on = 1, idle_s = 10, interval_s = 5, count = 4;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

// Lines are few and short, so they fit into the socket's buffer.
void Send(const Connection& to, std::string line) {
  std::replace(line.begin(), line.end(), '\n', ' ');
  line.resize(std::min(line.size(), kMostBytes - 1));
  line += '\n';
  send(to.fd, line.data(), line.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Calls f(line) for each line that has come.
template <typename F>
void Receive(Connection& from, F f) {
  char part[4096];
  for (ssize_t bytes; from.open && (bytes = recv(from.fd, part, sizeof part, MSG_DONTWAIT)) != -1;) {
    from.open = bytes > 0;
    from.received.append(part, static_cast<size_t>(bytes));
  }
  if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) from.open = false;
  for (size_t end; (end = from.received.find('\n')) != std::string::npos; from.received.erase(0, end + 1)) {
    f(from.received.substr(0, end));
  }
  if (from.received.size() > kMostBytes) from.open = false;
}

// The first word of a line, which is removed from it.
std::string Word(std::string& line) {
  const size_t end = line.find(' ');
  const std::string word = line.substr(0, end);
  line.erase(0, end == std::string::npos ? end : end + 1);
  return word;
}

void Note(bool left, uint64_t incarnation, const std::string& why) {
  left ? SetLeft(incarnation, why) : Communicator::NoteFailure(incarnation, why);
}

// If the process ends as planned, the operating system closes the connection, once no kernel of the process runs.
void Leave(const Connection& connection) { leaves ? Send(connection, "bye") : static_cast<void>(close(connection.fd)); }

class Server {
 public:
  Server(int fd, std::string token) : fd_(fd), token_(std::move(token)) {}

  void Run() {
    bool told = false;
    while (!MustEnd()) {
      std::vector<pollfd> fds = {{fd_, POLLIN, 0}};
      for (const Connection& connection : connections_) fds.push_back({connection.fd, POLLIN, 0});
      poll(fds.data(), fds.size(), kPollMs);
      if (fds[0].revents != 0) Accept();
      for (Connection& connection : connections_) {
        Receive(connection, [&](std::string line) { Handle(connection, std::move(line)); });
        if (!connection.open && connection.process >= 0) Announce(connection, "has ended");
      }
      RemoveClosed();
      const Status own = Communicator::OwnFailure();
      if (told || own.ok()) continue;
      told = true;
      Tell("failed", Incarnation(), "process 0 failed: " + own.message());
    }
    for (const Connection& connection : connections_) Leave(connection);
    close(fd_);
  }

 private:
  void Accept() {
    Connection made;
    made.fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
    if (made.fd < 0) return;
    SetKeepalive(made.fd);
    connections_.push_back(made);
  }

  void Handle(Connection& from, std::string line) {
    const std::string kind = Word(line);
    if (from.process < 0) {
      std::istringstream words(line);
      std::string token;
      words >> token >> from.process >> from.incarnation;
      if (kind != "hello" || token != token_ || !words) {
        from.process = -1;
        from.open = false;
        return;
      }
      Send(from, "hello " + std::to_string(Incarnation()));
      for (const std::string& told : told_) Send(from, told);
    } else if (kind == "bye") {
      from.said_bye = true;
    } else if (kind == "failed") {
      Announce(from, "failed: " + line);
    }
  }

  void Announce(const Connection& of, const std::string& what) {
    const std::string why = "process " + std::to_string(of.process) + " " + what;
    Tell(of.said_bye ? "left" : "failed", of.incarnation, why);
    Note(of.said_bye, of.incarnation, why);
  }

  void Tell(const std::string& kind, uint64_t incarnation, const std::string& why) {
    told_.push_back(kind + " " + std::to_string(incarnation) + " " + why);
    for (const Connection& connection : connections_) Send(connection, told_.back());
  }

  void RemoveClosed() {
    const auto closed = [](const Connection& connection) {
      if (!connection.open) close(connection.fd);
      return !connection.open;
    };
    connections_.erase(std::remove_if(connections_.begin(), connections_.end(), closed), connections_.end());
  }

  const int fd_;
  const std::string token_;
  std::vector<Connection> connections_;
  std::vector<std::string> told_;  // for processes that come later
};

// A connected socket; -1 with errno.
int Connect(const std::string& host, int port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return errno = EHOSTUNREACH, -1;
  int fd = -1;
  for (const addrinfo* at = found; at != nullptr && fd < 0; at = at->ai_next) {
    fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const timeval limit = {10, 0};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (fd < 0 || connect(fd, at->ai_addr, at->ai_addrlen) == 0) continue;
    close(fd);
    fd = -1;
  }
  freeaddrinfo(found);
  return fd;
}

void RunClient(const std::string& host, int port, const std::string& token, int32_t process) {
  Connection server;
  server.fd = Connect(host, port);
  if (server.fd < 0) {
    std::fprintf(stderr,
                 "jaxcomm: process %d can't connect to process 0 at %s, port %d (%s): the end of a process is found "
                 "after JAXCOMM_TIMEOUT_S only\n",
                 process, host.c_str(), port, std::strerror(errno));
    return;
  }
  SetKeepalive(server.fd);
  Send(server, "hello " + token + " " + std::to_string(process) + " " + std::to_string(Incarnation()));
  bool told = false;
  while (server.open && !MustEnd()) {
    pollfd fds = {server.fd, POLLIN, 0};
    poll(&fds, 1, kPollMs);
    Receive(server, [&](std::string line) {
      const std::string kind = Word(line);
      if (kind == "bye") server.said_bye = true;
      if (kind != "hello" && kind != "failed" && kind != "left") return;
      const uint64_t incarnation = std::strtoull(Word(line).c_str(), nullptr, 10);
      if (kind == "hello") server.incarnation = incarnation;
      if (kind != "hello" && incarnation != Incarnation()) Note(kind == "left", incarnation, line);
    });
    const Status own = Communicator::OwnFailure();
    if (told || own.ok()) continue;
    told = true;
    Send(server, "failed " + own.message());
  }
  if (!server.open) Note(server.said_bye, server.incarnation, "process 0 has ended");
  Leave(server);
}

}  // namespace

StatusOr<int> ServeLiveness(const std::string& token) {
  constexpr int kType = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
  int fd = socket(AF_INET6, kType, 0);
  // Of all interfaces. The port is at the same place in an address of IPv4, for kernels without IPv6.
  sockaddr_in6 address = {};
  socklen_t size = sizeof address;
  address.sin6_family = AF_INET6;
  if (fd < 0 && errno == EAFNOSUPPORT) {
    fd = socket(AF_INET, kType, 0);
    address.sin6_family = AF_INET;
    size = sizeof(sockaddr_in);
  } else {
    const int off = 0;
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  }
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (fd < 0 || bind(fd, any, size) != 0 || listen(fd, SOMAXCONN) != 0 || getsockname(fd, any, &size) != 0) {
    const std::string why = std::strerror(errno);
    if (fd >= 0) close(fd);
    return UnavailableError("process 0 can't listen for the other processes: " + why);
  }
  Threads::Start([fd, token] { Server(fd, token).Run(); });
  return ntohs(address.sin6_port);
}

void JoinLiveness(const std::string& host, int port, const std::string& token, int32_t process) {
  Threads::Start([=] { RunClient(host, port, token, process); });
}

void LeaveLiveness() { leaves = true; }

}  // namespace jaxcomm::cuda
