// The end or failure of a process: what its peers learn over connections between real processes, and which waits it
// ends, on fakes of NCCL and the GPU; and the exit while threads run.
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "../../ffi/cuda/nccl/failed_processes.h"
#include "../../ffi/cuda/nccl/first_contact.h"
#include "../../ffi/cuda/nccl/threads.h"
#include "../../ffi/cuda/runtime/device_call.h"
#include "../../ffi/cuda/runtime/liveness.h"
#include "fakes/machine.h"

namespace {
bool kernel_has_ipv6 = true;
}

// In place of the C library's.
extern "C" int socket(int domain, int type, int protocol) noexcept {
  if (domain == AF_INET6 && !kernel_has_ipv6) return errno = EAFNOSUPPORT, -1;
  return static_cast<int>(syscall(SYS_socket, domain, type, protocol));
}

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

constexpr double kLimitS = 60;
constexpr uint64_t kOther = 77;  // another process

// Rank 1, which is of another process, has no kernel. That of rank 0 waits for it.
void EndWhileRank0Waits(bool left) {
  constexpr int64_t kCount = 40000;
  Communicator::Configure(600, 4);
  Communicator* alone = nullptr;
  OnRanks(*new World(1), [&](Rank& rank) { alone = ValueOf(Get(rank)); });
  OnRanks(*new World(2), [&](Rank& rank) {
    if (rank.rank == 1) rank.restarted = kOther;
    Communicator& communicator = *ValueOf(Get(rank));
    ValueOf(communicator.AsynchronousLane());  // has no failure of its own
    const CallSpec spec = SpecOf(Collective::kAllReduce, 2, "direct");
    const auto call = ValueOf(DeviceCall::Make(spec, communicator, DType::kS32, kCount, kCount));
    std::vector<int32_t> x(kCount), y(kCount, -1);
    Stream stream;
    std::thread end;
    if (rank.rank == 0) {
      CHECK(call->Launch(x.data(), y.data(), stream.handle()).ok());
      end = std::thread([&communicator, left] {
        if (!left) return Communicator::NoteFailure(kOther, "process 1 has ended");
        SetLeft(kOther, "process 1 has ended", 0);
        while (communicator.Failure().ok()) Communicator::RecordProgress();
      });
    } else {
      CHECK(LaunchNothing(stream.handle()) == cudaSuccess);
    }
    while (!stream.Drain()) std::this_thread::yield();
    if (end.joinable()) end.join();
    if (rank.rank == 0) {
      CHECK(Has(communicator.Failure(), "here.py:1: rank 0 aborted"));
      CHECK(Has(communicator.Failure(), "where it waited for rank 1: process 1 has ended"));
      CHECK(IsStopped() && y == std::vector<int32_t>(kCount, -1));  // nothing can be read that looks right
      CHECK(Communicator::Failures().size() == (left ? 1 : 2) && !Communicator::FirstFailure().ok());
    }
  });
  CHECK(alone->Failure().ok() && alone->comm().report->abort == 0);
}

TEST_CASE("the end of a process ends the waits of its groups, and of no others") {
  const std::string said = Alone([] { EndWhileRank0Waits(false); });
  CHECK(Count(said, "jaxcomm: process 1 has ended\n") == 1);
  Alone([] { EndWhileRank0Waits(true); });
}

// A call may end without the last signals of a process, such as that of the source of a permutation.
ALONE_TEST_CASE("a process that has left fails no call that does not wait for it") {
  Communicator::Configure(600, 4);
  OnRanks(*new World(2), [&](Rank& rank) {
    if (rank.rank == 1) rank.restarted = kOther;
    Communicator& communicator = *ValueOf(Get(rank));
    Sum(communicator, 1000);
    SetLeft(kOther, "process 1 has ended", rank.rank == 0 ? 0 : 600);
    if (rank.rank == 0) Communicator::RecordProgress();
    CHECK(communicator.Failure().ok() && FailureOf({}).ok());
  });
}

// Before its first exchange, a rank knows no processes of its group.
TEST_CASE("no group is made once a process has ended") {
  const std::string said = Alone([] {
    Communicator::Configure(600, 4);
    Communicator::NoteFailure(kOther, "process 1 has ended");
    OnRanks(*new World(2), [&](Rank& rank) { CHECK(Has(Get(rank).status(), "process 1 has ended")); });
  });
  CHECK(said.empty());  // it was of no group
}

