// A fake of one machine whose GPUs address each other's memory, including XLA and NCCL. Ranks are threads, memory is
// the host's, and a stream is a queue. The kernels of all ranks run emulated once all ranks have reached them. The fake
// cannot show whether NCCL and CUDA behave in the same way.
#pragma once

#include "gpu_fake.h"
// Must follow CUDA's headers: see gpu_fake.h.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../../ffi/cuda/xla/call.h"
#include "../../check.h"
#include "alone.h"

namespace jaxcomm {
namespace fake {

// The most shared memory that a launch of a rank has asked for, per thread block.
inline std::atomic<size_t> most_shared_bytes{0};

// State that the ranks of a communicator share. `of`: the communicator of XLA that led to this one of jaxcomm's, and
// that has the machine's properties.
struct World {
  explicit World(int num_ranks, World* of = nullptr);

  const int n;
  World& root;
  const int first_device;     // of the GPUs of this test, unless a rank has another number
  std::vector<char*> memory;  // by rank: where the rank addresses all ranks' memory; inaccessible outside windows
  int64_t mapped = 4096;      // of each rank
  int num_lsa_teams = 1;
  ncclGinType_t gin = NCCL_GIN_TYPE_NONE;
  int rank_without_gin = -1;
  bool device_api = true;
  bool windows = true;
  bool multimem = false;
  int rank_without_multimem = -1, rank_without_multicast = -1;
  bool multicast_hangs = false;  // NCCL waits for a peer's handle forever
  std::atomic<int64_t> spacing_error = 0;
  int beside = 1;                         // as many kernels of a rank, on as many streams, run at the same time
  uint64_t seed = 1;                      // of the order in which thread blocks run
  int never_registers = -1;               // a rank whose memory NCCL never registers
  int never_joins = -1;                   // a rank that makes no communicator of jaxcomm's
  std::atomic<bool>* connects = nullptr;  // XLA's communicator connects its ranks, in their threads, once this is true
  int num_made = 0, num_aborted = 0;      // ranks of jaxcomm's communicators
  int num_keys = 0;
  std::map<int, std::unique_ptr<World>> own;  // jaxcomm's communicators, by number of the key

  struct Gather {
    std::vector<char> bytes;
    int num_arrived = 0;
  };
  // All windows of a rank lie in one range of addresses, as in NCCL.
  static constexpr int64_t kStride = int64_t{1} << 30;
  struct Mapping {
    int64_t begin = 0;  // in the range of each rank
    int num_arrived = 0;
  };
  struct Kernel {
    std::vector<std::function<void()>> of_rank;  // of all ranks, once for each of `beside`
    std::vector<int> devices;                    // their GPUs
    std::vector<int> num_channels;
    int num_arrived = 0;
    unsigned threads = 0;
    size_t shared_bytes = 0;  // of the rank that asks for most
    bool done = false;
  };
  std::mutex mutex;
  std::map<int, Gather> gathers;  // by number of the call, which every rank counts itself
  std::map<int, Mapping> mappings;
  std::map<int, Kernel> kernels;
  // Signals between nodes: by rank, [channel][other rank].
  std::vector<uint64_t> remote_pads;
  std::vector<std::vector<uint64_t>> remote_sent;

