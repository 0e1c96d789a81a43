// Threads of ffi/cuda that no caller waits for.
//
// They read memory that CUDA and NCCL free at the end of the process. So they are asked to end before that, and waited
// for.
#pragma once

#include <chrono>
#include <functional>

#include "cuda/nccl/deadline.h"

namespace jaxcomm::cuda {

class Threads {
 public:
  // Runs `body` on a thread of its own. Does nothing, and returns false, after End().
  static bool Start(std::function<void()> body);

  // Called by such threads. Sleeps; false, at once, if the thread must end.
  static bool Sleep(std::chrono::milliseconds duration);

  // Asks all threads to end, and waits for them no longer than `limit_s`: a thread may wait inside of NCCL. Whether
  // all have ended. Runs when the process exits, before the exit handlers that were registered before the first
  // Start(): those of CUDA and NCCL.
  static bool End(double limit_s = 2);
};

// Runs `call` on a thread of its own, on the current GPU, and waits for it until the deadline, or until `gives_up()`.
// False if it has not returned by then. It may return later, so `call` must own what it uses. For calls of NCCL that
// have no limit of their own.
bool RunBounded(std::function<void()> call, const Deadline& deadline, const std::function<bool()>& gives_up = {});

// For tests, whose fakes keep the state of a rank in variables of its thread. RunBounded runs the first function on the
// new thread, and the second one on its caller's thread once the first has returned.
struct Carried {
  std::function<void()> call, after;
};
extern Carried (*carry_to_thread)(std::function<void()> call);

}  // namespace jaxcomm::cuda