// Peers may wait for a kernel that a GPU can't launch. They return errors of arguments themselves.
ALONE_TEST_CASE("an error of one rank ends the waits of its peers") {
  Communicator::Configure(600, 4);
  OnRanks(*new World(1), [&](Rank& rank) {
    Communicator& communicator = *ValueOf(Get(rank));
    const CallSpec spec = SpecOf(Collective::kAllReduce, 1);
    NoteIfUnavailable(spec, InvalidArgumentError("the operand is not aligned"));
    CHECK(Communicator::OwnFailure().ok() && communicator.CheckUsable().ok());
    NoteIfUnavailable(spec, UnavailableError("kernel: out of memory"));
    CHECK(Has(Communicator::OwnFailure(), "here.py:1: kernel: out of memory"));
    NoteIfUnavailable(spec, UnavailableError("a consequence"));
    CHECK(Has(Communicator::OwnFailure(), "here.py:1: kernel: out of memory"));
    CHECK(communicator.comm().report->abort == 1);
    CHECK(Has(communicator.CheckUsable(), "process 0 failed: ") && Has(communicator.CheckUsable(), "out of memory"));
  });
}

// What FailureOf(process) says, once it says something.
std::string WaitForFailure(uint64_t process) {
  const Deadline deadline(kLimitS);
  while (FailureOf({process}).ok()) CHECK(deadline.Wait());
  return FailureOf({process}).message();
}

template <typename T>
void Send(int to, const T& value) {
  CHECK(write(to, &value, sizeof value) == sizeof value);
}
template <typename T>
T Receive(int from) {
  T value;
  CHECK(read(from, &value, sizeof value) == sizeof value);
  return value;
}

// A process that connects to the server, or has it if its number is 0. It sends the port and its incarnation.
struct Process {
  template <typename Body>
  Process(int32_t number, Body body, const char* token = "token") {
    int down[2], up[2];
    CHECK(pipe(down) == 0 && pipe(up) == 0);
    pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // ends with the test
      close(down[1]);                    // also if that has ended before
      if (number == 0) Send(up[1], ValueOf(ServeLiveness(token)));
      if (number != 0) JoinLiveness("127.0.0.1", Receive<int>(down[0]), token, number);
      Send(up[1], Incarnation());
      body(down[0], up[1]);
      Threads::End();
      _exit(0);
    }
    CHECK(pid > 0);
    close(down[0]);
    close(up[1]);
    to = down[1];
    from = up[0];
  }
  void End(int signal) {
    if (signal != 0) kill(pid, signal);
    CHECK(waitpid(pid, nullptr, 0) == pid);
  }

  pid_t pid;
  int to, from;
  uint64_t incarnation = 0;
};

ALONE_TEST_CASE("processes learn of each other's failure and end") {
  const auto num_open = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  const auto before = num_open();
  Process fails(1, [](int from, int) {
    Communicator::NoteOwnFailure("no memory");
    Receive<char>(from);
  });
  // Who has learned of the failure is connected.
  const auto connected = [](int from, int to) {
    WaitForFailure(Receive<uint64_t>(from));
    Send(to, 'c');
  };
  Process leaves(2, [&](int from, int to) {
    connected(from, to);
    LeaveLiveness();
    CHECK(Threads::End(kLimitS));
    Send(to, 'b');
    Receive<char>(from);  // its kernels may still run
  });
  Process killed(3, [&](int from, int to) {
    connected(from, to);
    Receive<char>(from);
  });
  Process lasts(4, [&](int from, int to) {
    connected(from, to);
    CHECK(WaitForFailure(Receive<uint64_t>(from)) == "process 3 has ended");
    Send(to, 'e');
    Receive<char>(from);
  });
  Process late(5, [&](int from, int to) {  // learns of both
    connected(from, to);
    connected(from, to);
    Receive<char>(from);
  });
  Process stranger(6, [](int from, int) { Receive<char>(from); }, "guessed");
  const StatusOr<int> port = ServeLiveness("token");
  CHECK(port.ok());
  for (Process* const process : {&stranger, &fails, &leaves, &killed, &lasts}) {
    Send(process->to, *port);
    process->incarnation = Receive<uint64_t>(process->from);
  }
  CHECK(WaitForFailure(fails.incarnation) == "process 1 failed: no memory");
  for (Process* const process : {&leaves, &killed, &lasts}) {
    Send(process->to, fails.incarnation);
    CHECK(Receive<char>(process->from) == 'c');
  }
  CHECK(Receive<char>(leaves.from) == 'b');
  std::this_thread::sleep_for(std::chrono::milliseconds(1300));
  CHECK(FailureOf({leaves.incarnation}).ok());
  Send(leaves.to, 'e');
  leaves.End(0);
  stranger.End(SIGKILL);
  Send(lasts.to, killed.incarnation);
  killed.End(SIGKILL);
  CHECK(WaitForFailure(killed.incarnation) == "process 3 has ended");
  CHECK(Receive<char>(lasts.from) == 'e');
  Send(late.to, *port);
  Receive<uint64_t>(late.from);
  for (const Process* const process : {&fails, &killed}) {
    Send(late.to, process->incarnation);
    CHECK(Receive<char>(late.from) == 'c');
  }
  CHECK(WaitForFailure(leaves.incarnation) == "process 2 has ended");
  CHECK(FailureOf({lasts.incarnation}).ok() && FailureOf({stranger.incarnation}).ok() && FailureOf({0}).ok());
  for (Process* const process : {&fails, &lasts, &late}) process->End(SIGKILL);
  CHECK(Threads::End(kLimitS) && num_open() == before + 2 * 6);  // the pipes
}

