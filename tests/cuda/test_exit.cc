// The process exits while threads of ffi/cuda run.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "../../ffi/cuda/nccl/threads.h"
#include "fakes/machine.h"

namespace jaxcomm {
namespace cuda {
namespace {

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
