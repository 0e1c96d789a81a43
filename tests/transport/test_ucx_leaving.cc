// A process that leaves the UCX network while a peer is late or dead.
//
// `test_ucx_leaving peer <folder> <process>`: the peer, in a process of its own (spawned_peer.h).
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "../../ffi/transport/ucx_network.h"
#include "network_contract.h"
#include "spawned_peer.h"

namespace jaxcomm {
namespace {

// More than the kernel buffers for a process that does not read.
constexpr int kMessages = 600;
constexpr size_t kBytes = 50'000;

std::unique_ptr<Network> MakeUcxNetwork(int process, double disconnect_s, Receiver* receiver) {
  UcxOptions options;
  options.eager_bytes = 64 << 10;
  if (disconnect_s > 0) options.disconnect_s = disconnect_s;
  if (const char* path = std::getenv("JAXCOMM_UCX_LIBRARY")) options.library = path;
  return ValueOf(OpenUcxNetwork(options, process, 2, 99, receiver));
}

// Succeeds if all messages have arrived when process 0 leaves.
int RunPeer(const std::string& folder) {
  TestProcess self(1);
  self.Join(MakeUcxNetwork(1, 0, &self));
  Meet(folder, self.network(), 1, 0);
  self.Send(0, 0, 0, 0);
  CHECK(self.WaitLost(0));
  return self.delivered() == kMessages ? 0 : 1;
}

// Process 0 and a connected peer that is stopped.
struct Pair {
  Folder folder;
  TestProcess self{0};
  pid_t peer = -1;

  explicit Pair(double disconnect_s) {
    self.Join(MakeUcxNetwork(0, disconnect_s, &self));
    peer = Spawn("peer", folder.path);
    Meet(folder.path, self.network(), 0, 1);
    CHECK(self.WaitDelivered(1));
    CHECK(kill(peer, SIGSTOP) == 0 && waitpid(peer, nullptr, WUNTRACED) == peer);
    for (uint64_t index = 0; index < kMessages; ++index) self.Send(1, 0, index, kBytes);
  }
  // Sends a signal to the peer after a while, during which the process leaves. Returns how long that takes.
  double Leave(int after_ms, int signal) {
    const auto start = Clock::now();
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(after_ms));
      kill(peer, signal);
    });
    self.Leave();
    const double seconds = Seconds(start);
    other.join();
    return seconds;
  }
};

TEST_CASE("a peer that is late by two seconds gets all messages of a process that leaves") {
  Pair pair(0);  // the default limit
  const double seconds = pair.Leave(2000, SIGCONT);
  int status = -1;
  CHECK(waitpid(pair.peer, &status, 0) == pair.peer);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(seconds >= 2);
}

TEST_CASE("a peer that dies while a process leaves does not hold it up") {
  Pair pair(80);
  CHECK(pair.Leave(200, SIGKILL) < 40);
  CHECK(waitpid(pair.peer, nullptr, 0) == pair.peer);
}

TEST_CASE("a peer that is stopped holds up a process that leaves no longer than the limit") {
  Pair pair(0.5);
  const auto start = Clock::now();
  pair.self.Leave();  // ctest's time limit ends a test that hangs
  CHECK(Seconds(start) < UcxOptions().disconnect_s);
  kill(pair.peer, SIGKILL);
  CHECK(waitpid(pair.peer, nullptr, 0) == pair.peer);
}

}  // namespace
}  // namespace jaxcomm

int main(int argc, char** argv) {
  if (argc > 2 && std::string(argv[1]) == "peer") return jaxcomm::RunPeer(argv[2]);
  return jaxcomm::test::RunCases(argc, argv);
}
