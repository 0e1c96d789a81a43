#include "cuda/nccl/threads.h"

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "common/duration.h"

namespace jaxcomm::cuda {
namespace {

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  int num_running = 0;
  bool ending = false;
};

State& GetState() {
  static auto* state = [] {
    std::atexit([] { Threads::End(); });
    return new State;  // never deleted: a thread that has not ended still uses it
  }();
  return *state;
}

}  // namespace

Carried (*carry_to_thread)(std::function<void()> call) = nullptr;

bool Threads::Start(std::function<void()> body) {
  State& state = GetState();
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.ending) return false;
    ++state.num_running;
  }
  std::thread([&state, body = std::move(body)]() mutable {
    body();
    body = nullptr;
    std::lock_guard<std::mutex> lock(state.mutex);
    --state.num_running;
    state.changed.notify_all();
  }).detach();
  return true;
}

bool Threads::Sleep(std::chrono::milliseconds duration) {
  State& state = GetState();
  std::unique_lock<std::mutex> lock(state.mutex);
  return !state.changed.wait_until(lock, std::chrono::steady_clock::now() + duration, [&] { return state.ending; });
}

bool Threads::End(double limit_s) {
  State& state = GetState();
  std::unique_lock<std::mutex> lock(state.mutex);
  state.ending = true;
  state.changed.notify_all();
  return state.changed.wait_for(lock, DurationOf(limit_s), [&] { return state.num_running == 0; });
}

bool RunBounded(std::function<void()> call, const Deadline& deadline, const std::function<bool()>& gives_up) {
  struct Run {
    std::mutex mutex;
    std::condition_variable returned;
    bool done = false;
  };
  Carried carried = carry_to_thread != nullptr ? carry_to_thread(std::move(call)) : Carried{std::move(call), nullptr};
  const auto run = std::make_shared<Run>();
  int device = 0;
  const bool has_device = cudaGetDevice(&device) == cudaSuccess;
  const bool started = Threads::Start([run, has_device, device, call = std::move(carried.call)] {
    if (has_device) cudaSetDevice(device);
    call();
    std::lock_guard<std::mutex> lock(run->mutex);
    run->done = true;
    run->returned.notify_all();
  });
  if (!started) return false;
  std::unique_lock<std::mutex> lock(run->mutex);
  const auto returned = [&] { return run->done; };
  while (!run->returned.wait_for(lock, std::chrono::milliseconds(20), returned)) {
    if (deadline.IsOver() || (gives_up && gives_up())) return false;
  }
  if (carried.after) carried.after();
  return true;
}

}  // namespace jaxcomm::cuda
