// The relay between a client in this process and a TCP server that is late, answers, and ends.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include "../../ffi/transport/relay.h"
#include "../check.h"
#include "forked_node.h"

namespace jaxcomm {
namespace {

// Waits for data fail after a minute.
int Patient(int fd) {
  const timeval limit{60, 0};
  CHECK(fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) == 0);
  return fd;
}

int Connect(const std::string& name) {
  const int fd = Patient(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  CHECK(connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0);
  return fd;
}

void Send(int fd, const std::string& text) {
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t bytes = send(fd, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    CHECK(bytes > 0);
    sent += static_cast<size_t>(bytes);
  }
}

std::string Receive(int fd, size_t bytes) {
  std::string text(bytes, 0);
  CHECK(recv(fd, text.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes));
  return text;
}

bool Ended(int fd) {
  char byte;
  return recv(fd, &byte, 1, 0) == 0;
}

// More than the buffers of sockets hold, so the relay copies it in parts.
std::string Long(int seed) {
  std::string text(8 << 20, 0);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>((i * 7 + i / 251) + static_cast<size_t>(seed));
  return text;
}

// Sends a signal to all threads but the calling one.
void InterruptOthers() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    const pid_t task = std::stoi(entry.path().filename().string());
    if (task != gettid()) syscall(SYS_tgkill, getpid(), task, SIGUSR1);
  }
}

// A port that is bound, but not listened on yet.
int Bind(int* port) {
  const int listener = Patient(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  CHECK(bind(listener, reinterpret_cast<const sockaddr*>(&address), length) == 0);
  CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  *port = ntohs(address.sin_port);
  return listener;
}

TEST_CASE("a relay that is closed to its server ends the server's connections and keeps those of the client") {
  const pid_t child = fork();  // a process has one relay
  if (child == 0) {
    int port = 0;
    const int listener = Bind(&port);
    CHECK(listen(listener, 16) == 0);
    const std::string name = ValueOf(StartRelay("127.0.0.1", std::to_string(port)));
    const int clients[] = {Connect(name), Connect(name)};
    const int servers[] = {Patient(accept(listener, nullptr, nullptr)), Patient(accept(listener, nullptr, nullptr))};
    CHECK(!RelayHasLostServer());
    CloseRelayToServer();
    CHECK(RelayHasLostServer());
    for (const int server : servers) CHECK(Ended(server));
    const int late = Connect(name);
    for (const int client : {clients[0], clients[1], late}) Send(client, "question");
    pollfd fds[] = {{clients[0], POLLIN, 0}, {clients[1], POLLIN, 0}, {late, POLLIN, 0}, {listener, POLLIN, 0}};
    CHECK(poll(fds, 4, 100) == 0);  // no answer, no end, and no new connection to the server
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

TEST_CASE("a relay waits for its server, carries bytes, and never breaks the connection when the server has gone") {
  int port = 0;
  const int listener = Bind(&port);
  const std::string name = ValueOf(StartRelay("127.0.0.1", std::to_string(port)));
  CHECK(!name.empty());
  const int early = Connect(name);
  CHECK(Ended(early) && !RelayHasLostServer());
  close(early);
  const int files = NumFiles();
  for (int i = 0; i < 5; ++i) {
    const int again = Connect(name);
    CHECK(Ended(again));
    close(again);
  }
  const auto start = std::chrono::steady_clock::now();
  while (NumFiles() > files) {  // the relay's threads close their sockets when they end
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  CHECK(listen(listener, 16) == 0);
  if (getuid() == 0) {  // another user gets no connection to the server
    const pid_t child = fork();
    if (child == 0) {
      if (setuid(65534) != 0) _exit(1);
      _exit(Ended(Connect(name)) ? 0 : 2);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    pollfd accepted = {listener, POLLIN, 0};
    CHECK(poll(&accepted, 1, 0) == 0);
  }
  const int client = Connect(name);
  const int server = Patient(accept(listener, nullptr, nullptr));
  Send(client, "question");
  CHECK(Receive(server, 8) == "question");
  Send(server, "answer");
  CHECK(Receive(client, 6) == "answer");
  const std::string there = Long(1), back = Long(2);
  std::thread sending_there([&] { Send(client, there); });
  std::thread sending_back([&] { Send(server, back); });
  std::thread receiving([&] { CHECK(Receive(server, there.size()) == there); });
  CHECK(Receive(client, back.size()) == back);
  sending_there.join();
  sending_back.join();
  receiving.join();

  // Signals interrupt the relay's threads in the middle of both directions.
  struct sigaction action{};
  action.sa_handler = [](int) {};  // without SA_RESTART
  struct sigaction before{};
  CHECK(sigaction(SIGUSR1, &action, &before) == 0);
  std::thread flooding([&] {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    Send(client, there);
  });
  for (int i = 0; i < 50; ++i) {  // the server reads nothing, so that the relay waits in its send
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    InterruptOthers();
  }
  CHECK(Receive(server, there.size()) == there);
  flooding.join();
  CHECK(sigaction(SIGUSR1, &before, nullptr) == 0);
  close(client);  // not a loss of the server
  CHECK(Ended(server));
  close(server);

  const int abandoned = Connect(name);
  const int going = Patient(accept(listener, nullptr, nullptr));
  Send(abandoned, "question");
  CHECK(Receive(going, 8) == "question");
  CHECK(!RelayHasLostServer());
  close(going);
  for (int i = 0; i < 60'000 && !RelayHasLostServer(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(RelayHasLostServer());
  const int late = Connect(name);
  Send(late, "question");
  Send(abandoned, "question");
  pollfd fds[] = {{abandoned, POLLIN, 0}, {late, POLLIN, 0}, {listener, POLLIN, 0}};
  CHECK(poll(fds, 3, 100) == 0);  // no answer, no end, and no new connection to the server
  for (const int fd : {abandoned, late, listener}) close(fd);
}

}  // namespace
}  // namespace jaxcomm
