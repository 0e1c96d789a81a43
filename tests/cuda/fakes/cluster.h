// A fake of several hosts: ranks are threads, and so is each stream. Nothing but events orders two streams, and each
// kernel runs emulated on the thread of its stream, so what the host forgets to order goes wrong. Messages go as
// NCCL's: matched in order between each two ranks of a communicator, read until the receiver has them, waited for
// without end.
#pragma once

#include "gpu_fake.h"
// Behind CUDA's headers: see there.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../../ffi/cuda/xla/call.h"
#include "../../check.h"
#include "alone.h"

namespace jaxcomm {
namespace fake {

// One for everything: what the fakes do is short. Never deleted: streams outlive the tests.
inline auto& mutex = *new std::mutex;
inline auto& changed = *new std::condition_variable;

template <typename F>
void Until(F condition) {
  std::unique_lock<std::mutex> lock(mutex);
  while (!condition()) changed.wait(lock);
}

template <typename F>
void Locked(F change) {
  std::lock_guard<std::mutex> lock(mutex);
  change();
  changed.notify_all();
}

// Where the ranks of a test are.
struct Cluster {
  std::vector<int> hosts;     // by rank
  bool peers_in_host = true;  // GPUs of a host address each other
  bool init_fails = false;
  bool gin = false;                          // NCCL has it between nodes
  mutable std::atomic<int> num_aborted = 0;  // communicators

  Cluster(std::vector<int> of_ranks) : hosts(std::move(of_ranks)) {}
};

struct Message {
  const void* from = nullptr;
  size_t bytes = 0;
  bool taken = false;
};

// What the ranks of a communicator share. Collective calls are counted by every rank for itself.
struct Group {
  const Cluster* cluster = nullptr;
  std::vector<int> ranks;  // of the cluster
  struct Rendezvous {
    std::map<int, std::vector<char>> brought;  // by rank
    std::vector<char> memory;                  // of a window
  };
  std::map<int, Rendezvous> all_rendezvous;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> links;  // from, to

  int n() const { return static_cast<int>(ranks.size()); }
  int num_lsa_teams() const {
    int size = 0, run = 1;
    for (int r = 1; r <= n(); ++r) {
      if (r < n() && cluster->hosts[ranks[r]] == cluster->hosts[ranks[r - 1]]) {
        ++run;
      } else {
        size = std::gcd(size, run);
        run = 1;
      }
    }
    return n() / size;
  }
};

struct Rank {
  Group* group = nullptr;
  int rank = 0;
  std::atomic<int> num_meetings{0};
  std::atomic<bool> aborted{false};
  std::atomic<bool> in_call{false};  // of NCCL's, which must not meet another one
};

struct Stream : FakeStream {
  std::deque<std::function<void()>> queue;
  std::condition_variable pushed;  // of its own: the streams of tests that are over wait, too
  size_t num_running = 0;
  std::thread thread;

  Stream();
  void Push(std::function<void()> work) override {
    Locked([&] {
      queue.push_back(std::move(work));
      ++num_running;
    });
    pushed.notify_one();
  }
  bool IsOver() override {
    std::lock_guard<std::mutex> lock(mutex);
    return num_running == 0;
  }
  void Record(Event& event) override {
    uint64_t number = 0;
    Locked([&] { number = ++event.recorded; });
    Push([=, &event] { Locked([&] { event.over = number; }); });
  }
  void Wait(Event& event) override {
    uint64_t number = 0;
    Locked([&] { number = event.recorded; });
    Push([=, &event] { Until([&] { return event.over >= number; }); });
  }
};

inline Rank& Of(ncclComm_t comm) { return *reinterpret_cast<Rank*>(comm); }
inline Stream& Of(cudaStream_t stream) { return static_cast<Stream&>(AnyOf(stream)); }

// Called by launches of this thread: of kernels, and of NCCL's.
inline thread_local std::function<void()> before_launch, before_group;
// Of communicators.
inline std::atomic<int> num_aborted{0}, num_revoked{0};

std::vector<int> Hosts(int num_nodes, int ranks_per_node);

// Runs `f` with the communicator that XLA would provide, once per rank, in threads of their own.
void OnRanks(const Cluster& cluster, const std::function<void(ncclComm_t, int)>& f);

Stream& OwnStream();

}  // namespace fake
}  // namespace jaxcomm
