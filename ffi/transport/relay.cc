#include "transport/relay.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace jaxcomm {
namespace {

std::atomic<bool> lost{false};

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  Socket(const Socket&) = delete;
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }

 private:
  const int fd_;
};
using SharedSocket = std::shared_ptr<Socket>;

struct Servers {
  std::mutex mutex;
  std::vector<std::weak_ptr<Socket>> sockets;  // guarded by mutex
};
// Never destroyed: the threads may run until the process has ended.
Servers& TheServers() {
  static Servers* const servers = new Servers;
  return *servers;
}

// Copies until `from` is closed or `to` fails.
void Copy(int from, int to) {
  char buffer[1 << 16];
  for (;;) {
    const ssize_t bytes = recv(from, buffer, sizeof(buffer), 0);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes <= 0) return;
    for (ssize_t sent = 0; sent < bytes;) {
      const ssize_t more = send(to, buffer + sent, static_cast<size_t>(bytes - sent), MSG_NOSIGNAL);
      if (more < 0 && errno != EINTR) return;
      sent += more > 0 ? more : 0;
    }
  }
}

int ConnectTo(const std::string& host, const std::string& port) {
  addrinfo hints{}, *addresses = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &addresses) != 0) return -1;
  int fd = -1;
  for (const addrinfo* address = addresses; address != nullptr && fd < 0; address = address->ai_next) {
    fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, address->ai_addr, address->ai_addrlen) != 0) {
      close(fd);
      fd = -1;
    }
  }
  freeaddrinfo(addresses);
  const int one = 1;
  if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  return fd;
}

void Serve(SharedSocket client, const std::string& host, const std::string& port) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(client->fd(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != getuid()) return;
  const auto server = std::make_shared<Socket>(lost ? -1 : ConnectTo(host, port));
  if (server->fd() < 0 && !lost) return;  // the server has not started yet
  {
    const std::lock_guard<std::mutex> lock(TheServers().mutex);
    if (lost && server->fd() >= 0) shutdown(server->fd(), SHUT_RDWR);  // CloseRelayToServer() came in between
    std::vector<std::weak_ptr<Socket>>& sockets = TheServers().sockets;
    const auto closed = [](const std::weak_ptr<Socket>& held) { return held.expired(); };
    sockets.erase(std::remove_if(sockets.begin(), sockets.end(), closed), sockets.end());
    sockets.push_back(server);
  }
  if (server->fd() >= 0) {
    std::thread([client, server] {
      Copy(client->fd(), server->fd());
      shutdown(server->fd(), SHUT_RDWR);  // the client has ended the connection
    }).detach();
    Copy(server->fd(), client->fd());
  }
  // If the client closed the connection itself, the server is not lost, and nothing must be kept open.
  char byte;
  const ssize_t peeked = recv(client->fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (peeked == 0 || (peeked < 0 && errno != EAGAIN)) return;
  lost = true;
  while (recv(client->fd(), &byte, 1, 0) > 0) {
  }
}

}  // namespace

bool RelayHasLostServer() { return lost; }

void CloseRelayToServer() {
  const std::lock_guard<std::mutex> lock(TheServers().mutex);
  lost = true;
  for (const std::weak_ptr<Socket>& held : TheServers().sockets) {
    if (const SharedSocket server = held.lock(); server && server->fd() >= 0) shutdown(server->fd(), SHUT_RDWR);
  }
}

StatusOr<std::string> StartRelay(const std::string& host, const std::string& port) {
  uint64_t number = 0;
  if (getrandom(&number, sizeof(number), 0) != sizeof(number)) {
    return ErrnoToStatus("getrandom failed");
  }
  char name[32];
  std::snprintf(name, sizeof(name), "jaxcomm-%016llx", static_cast<unsigned long long>(number));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path + 1, name);  // after a leading zero: not a file; the name disappears with the socket
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + std::strlen(name));
  const auto listener = std::make_shared<Socket>(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (listener->fd() < 0 || bind(listener->fd(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(listener->fd(), 16) != 0) {
    return ErrnoToStatus("cannot listen on a Unix socket");
  }
  std::thread([listener, host, port] {
    for (;;) {
      const int client = accept4(listener->fd(), nullptr, nullptr, SOCK_CLOEXEC);
      if (client >= 0) {
        std::thread(Serve, std::make_shared<Socket>(client), host, port).detach();
      } else if (errno != EINTR && errno != ECONNABORTED) {
        usleep(100'000);  // for example, too many open files
      }
    }
  }).detach();
  return std::string(name);
}

}  // namespace jaxcomm
