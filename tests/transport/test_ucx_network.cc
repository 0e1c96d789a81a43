// The network between hosts: the contract over TCP within this process, a peer that is killed, stopped or late.
// Strangers at its ports: tests/multiprocess/test_strangers.py.
//
// JAXCOMM_UCX_LIBRARY: path of libucp, as for users; otherwise the system's. Without UCX, the test fails.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "../../ffi/transport/ucx_network.h"
#include "network_contract.h"
#include "spawned_peer.h"

namespace jaxcomm {
namespace {

std::unique_ptr<Network> MakeLeaving(double disconnect_s, int process, int num_processes, uint64_t token,
                                     Receiver* receiver) {
  UcxOptions options;
  options.eager_bytes = 64 << 10;  // the contract sends smaller and larger payloads
  options.disconnect_s = disconnect_s;
  if (const char* path = std::getenv("JAXCOMM_UCX_LIBRARY")) options.library = path;
  return ValueOf(OpenUcxNetwork(options, process, num_processes, token, receiver));
}

// A process with a wrong token does not answer when others leave.
std::unique_ptr<Network> MakeUcxNetwork(int process, int num_processes, uint64_t token, Receiver* receiver) {
  return MakeLeaving(1, process, num_processes, token, receiver);
}

TEST_CASE("order of small and large messages") {
  for (const auto place : {TestProcess::Place::kAtOnce, TestProcess::Place::kLater, TestProcess::Place::kMixed}) {
    CheckOrder(MakeUcxNetwork, place);
  }
}

TEST_CASE("channels do not delay each other, and messages can be dropped") { CheckChannels(MakeUcxNetwork); }

TEST_CASE("a process leaves after its last message") { CheckLeaving(MakeUcxNetwork); }

TEST_CASE("a process leaves in the middle") { CheckLeavingEarly(MakeUcxNetwork); }

TEST_CASE("a peer is dropped in the middle of a payload") { CheckDrop(MakeUcxNetwork); }

// The sender gets its memory back.
TEST_CASE("a message to a peer that has just been dropped is not sent") {
  Processes processes = JoinAll(MakeUcxNetwork, 3, TestProcess::Place::kAtOnce);
  std::vector<char> data(5000);  // more than a network copies
  std::promise<bool> sent;
  processes[1]->on_delivered = [&](const Message&) {  // queues all while the progress thread is in this call
    for (const int peer : {0, 2}) processes[1]->network().Drop(peer, "enough");
    processes[1]->network().Send(0, 0, nullptr, 0, data.data(), data.size(), [&](bool ok) { sent.set_value(ok); });
  };
  processes[0]->Send(1, 0, 0, 0);
  auto done = sent.get_future();
  CHECK(done.wait_for(std::chrono::seconds(100)) == std::future_status::ready && !done.get());
  CHECK(processes[1]->WaitLost(0) && processes[1]->WaitLost(2));
  LeaveAll(processes);
}

TEST_CASE("messages with a wrong token are dropped and counted") { CheckToken(MakeUcxNetwork); }

// Whether all threads of this process but the calling one sleep.
bool OthersSleep() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream stat(task.path() / "stat");
    const std::string text(std::istreambuf_iterator<char>(stat), {});
    const size_t name = text.rfind(')');  // then a space and the state
    const bool self = task.path().filename() == std::to_string(gettid());
    if (!self && name != std::string::npos && text[name + 2] != 'S') return false;
  }
  return true;
}

