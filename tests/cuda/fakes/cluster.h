// A fake of several hosts. Ranks are threads, and so is each stream. Only events order two streams, and each kernel
// runs emulated on the thread of its stream, so missing synchronisation on the host leads to wrong results. Messages
// behave as NCCL's: they are matched in order between each two ranks of a communicator, the source is read until the
// receiver has the data, and waits have no limit.
#pragma once

#include "gpu_fake.h"
// Must follow CUDA's headers: see gpu_fake.h.
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

// One lock for all fakes, because their functions are short. Never deleted, because streams outlive the tests.
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

// The placement of a test's ranks.
struct Cluster {
  std::vector<int> hosts;     // by rank
  bool peers_in_host = true;  // GPUs of a host address each other
  bool init_fails = false;
  std::atomic<bool>* joins = nullptr;  // the communicator for messages waits until this is true
  bool gin = false;                    // NCCL supports GIN between nodes
  // Communicators. A watchdog may abort one after the test, when its Cluster is gone.
  std::shared_ptr<std::atomic<int>> num_aborted = std::make_shared<std::atomic<int>>(0);

  Cluster(std::vector<int> of_ranks = {}) : hosts(std::move(of_ranks)) {}
};

struct Message {
  const void* from = nullptr;
  size_t bytes = 0;
  bool taken = false;
};

// State that the ranks of a communicator share. Every rank counts its collective calls itself.
struct Group {
  Cluster cluster;
  std::vector<int> ranks;  // as ranks of the cluster
  struct Rendezvous {
    std::map<int, std::vector<char>> brought;  // by rank
    std::vector<char> memory;                  // of a window
  };
  std::map<int, Rendezvous> all_rendezvous;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> links;  // from, to

  int n() const { return static_cast<int>(ranks.size()); }
  int first_device = 0;  // GPUs of different tests have different numbers

  int num_lsa_teams() const {
    int size = 0, run = 1;
    for (int r = 1; r <= n(); ++r) {
      if (r < n() && cluster.hosts[ranks[r]] == cluster.hosts[ranks[r - 1]]) {
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
  Rank* made = nullptr;            // the first of jaxcomm's communicators
  std::atomic<bool> asked{false};  // for its properties, after jaxcomm has read its settings
  std::atomic<bool> aborted{false};
  std::atomic<bool> in_call{false};  // in an NCCL call, which must not overlap with another one
};

struct Stream : FakeStream {
  std::deque<std::function<void()>> queue;
  std::condition_variable pushed;  // one per stream, because streams of finished tests wait too
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

// Called before this thread launches a kernel or ends an NCCL group.
inline thread_local std::function<void()> before_launch, before_group;
// Called once the first communicator of jaxcomm's has been made.
inline thread_local std::function<void()> after_init;
// Numbers of communicators.
inline std::atomic<int> num_aborted{0}, num_revoked{0};

std::vector<int> Hosts(int num_nodes, int ranks_per_node);

// jaxcomm's communicator of the group whose communicator of XLA is `of_xla`.
StatusOr<cuda::Communicator*> Get(ncclComm_t of_xla);

// Runs `f` with the communicator that XLA would provide, once per rank, on separate threads.
void OnRanks(const Cluster& cluster, const std::function<void(ncclComm_t, int)>& f);

Stream& OwnStream();

}  // namespace fake
}  // namespace jaxcomm