  int team_size() const { return n == root.n ? n / root.num_lsa_teams : n; }
};

// A new group of nodes. Never deleted.
inline World& NodesOf(int num_nodes, int ranks_per_node, ncclGinType_t gin = NCCL_GIN_TYPE_PROXY) {
  auto* world = new World(num_nodes * ranks_per_node);
  world->num_lsa_teams = num_nodes;
  world->gin = gin;
  return *world;
}

using Flag = std::shared_ptr<std::atomic<bool>>;
inline Flag MakeFlag() { return std::make_shared<std::atomic<bool>>(false); }

struct Rank {
  World* world = nullptr;
  int rank = 0;
  int number = -1;         // of the GPU in the process, if it is not the usual one
  uint64_t restarted = 0;  // its process has another incarnation
  Rank* made = nullptr;    // the newest of jaxcomm's communicators
  bool destroyed = false;
  Flag asked = MakeFlag();  // for the properties
  Flag in_call = MakeFlag(), revoked = MakeFlag();
  int device() const { return number >= 0 ? number : world->first_device + rank; }
  int num_gathers = 0, num_mappings = 0, num_kernels = 0;
  int num_allocations = 0;
  int num_ll = 0;          // LL calls
  int num_multimem = 0;    // multimem calls
  int num_gin = 0;         // device communicators
  Stream* busy = nullptr;  // occupies the GPU
};

extern thread_local Rank* own;  // of this thread

struct Registered {
  int64_t begin = 0;
  Rank* rank = nullptr;
  int first = 0;  // first rank of the team
  char* At(int of, int64_t offset) const {
    return rank->world->memory[rank->rank] + (first + of) * World::kStride + begin + offset;
  }
};

constexpr uintptr_t kMulticast = 0x123000;  // of all memory that a rank has mapped; there is no memory at this address

// Called once a communicator of jaxcomm's has been made.
inline thread_local std::function<void()> after_init;

inline Rank& Of(ncclComm_t comm) {
  Rank& rank = *reinterpret_cast<Rank*>(comm);
  CHECK(!rank.destroyed);
  return rank;
}
// Destroys a communicator as XLA does: nothing may use it, or its windows, any more.
void Destroy(Rank& of_xla);

// NCCL functions. The first one blocks until all ranks have arrived.
ncclResult_t WindowRegister(ncclComm_t comm, void*, size_t bytes, ncclWindow_t* window, int flags);
ncclResult_t LsaPointer(ncclWindow_t window, size_t offset, int rank, void** address);

// Runs `f` once per rank, on separate threads.
void OnRanks(World& world, const std::function<void(Rank&)>& f);
void OnRanks(int num_ranks, const std::function<void(int rank, void* nccl_comm)>& f);

// A kernel of the rank whose thread calls this. Once all ranks have called it, their kernels run emulated, in a grid of
// `channels` x ranks.
cudaError_t Launch(int32_t channels, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> kernel);

// In place of a kernel: this rank, which is dead or late, has none while those of the others run.
cudaError_t LaunchNothing(cudaStream_t stream);

// The launches that `captured` has recorded, on `stream`, as a CUDA graph makes them.
void Replay(const Stream& captured, cudaStream_t stream);

cudaStream_t NewStream();
void Wait(cudaStream_t stream);

// Calls the sites of a rank one after the other, as XLA does: in three runs with all stages, and then in five replays
// of a CUDA graph. fill(run) and check(run): their buffers, which keep their addresses.
template <typename Site, typename Fill, typename Check>
void RunAndReplay(const std::vector<Site*>& sites, Stream& stream, const Fill& fill, const Check& check) {
  for (int32_t run = 0; run < 3; ++run) {
    fill(run);
    for (Site* site : sites) {
      site->run = run;
      CHECK(site->Prepare().empty() && site->Initialize().empty());
    }
    for (Site* site : sites) CHECK(site->Execute().empty());
    CHECK(stream.queue.size() == sites.size());  // one kernel each; neither copies nor waits of the host
    Wait(stream.handle());
    check(run);
  }
  Stream graph;
  graph.captures = true;
  for (Site* site : sites) {
    site->stream = graph.handle();
    CHECK(site->Execute().empty());
  }
  CHECK(graph.graph.size() == sites.size());
  for (int32_t run = 3; run < 8; ++run) {
    fill(run);
    Replay(graph, stream.handle());
    Wait(stream.handle());
    check(run);
  }
}

StatusOr<cuda::Communicator*> Get(Rank& rank);
// Of the devices from 0 on.
CallSpec SpecOf(Collective collective, int32_t num_ranks, const std::string& algorithm = "");
// The state of a call site of an executable. Never deleted.
cuda::GpuCallState* StateOf(const CallSpec& spec, bool symmetric_buffers = false);

// A call with data of its own: sums of all ranks, their blocks, or a gather.
template <typename T = int32_t>
struct DataCall {
  // `count`: elements of a block.
  DataCall(cuda::Communicator& communicator, const CallSpec& spec, int64_t count)
      : collective(spec.collective), rank(communicator.rank()), n(communicator.size()), count(count) {
    x.resize(collective == Collective::kReduceScatter ? n * count : count);
    y.resize(collective == Collective::kAllGather ? n * count : count);
    call = ValueOf(cuda::DeviceCall::Make(spec, communicator, std::is_same_v<T, float> ? DType::kF32 : DType::kS32,
                                          static_cast<int64_t>(x.size()), static_cast<int64_t>(y.size())));
  }
  void Launch(int32_t run, cudaStream_t stream) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = Value(rank, run, static_cast<int64_t>(i));
    std::fill(y.begin(), y.end(), T{-1});
    CHECK(call->Launch(x.data(), y.data(), stream).ok());
  }
  bool IsRight(int32_t run) const {
    for (int64_t i = 0; i < static_cast<int64_t>(y.size()); ++i) {
      T expected = 0;
      const int64_t at = collective == Collective::kReduceScatter ? rank * count + i : i;
      for (int32_t r = 0; r < n; ++r) expected += Value(r, run, at);
      if (collective == Collective::kAllGather) expected = Value(static_cast<int32_t>(i / count), run, i % count);
      if (y[i] != expected) return false;
    }
    return true;
  }
  static T Value(int32_t rank, int32_t run, int64_t i) { return static_cast<T>(1000 * rank + 17 * run + i % 501); }

  const Collective collective;
  const int32_t rank, n;
  const int64_t count;
  std::vector<T> x, y;
  std::unique_ptr<cuda::DeviceCall> call;
};
// Sums `count` elements over all ranks, twice.
void Sum(cuda::Communicator& communicator, int64_t count);

// XLA's collective memory: one window, in which every rank's buffers have another address in every run.
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
  // XLA has the buffers of this call here.
  template <typename Call>
  void GiveTo(Call& call) const {
    call.window = window;
    call.memory = reinterpret_cast<char*>(At(0));
    call.memory_bytes = kBytes;
  }

  Rank& rank;
  ncclWindow_t window = nullptr;
};

}  // namespace fake
}  // namespace jaxcomm
