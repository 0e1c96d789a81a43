// The process exits while a communicator's watchdog runs.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "../../ffi/cuda/nccl/threads.h"
#include "fakes/cluster.h"

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

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

// As CUDA's own handler, which exists before jaxcomm's threads do. The watchdog looks every 50 ms.
void FreeLikeCuda() {
  UnmapHostMemory();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
}

TEST_CASE("the watchdog ends before the memory that it reads is gone") {
  const int status = StatusAtExit([] {
    std::atexit(&FreeLikeCuda);
    Communicator::Configure(20, 3);
    OnRanks({Hosts(2, 1)}, [](ncclComm_t comm, int) { CHECK(Ok(fake::Get(comm))->send_recv_proxy() != nullptr); });
  });
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
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