TEST_CASE("a network without work sleeps") {
  TestProcess one(0), other(1);
  one.Join(MakeUcxNetwork(0, 2, 1, &one));
  other.Join(MakeUcxNetwork(1, 2, 1, &other));
  CHECK(one.network().Connect(1, other.network().address()).ok());  // leaves no work
  const auto start = Clock::now();
  for (int times = 0; times < 10;) {  // ten times in a row, which is not a coincidence
    times = OthersSleep() ? times + 1 : 0;
    CHECK(Seconds(start) < 60);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST_CASE("addresses of another process or of another version of UCX are refused") {
  TestProcess one(0), other(2);
  one.Join(MakeUcxNetwork(0, 2, 1, &one));
  other.Join(MakeUcxNetwork(2, 3, 1, &other));
  constexpr size_t kProcess = 8, kMajor = 12, kMinor = 16;  // behind the magic number
  const auto address_of = [&](int32_t process) {
    std::string address = other.network().address();
    std::memcpy(&address[kProcess], &process, sizeof(process));
    return address;
  };
  const auto refused = [&](int process, const std::string& address) {
    const std::string expected = "process " + std::to_string(process) + " has not published a valid UCX address";
    return one.network().Connect(process, address).message() == expected;
  };
  CHECK(refused(-1, address_of(-1)) && refused(2, address_of(2)));  // processes are 0 and 1
  CHECK(refused(0, address_of(0)));                                 // the process itself
  CHECK(refused(1, address_of(0)) && refused(1, address_of(2)));
  const std::string address = address_of(1);
  CHECK(refused(1, address.substr(0, address.size() - 1)) && refused(1, address + "x"));
  CHECK(refused(1, "J" + address.substr(1)) && refused(1, ""));
  for (const size_t at : {kMajor, kMinor}) {
    std::string changed = address;
    ++changed[at];
    uint32_t version[2];
    std::memcpy(version, &changed[kMajor], sizeof(version));
    const std::string error = one.network().Connect(1, changed).message();
    const std::string theirs = std::to_string(version[0]) + "." + std::to_string(version[1]) + ",";
    CHECK(error.find("process 1 has UCX " + theirs) != std::string::npos);
    CHECK(error.find("the same UCX") != std::string::npos);
  }
  CHECK(one.network().Connect(1, address).ok());
}

// More than the kernel buffers for a process that does not read.
constexpr int kMessages = 600;
constexpr size_t kBytes = 50'000;

// A peer that sends, or only connects, until it is killed, or that receives until process 0 leaves.
int RunPeer(const std::string& role, const std::string& folder) {
  const bool sends = role == "sends", receives = role == "receives";
  TestProcess self(1);
  self.Join(receives ? MakeLeaving(UcxOptions().disconnect_s, 1, 2, 99, &self) : MakeUcxNetwork(1, 2, 99, &self));
  Meet(folder, self.network(), 1, 0);
  if (role != "silent") self.Send(0, 0, 0, 0);
  if (receives) CHECK(self.WaitLost(0));
  if (receives) return self.delivered() == kMessages ? 0 : 1;
  for (uint64_t index = 1; sends && index <= 8; ++index) self.Send(0, 0, index, 16 << 20);
  std::ofstream(folder + "/met");
  for (;;) pause();
}

// A process and its connected peer.
struct Connected {
  Folder folder;
  TestProcess self;
  const pid_t victim;
  explicit Connected(const char* role, TestProcess::Place place = TestProcess::Place::kAtOnce, double disconnect_s = 1)
      : self(0, place), victim(Spawn(role, folder.path)) {
    self.Join(MakeLeaving(disconnect_s, 0, 2, 99, &self));
    Meet(folder.path, self.network(), 0, 1);
  }
  void Kill() const { CHECK(kill(victim, SIGKILL) == 0 && waitpid(victim, nullptr, 0) == victim); }
};

TEST_CASE("a peer is killed: while it sends, while its messages wait, after its last message, without a message") {
  for (const auto& [place, delivered_before] : {std::pair<TestProcess::Place, int>{TestProcess::Place::kAtOnce, 1},
                                                {TestProcess::Place::kLater, 1},
                                                {TestProcess::Place::kAtOnce, 9},
                                                {TestProcess::Place::kAtOnce, 0}}) {
    Connected pair(delivered_before > 0 ? "sends" : "silent", place);
    TestProcess& self = pair.self;
    CHECK(self.WaitDelivered(delivered_before));
    if (delivered_before == 0) ReadWhenThere(std::string(pair.folder.path) + "/met");
    const int sends = delivered_before == 0 ? 0 : 20;
    for (int index = 0; index < sends; ++index) self.Send(1, 0, static_cast<uint64_t>(index), 4 << 20);
    pair.Kill();
    const auto start = Clock::now();
    CHECK(self.WaitLost(1) && Seconds(start) < 15);  // UCX's own keepalive takes 20 s
    CHECK(self.WaitSent(sends));
    self.AcceptAll();
    self.Send(1, 0, static_cast<uint64_t>(sends), 0);
    CHECK(self.WaitSent(sends + 1));
  }
}

// The peer does not answer, so only a forced close of the endpoint ends the transfer.
TEST_CASE("the memory of a payload is free again soon after its receiver, which is stopped, has been dropped") {
  Connected pair("silent");
  TestProcess& self = pair.self;
  ReadWhenThere(std::string(pair.folder.path) + "/met");
  kill(pair.victim, SIGSTOP);
  self.Send(1, 0, 0, 4 << 20);
  self.Send(1, 1, 0, 0);
  CHECK(self.WaitSent(1));  // of the second message, so the transfer of the first one has begun
  self.network().Drop(1, "too slow");
  CHECK(self.WaitLost(1) && self.WaitSent(2) && self.unsent() == 1);
  pair.Kill();
}

// The peer is stopped, with messages on their way.
struct Leaving : Connected {
  explicit Leaving(double disconnect_s) : Connected("receives", TestProcess::Place::kAtOnce, disconnect_s) {
    CHECK(self.WaitDelivered(1));
    CHECK(kill(victim, SIGSTOP) == 0 && waitpid(victim, nullptr, WUNTRACED) == victim);
    for (uint64_t index = 0; index < kMessages; ++index) self.Send(1, 0, index, kBytes);
  }
  // Sends a signal to the peer after a while, during which the process leaves. Returns how long that takes.
  double Leave(int after_ms, int signal) {
    const auto start = Clock::now();
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(after_ms));
      kill(victim, signal);
    });
    self.Leave();
    const double seconds = Seconds(start);
    other.join();
    return seconds;
  }
};

TEST_CASE("a peer that is late by two seconds gets all messages of a process that leaves") {
  Leaving pair(UcxOptions().disconnect_s);
  CHECK(pair.Leave(2000, SIGCONT) >= 2);
  int status = -1;
  CHECK(waitpid(pair.victim, &status, 0) == pair.victim);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST_CASE("a peer that dies while a process leaves does not hold it up") {
  Leaving pair(80);
  CHECK(pair.Leave(200, SIGKILL) < 40);
  CHECK(waitpid(pair.victim, nullptr, 0) == pair.victim);
}

TEST_CASE("a peer that is stopped holds up a process that leaves, and its memory, no longer than the limit") {
  Leaving pair(0.5);
  const auto start = Clock::now();
  pair.self.Leave();  // ctest's time limit ends a test that hangs
  CHECK(Seconds(start) < UcxOptions().disconnect_s);
  CHECK(pair.self.sent() + pair.self.unsent() == kMessages);  // all memory is free again
  pair.Kill();
}

}  // namespace
}  // namespace jaxcomm

int main(int argc, char** argv) {
  using namespace jaxcomm;
  const std::string role = argc > 2 ? argv[1] : "";
  if (role == "sends" || role == "silent" || role == "receives") return RunPeer(role, argv[2]);
  return test::RunCases(argc, argv);
}
