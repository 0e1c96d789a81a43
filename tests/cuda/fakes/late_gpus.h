// GPUs with few multiprocessors (SMs), on which kernels begin late and in any order. A kernel's blocks begin one by
// one, each when an SM is free and the previous kernel of its stream has ended. Nothing makes the GPUs begin together.
// XLA's kernels run between: some compute for a while, others are collectives, whose blocks wait for those of other
// GPUs.
//
// In the other fakes, all blocks of all ranks are resident at once, so that a launch order or a number of blocks with
// which GPUs block each other does no harm there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "emulation.h"

namespace jaxcomm {
namespace fake {

class LateGpus {
 public:
  // Under this, nothing that can still happen takes that long. Kernels may wait for each other longer than it takes
  // all of XLA's kernels to compute.
  static constexpr uint64_t kStuckNs = 5'000'000;
  static constexpr uint64_t kMostComputeNs = 200'000;

  LateGpus(int num_gpus, int num_sms, unsigned num_threads, uint64_t seed)
      : num_gpus_(num_gpus),
        num_sms_(num_sms),
        num_threads_(num_threads),
        seed_(seed),
        random_(seed),
        gpus_(num_gpus),
        tasks_(static_cast<size_t>(num_gpus) * num_sms) {}

  // Adds a kernel to a stream of a GPU. `body` runs in every thread of every block.
  void Launch(int gpu, int stream, const std::string& name, int num_blocks, std::function<void()> body) {
    Kernel kernel;
    kernel.name = name;
    kernel.num_blocks = num_blocks;
    for (int block = 0; block < num_blocks; ++block) kernel.order.push_back(static_cast<unsigned>(block));
    std::shuffle(kernel.order.begin(), kernel.order.end(), random_);  // CUDA promises none
    kernel.body = std::move(body);
    kernel.earliest_ns = random_() % 2 == 0 ? 0 : random_() % kMostComputeNs;
    gpus_[gpu][stream].push_back(std::move(kernel));
  }

  // A kernel of XLA's that communicates with nobody.
  void Compute(int gpu, int stream, int num_blocks) {
    const uint64_t duration_ns = random_() % kMostComputeNs;
    Launch(gpu, stream, "XLA computes", num_blocks, [duration_ns] {
      const uint64_t begin = emulation::NowNs();
      while (emulation::NowNs() - begin < duration_ns) emulation::Pause();
    });
  }

  // The kernel of one GPU of XLA's collective number `number`: each block waits for the same block of all GPUs.
  void Collective(int gpu, int stream, int number, int num_blocks) {
    Launch(gpu, stream, "XLA's collective " + std::to_string(number), num_blocks, [this, number] {
      if (threadIdx.x == 0) {
        int& arrived = arrived_[{number, static_cast<int>(blockIdx.x)}];
        ++arrived;
        while (arrived < num_gpus_ && !stuck_) emulation::Pause();
      }
      __syncthreads();
    });
  }

  // Runs all kernels. Returns who waits for whom if they block each other; otherwise nothing. `end_waits` ends the
  // waits of all kernels that are not XLA's.
  std::string Run(const std::function<void()>& end_waits) {
    end_waits_ = end_waits;
    begin_ns_ = last_ns_ = emulation::TheMachine().now_ns;
    // One column more than there are SMs: it watches all GPUs, whose SMs may all be taken.
    emulation::Launch(static_cast<unsigned>(num_sms_) + 1, static_cast<unsigned>(num_gpus_), num_threads_, seed_,
                      [this] {
                        if (blockIdx.x < static_cast<unsigned>(num_sms_)) return RunSm();
                        while (blockIdx.y == 0 && threadIdx.x == 0 && !IsOver()) {
                          if (NowNs() - last_ns_ > kStuckNs) FindDeadlock();
                          emulation::Pause();
                        }
                      });
    return deadlock_;
  }

 private:
  struct Kernel {
    std::string name;
    int num_blocks = 0, num_begun = 0, num_ended = 0;
    std::vector<unsigned> order;  // in which blocks begin
    std::function<void()> body;
    uint64_t earliest_ns = 0;  // from the beginning of the run: the rank's host is late
  };
  using Streams = std::map<int, std::deque<Kernel>>;
  struct Task {
    int stream = -1;
    unsigned block = 0;
    std::function<void()> body;  // null: nothing to do now
    bool over = false;           // the GPU has run all kernels
  };

  // One SM: its threads take part in one block after another.
  void RunSm() {
    const EmulatedIndex sm = blockIdx;
    const auto gpu = static_cast<int>(sm.y);
    Task& task = tasks_[sm.y * static_cast<size_t>(num_sms_) + sm.x];
    for (;;) {
      if (threadIdx.x == 0) task = Next(gpu);
      __syncthreads();
      const Task mine = task;
      if (mine.over) return;
      if (mine.body == nullptr) {
        emulation::Pause();
        __syncthreads();
        continue;
      }
      blockIdx = {mine.block, sm.y};
      mine.body();
      __syncthreads();
      blockIdx = sm;
      if (threadIdx.x == 0) End(gpu, mine);
      __syncthreads();
    }
  }

  bool IsOver() const {
    for (const Streams& streams : gpus_) {
      for (const auto& [stream, kernels] : streams) {
        if (!kernels.empty()) return false;
      }
    }
    return true;
  }

  uint64_t NowNs() const { return emulation::TheMachine().now_ns; }

  Task Next(int gpu) {
    Streams& streams = gpus_[gpu];
    std::vector<std::pair<int, Kernel*>> possible;
    bool over = true;
    for (auto& [stream, kernels] : streams) {
      if (kernels.empty()) continue;
      over = false;
      Kernel& first = kernels.front();
      const bool may_begin = NowNs() - begin_ns_ >= first.earliest_ns;
      if (may_begin && first.num_begun < first.num_blocks) possible.emplace_back(stream, &first);
    }
    Task task;
    task.over = over;
    if (possible.empty()) return task;
    const auto [stream, kernel] = possible[random_() % possible.size()];
    last_ns_ = NowNs();
    task.stream = stream;
    task.block = kernel->order[kernel->num_begun++];
    task.body = kernel->body;
    return task;
  }

  void End(int gpu, const Task& task) {
    std::deque<Kernel>& kernels = gpus_[gpu][task.stream];
    last_ns_ = NowNs();
    if (++kernels.front().num_ended == kernels.front().num_blocks) kernels.pop_front();
  }

  void FindDeadlock() {
    if (stuck_) return;
    stuck_ = true;
    deadlock_ = "deadlock with seed " + std::to_string(seed_) + ":";
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      for (const auto& [stream, kernels] : gpus_[gpu]) {
        for (const Kernel& kernel : kernels) {
          deadlock_ += "\n  GPU " + std::to_string(gpu) + ", stream " + std::to_string(stream) + ": " + kernel.name +
                       " has begun " + std::to_string(kernel.num_begun) + " and ended " +
                       std::to_string(kernel.num_ended) + " of " + std::to_string(kernel.num_blocks) + " blocks";
        }
      }
    }
    end_waits_();
  }

  const int num_gpus_, num_sms_;
  const unsigned num_threads_;
  const uint64_t seed_;
  std::mt19937_64 random_;
  std::vector<Streams> gpus_;
  std::vector<Task> tasks_;                     // by SM
  std::map<std::pair<int, int>, int> arrived_;  // by collective and block
  std::function<void()> end_waits_;
  uint64_t begin_ns_ = 0, last_ns_ = 0;
  bool stuck_ = false;
  std::string deadlock_;
};

}  // namespace fake
}  // namespace jaxcomm
