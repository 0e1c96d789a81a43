// The network between hosts: the contract over TCP within this process, garbage at its ports, a peer that is killed.
//
// JAXCOMM_UCX_LIBRARY: path of libucp, as for users; otherwise the system's. Without UCX, the test fails.
#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <future>
#include <set>
#include <sstream>

#include "../../ffi/transport/ucx_network.h"
#include "network_contract.h"
#include "spawned_peer.h"

namespace jaxcomm {
namespace {

std::unique_ptr<Network> MakeUcxNetwork(int process, int num_processes, uint64_t token, Receiver* receiver) {
  UcxOptions options;
  options.eager_bytes = 64 << 10;  // the contract sends smaller and larger payloads
  options.disconnect_s = 1;        // a process with a wrong token does not answer
  if (const char* path = std::getenv("JAXCOMM_UCX_LIBRARY")) options.library = path;
  return ValueOf(OpenUcxNetwork(options, process, num_processes, token, receiver));
}

TEST_CASE("order of small and large messages") {
  for (const auto place : {TestProcess::Place::kAtOnce, TestProcess::Place::kLater, TestProcess::Place::kMixed}) {
    CheckOrder(MakeUcxNetwork, place);
  }
}

TEST_CASE("channels do not delay each other, and messages can be dropped") { CheckChannels(MakeUcxNetwork); }

TEST_CASE("many threads send at once") { CheckManyThreads(MakeUcxNetwork); }

TEST_CASE("a process leaves after its last message") { CheckLeaving(MakeUcxNetwork); }

TEST_CASE("a process leaves in the middle") { CheckLeavingEarly(MakeUcxNetwork); }

TEST_CASE("a peer is dropped in the middle of a payload") { CheckDrop(MakeUcxNetwork); }

// The sender gets its memory back.
TEST_CASE("a message to a peer that has just been dropped is not sent") {
  Processes processes = JoinAll(MakeUcxNetwork, 2, TestProcess::Place::kAtOnce);
  std::vector<char> data(5000);  // more than a network copies
  std::promise<bool> sent;
  processes[1]->on_delivered = [&](const Message&) {  // queues both while the progress thread is in this call
    processes[1]->network().Drop(0, "enough");
    processes[1]->network().Send(0, 0, nullptr, 0, data.data(), data.size(), [&](bool ok) { sent.set_value(ok); });
  };
  processes[0]->Send(1, 0, 0, 0);
  auto done = sent.get_future();
  CHECK(done.wait_for(std::chrono::seconds(100)) == std::future_status::ready && !done.get());
  LeaveAll(processes);
}

TEST_CASE("messages with a wrong token are dropped and counted") { CheckToken(MakeUcxNetwork); }

// Whether all threads of this process but the calling one sleep.
bool OthersSleep() {
  const std::string self = std::to_string(gettid());
  const std::unique_ptr<DIR, int (*)(DIR*)> tasks(opendir("/proc/self/task"), closedir);
  CHECK(tasks);
  while (const dirent* entry = readdir(tasks.get())) {
    const std::string task = entry->d_name;
    if (task == "." || task == ".." || task == self) continue;
    std::ifstream stat("/proc/self/task/" + task + "/stat");
    const std::string text(std::istreambuf_iterator<char>(stat), {});
    const size_t name = text.rfind(')');  // then a space and the state
    if (name != std::string::npos && text.substr(name + 2, 1) != "S") return false;
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

TEST_CASE("another version of UCX is refused") {
  TestProcess one(0), other(1);
  one.Join(MakeUcxNetwork(0, 2, 1, &one));
  other.Join(MakeUcxNetwork(1, 2, 1, &other));
  constexpr size_t kMajor = 12, kMinor = 16;  // behind the magic number and the process
  for (const size_t at : {kMajor, kMinor}) {
    std::string address = other.network().address();
    ++address[at];
    uint32_t version[2];
    std::memcpy(version, &address[kMajor], sizeof(version));
    const std::string error = one.network().Connect(1, address).message();
    const std::string theirs = std::to_string(version[0]) + "." + std::to_string(version[1]) + ",";
    CHECK(error.find("process 1 has UCX " + theirs) != std::string::npos);
    CHECK(error.find("the same UCX") != std::string::npos);
  }
}

TEST_CASE("addresses that do not match the process are refused") {
  TestProcess one(0), other(2);
  one.Join(MakeUcxNetwork(0, 2, 1, &one));
  other.Join(MakeUcxNetwork(2, 3, 1, &other));
  constexpr size_t kProcess = 8;  // behind the magic number
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
  std::string address = address_of(1);
  CHECK(refused(1, address.substr(0, address.size() - 1)) && refused(1, address + "x"));
  ++address[0];
  CHECK(refused(1, address));
  CHECK(one.network().Connect(1, address_of(1)).ok());
}

// The other side of CheckKilledPeer: sends and receives until killed.
int RunVictim(const std::string& folder) {
  TestProcess self(1, TestProcess::Place::kAtOnce);
  self.Join(MakeUcxNetwork(1, 2, 99, &self));
  Meet(folder, self.network(), 1, 0);
  self.Send(0, 0, 0, 0);
  for (uint64_t index = 1; index <= 8; ++index) self.Send(0, 0, index, 16 << 20);
  for (;;) pause();
}

void CheckKilledPeer(TestProcess::Place place, int64_t delivered_before) {
  Folder folder;
  TestProcess self(0, place);
  self.Join(MakeUcxNetwork(0, 2, 99, &self));
  const pid_t victim = Spawn("victim", folder.path);
  Meet(folder.path, self.network(), 0, 1);
  CHECK(self.WaitDelivered(delivered_before));
  constexpr int kSends = 20;
  for (uint64_t index = 0; index < kSends; ++index) self.Send(1, 0, index, 4 << 20);
  kill(victim, SIGKILL);
  const auto start = Clock::now();
  CHECK(self.WaitLost(1));
  const double lost_s = Seconds(start);
  CHECK(self.WaitSent(kSends));
  CHECK(lost_s < 15);  // UCX's own keepalive takes 20 s
  self.AcceptAll();
  self.Send(1, 0, kSends, 0);
  CHECK(self.WaitSent(kSends + 1));
  waitpid(victim, nullptr, 0);
  std::printf("lost after %.0f ms (%s), %d of %d sends failed\n", lost_s * 1e3, self.why_lost(1).c_str(),
              static_cast<int>(self.unsent()), kSends + 1);
}

TEST_CASE("a peer is killed while it sends") { CheckKilledPeer(TestProcess::Place::kAtOnce, 1); }

TEST_CASE("a peer is killed while its messages wait") { CheckKilledPeer(TestProcess::Place::kLater, 1); }

TEST_CASE("a peer is killed after its last message") { CheckKilledPeer(TestProcess::Place::kAtOnce, 9); }

// A connected peer that never sent or received a message.
int RunSilent(const std::string& folder) {
  TestProcess self(1);
  self.Join(MakeUcxNetwork(1, 2, 99, &self));
  Meet(folder, self.network(), 1, 0);
  std::ofstream(folder + "/met");
  for (;;) pause();
}

TEST_CASE("a silent peer is killed") {
  Folder folder;
  TestProcess self(0);
  self.Join(MakeUcxNetwork(0, 2, 99, &self));
  const pid_t victim = Spawn("silent", folder.path);
  Meet(folder.path, self.network(), 0, 1);
  ReadWhenThere(std::string(folder.path) + "/met");
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  kill(victim, SIGKILL);
  const auto start = Clock::now();
  CHECK(self.WaitLost(1));
  waitpid(victim, nullptr, 0);
  std::printf("lost after %.0f ms (%s)\n", Seconds(start) * 1e3, self.why_lost(1).c_str());
}

// The peer does not answer, so only a forced close of the endpoint ends the transfer.
TEST_CASE("the memory of a payload is free again soon after its receiver, which is stopped, has been dropped") {
  Folder folder;
  TestProcess self(0);
  self.Join(MakeUcxNetwork(0, 2, 99, &self));
  const pid_t victim = Spawn("silent", folder.path);
  Meet(folder.path, self.network(), 0, 1);
  ReadWhenThere(std::string(folder.path) + "/met");
  kill(victim, SIGSTOP);
  self.Send(1, 0, 0, 4 << 20);
  self.Send(1, 1, 0, 0);
  CHECK(self.WaitSent(1));  // of the second message, so the transfer of the first one has begun
  self.network().Drop(1, "too slow");
  CHECK(self.WaitLost(1) && self.WaitSent(2) && self.unsent() == 1);
  kill(victim, SIGKILL);
  waitpid(victim, nullptr, 0);
}

struct Listener {
  in_addr address;
  uint16_t port;
};

// The TCP sockets on which this process listens.
std::vector<Listener> Listeners() {
  std::set<std::string> inodes;
  DIR* const fds = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(fds)) {
    char target[64] = {};
    const std::string path = std::string("/proc/self/fd/") + entry->d_name;
    if (readlink(path.c_str(), target, sizeof(target) - 1) <= 0) continue;
    if (std::strncmp(target, "socket:[", 8) == 0) inodes.insert(std::string(target + 8, std::strlen(target) - 9));
  }
  closedir(fds);
  std::vector<Listener> listeners;
  std::ifstream table("/proc/self/net/tcp");
  std::string line;
  std::getline(table, line);
  while (std::getline(table, line)) {
    std::istringstream words(line);
    std::string number, local, remote, state, queues, timer, retransmits, uid, timeout, inode;
    words >> number >> local >> remote >> state >> queues >> timer >> retransmits >> uid >> timeout >> inode;
    if (state != "0A" || !inodes.count(inode)) continue;
    Listener listener;
    listener.address.s_addr = static_cast<in_addr_t>(std::stoul(local.substr(0, 8), nullptr, 16));
    listener.port = static_cast<uint16_t>(std::stoul(local.substr(9), nullptr, 16));
    listeners.push_back(listener);
  }
  return listeners;
}

int Dial(const Listener& listener) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr = listener.address;
  address.sin_port = htons(listener.port);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  return fd;
}

// Port scans and garbage at every port that UCX opened do not affect the messages of the job. (Garbage after UCX's own
// magic number can: see ucx_network.h.)
TEST_CASE("garbage at the listening ports changes nothing") {
  Processes processes = JoinAll(MakeUcxNetwork, 2, TestProcess::Place::kAtOnce);
  processes[0]->Send(1, 0, 0, 100000);
  CHECK(processes[1]->WaitDelivered(1));
  const std::vector<Listener> listeners = Listeners();
  CHECK(!listeners.empty());
  for (const Listener& listener : listeners) {
    char text[INET_ADDRSTRLEN];
    std::printf("listens at %s:%d\n", inet_ntop(AF_INET, &listener.address, text, sizeof(text)), listener.port);
    CHECK(listener.address.s_addr != INADDR_ANY);
  }
  std::mt19937 random(11);
  uint64_t index = 1;
  std::vector<int> open;
  for (int round = 0; round < 30; ++round) {
    for (const Listener& listener : listeners) {
      const int fd = Dial(listener);
      const size_t bytes = round % 5 == 0 ? 0 : random() % (round % 5 == 1 ? 16 : 20000);
      std::string garbage(bytes, '\0');
      for (char& byte : garbage) byte = static_cast<char>(random());
      if (round % 5 == 4) garbage = "GET / HTTP/1.1\r\nHost: jaxcomm\r\n\r\n";
      send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL);
      if (round % 3 == 0) {
        open.push_back(fd);  // a connection that stays open
      } else {
        close(fd);
      }
    }
    processes[0]->Send(1, 0, index++, 20000);
    CHECK(processes[1]->WaitDelivered(static_cast<int64_t>(index)));
  }
  for (const int fd : open) close(fd);
  processes[0]->Send(1, 0, index++, 2000000);
  CHECK(processes[1]->WaitDelivered(static_cast<int64_t>(index)));
  CHECK(processes[0]->why_lost(1).empty() && processes[1]->why_lost(0).empty());
  LeaveAll(processes);
}

}  // namespace
}  // namespace jaxcomm

int main(int argc, char** argv) {
  using namespace jaxcomm;
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string role = argc > 2 ? argv[1] : "";
  if (role == "victim") return RunVictim(argv[2]);
  if (role == "silent") return RunSilent(argv[2]);
  return test::RunCases(argc, argv);
}
