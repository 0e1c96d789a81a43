// A fake of one machine whose GPUs address each other's memory, and of XLA's and NCCL's part in it: ranks are threads,
// memory is the host's, a stream is a queue, and the kernels of all ranks run emulated once all have come to them. What
// it can't show is whether NCCL and CUDA behave as it does.
#pragma once

#include "gpu_fake.h"
// Behind CUDA's headers: see there.
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../../ffi/cuda/xla/call.h"
#include "../../check.h"
#include "alone.h"

namespace jaxcomm {
namespace fake {

// What the ranks of a communicator share.
struct World {
  explicit World(int num_ranks)
      : n(num_ranks),
        memory(static_cast<char*>(
            mmap(nullptr, n * kStride, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {}

  const int n;
  char* const memory;     // what is in no window can't be touched
  int64_t mapped = 4096;  // of each rank
  int num_lsa_teams = 1;
  ncclGinType_t gin = NCCL_GIN_TYPE_NONE;
  int rank_without_gin = -1;
  bool device_api = true;
  bool windows = true;
  bool multimem = false;
  int rank_without_multimem = -1, rank_without_multicast = -1;
  bool split_fails = false;
  std::atomic<int64_t> spacing_error = 0;
  int num_made = 0, num_aborted = 0;  // communicators

  struct Gather {
    std::vector<char> bytes;
    int num_arrived = 0;
  };
  // All windows of a rank lie in one range of addresses, as NCCL has it.
  static constexpr int64_t kStride = int64_t{1} << 30;
  struct Mapping {
    int64_t begin = 0;  // in the range of each rank
    int num_arrived = 0;
  };
  struct Kernel {
    std::vector<std::function<void()>> of_rank;
    int num_channels = 0;
    int num_arrived = 0;
    bool done = false;
  };
  std::mutex mutex;
  std::map<int, Gather> gathers;  // by number of the call, which every rank counts for itself
  std::map<int, Mapping> mappings;
  std::map<int, Kernel> kernels;
  // What ranks have signalled to ranks of other nodes: by rank, [channel][the other].
  std::vector<uint64_t> remote_pads;
  std::vector<std::vector<uint64_t>> remote_sent;

  int team_size() const { return n / num_lsa_teams; }
};

struct Rank {
  World* world = nullptr;
  int rank = 0;
  int num_gathers = 0, num_mappings = 0, num_kernels = 0;
  int num_allocations = 0;
  int num_ll = 0;              // calls of LL messages
  int num_multimem = 0;        // calls by multimem
  int num_gin = 0;             // device communicators
  FakeStream* busy = nullptr;  // keeps the GPU from doing anything else
};

struct Stream : FakeStream {
  int num_waits = 0, num_records = 0;       // of events
  std::deque<std::function<bool()>> queue;  // each tells whether it is over
  bool Drain() {
    while (!queue.empty() && queue.front()()) queue.pop_front();
    return queue.empty();
  }
  void Push(std::function<void()> work) override {
    queue.push_back([work = std::move(work)] { return work(), true; });
  }
  bool IsOver() override { return Drain(); }
  void Record(Event&) override { ++num_records; }
  void Wait(Event&) override { ++num_waits; }
};

struct Registered {
  int64_t begin = 0;
  World* world = nullptr;
  int first = 0;  // rank of the team
};

constexpr uintptr_t kMulticast = 0x123000;  // of all that a rank has mapped; nothing lies there

extern thread_local Rank* own;  // of this thread

inline Rank& Of(ncclComm_t comm) { return *reinterpret_cast<Rank*>(comm); }
inline Stream& Of(cudaStream_t stream) { return static_cast<Stream&>(AnyOf(stream)); }

template <typename F>
void Until(std::mutex& mutex, F condition) {
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (condition()) return;
    }
    std::this_thread::yield();
  }
}

// Of NCCL. The first blocks until all ranks have come.
ncclResult_t WindowRegister(ncclComm_t comm, void*, size_t bytes, ncclWindow_t* window, int flags);
ncclResult_t LsaPointer(ncclWindow_t window, size_t offset, int rank, void** address);

// With which communicators of our own are made.
inline ncclUniqueId KeyOf(World* world) {
  ncclUniqueId key;
  std::memcpy(key.internal, &world, sizeof world);
  return key;
}

// Runs `f` once per rank, in threads of their own.
void OnRanks(World& world, const std::function<void(Rank&)>& f);
void OnRanks(int num_ranks, const std::function<void(int rank, void* nccl_comm)>& f);

// A kernel of the rank whose thread calls this. Once all ranks have come to theirs, they run emulated, in a grid of
// `channels` x ranks.
cudaError_t Launch(int32_t channels, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> kernel);

cudaStream_t NewStream();
void Wait(cudaStream_t stream);

cuda::Communicator* Get(Rank& rank, std::string* error);
CallSpec SpecOf(Collective collective, int32_t num_ranks);
// A sum over all ranks of `count` elements, twice.
void Sum(cuda::Communicator& communicator, int64_t count);

// XLA's collective memory: one window, in which every rank's buffers are elsewhere in every run.
struct XlaMemory {
  static constexpr int64_t kBytes = 1 << 20;

  explicit XlaMemory(Rank& of) : rank(of) {
    CHECK(WindowRegister(reinterpret_cast<ncclComm_t>(&rank), nullptr, kBytes, &window, NCCL_WIN_COLL_SYMMETRIC) ==
          ncclSuccess);
  }
  int64_t InputOf(int32_t run) const { return 4096 * (1 + run) + 64 * rank.rank; }
  int64_t OutputOf(int32_t run) const { return kBytes / 2 + 8192 * run + 256 * (rank.world->n - rank.rank); }
  int32_t* At(int64_t offset) const {
    void* address = nullptr;
    LsaPointer(window, static_cast<size_t>(offset), rank.rank, &address);
    return static_cast<int32_t*>(address);
  }

  Rank& rank;
  ncclWindow_t window = nullptr;
};

}  // namespace fake
}  // namespace jaxcomm