// How process 0 ends, and what another process learns of it. Without IPv6 if it fails.
void EndOfProcess0(char way, const std::string& learned) {
  kernel_has_ipv6 = way != 'f';
  Process server(0, [way](int from, int to) {
    Receive<char>(from);
    if (way == 'f') Communicator::NoteOwnFailure("no memory");
    if (way == 'l') LeaveLiveness();
    if (way == 'l') CHECK(Threads::End(kLimitS));
    Send(to, way);
    Receive<char>(from);
  });
  const int port = Receive<int>(server.from);
  server.incarnation = Receive<uint64_t>(server.from);
  Process other(2, [](int from, int) {
    Communicator::NoteOwnFailure("two\nlines" + std::string(9000, '.'));
    Receive<char>(from);
  });
  Send(other.to, port);
  JoinLiveness("127.0.0.1", port, "token", 1);
  const std::string failed = "process 2 failed: two lines...",
                    begin_of_long = WaitForFailure(Receive<uint64_t>(other.from));
  CHECK(begin_of_long.size() > 8000 && begin_of_long.size() < 8192 && begin_of_long.substr(0, failed.size()) == failed);
  const auto begin = std::chrono::steady_clock::now();
  Send(server.to, 'e');
  CHECK(Receive<char>(server.from) == way);
  if (way != 'f') server.End(way == 'k' ? SIGKILL : (Send(server.to, 'e'), 0));
  CHECK(WaitForFailure(server.incarnation) == learned);
  CHECK(way != 'l' || std::chrono::steady_clock::now() - begin >= std::chrono::seconds(1));  // the grace
  if (way == 'f') server.End(SIGKILL);
  other.End(SIGKILL);
  CHECK(Threads::End(kLimitS));
}

TEST_CASE("processes learn of the failure and of the end of process 0") {
  Alone([] { EndOfProcess0('f', "process 0 failed: no memory"); });
  Alone([] { EndOfProcess0('k', "process 0 has ended"); });
  Alone([] { EndOfProcess0('l', "process 0 has ended"); });
}

// Runs `body` in a process that then exits, and returns how it ended.
template <typename Body>
int StatusAtExit(Body body) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    body();
    std::exit(7);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

// A thread that stays inside of NCCL does not keep the process from exiting.
TEST_CASE("the exit does not wait forever") {
  const auto begin = std::chrono::steady_clock::now();
  const int status =
      StatusAtExit([] { Threads::Start([] { std::this_thread::sleep_for(std::chrono::seconds(100)); }); });
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(50));
}

TEST_CASE("no thread starts after the end") {
  const int status = StatusAtExit([] {
    std::atomic<bool> ended{false};
    Threads::Start([&] {
      while (Threads::Sleep(std::chrono::hours(1))) {
      }
      ended = true;
    });
    CHECK(Threads::End(20) && ended);
    Threads::Start([] { std::abort(); });
    CHECK(!RunBounded([] { std::abort(); }, Deadline(0.05)));
  });
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
