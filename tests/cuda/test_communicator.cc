// Communicators and calls of ffi/cuda on doubles of XLA, of the CUDA runtime and of NCCL: ranks are threads, memory is
// the host's, a stream is a queue, and the kernels of all ranks run emulated once all have come to them.
//
// The doubles stand in for a machine whose GPUs address each other's memory. What they can't show is whether NCCL and
// CUDA behave as they do.
// Before the emulation, which takes words for itself that are names of parameters in them.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nccl_device/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
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

#include "gpu_doubles.h"

// Here only: the sources under test are compiled as for a GPU's host.
#define JAXCOMM_EMULATION JAXCOMM_TEST_EMULATION
#include "../../ffi/cuda/call.h"
#include "../../ffi/cuda/launch.h"
#include "../../ffi/cuda/launch_locate.h"
#include "../../ffi/cuda/peer_network.cuh"
#include "../check.h"
#include "alone.h"
#include "doubles.h"
#include "xla_double.h"

namespace jaxcomm {
namespace {

// What the ranks of a communicator share.
struct World {
  explicit World(int num_ranks)
      : n(num_ranks),
        memory(static_cast<char*>(
            mmap(nullptr, n * kStride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {}

  const int n;
  char* const memory;
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
  std::vector<uint64_t> far_pads;
  std::vector<std::vector<uint64_t>> far_sent;

  int team_size() const { return n / num_lsa_teams; }
};

struct Rank {
  World* world = nullptr;
  int rank = 0;
  int num_gathers = 0, num_mappings = 0, num_kernels = 0;
  int num_allocations = 0;
  int num_flagged = 0;           // calls of messages with flags
  int num_multimem = 0;          // calls by multimem
  int num_gin = 0;               // device communicators
  StreamDouble* busy = nullptr;  // keeps the GPU from doing anything else
};

struct Stream : StreamDouble {
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

thread_local Rank* own = nullptr;  // of this thread

Rank& Of(ncclComm_t comm) { return *reinterpret_cast<Rank*>(comm); }
Stream& Of(cudaStream_t stream) { return static_cast<Stream&>(AnyOf(stream)); }

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

ncclResult_t MemAlloc(void** memory, size_t) {
  ++own->num_allocations;
  return LibraryDouble().MemAlloc(memory, 1);
}

ncclResult_t AllGather(const void* from, void* to, size_t count, ncclDataType_t, ncclComm_t comm, cudaStream_t stream) {
  Rank& rank = Of(comm);
  const int number = rank.num_gathers++;
  const size_t bytes = count * sizeof(uint64_t);
  auto sent = std::make_shared<bool>(false);
  Of(stream).queue.push_back([&rank, number, bytes, from, to, sent] {
    if (rank.busy != nullptr && !rank.busy->IsOver()) return false;
    std::lock_guard<std::mutex> lock(rank.world->mutex);
    World::Gather& gather = rank.world->gathers[number];
    gather.bytes.resize(bytes * rank.world->n);
    if (!*sent) {
      std::memcpy(gather.bytes.data() + bytes * rank.rank, from, bytes);
      ++gather.num_arrived;
      *sent = true;
    }
    if (gather.num_arrived < rank.world->n) return false;
    std::memcpy(to, gather.bytes.data(), gather.bytes.size());
    return true;
  });
  return ncclSuccess;
}

// Blocks until all ranks have come, as NCCL's does. Memory of the window is elsewhere than what was registered: nobody
// may rely on more than NCCL promises.
ncclResult_t WindowRegister(ncclComm_t comm, void*, size_t bytes, ncclWindow_t* window, int flags) {
  CHECK(flags == NCCL_WIN_COLL_SYMMETRIC);
  Rank& rank = Of(comm);
  World& world = *rank.world;
  *window = nullptr;
  if (!world.windows) return ncclSuccess;
  auto* registered = Keep(std::make_unique<Registered>());
  registered->world = &world;
  registered->first = rank.rank / world.team_size() * world.team_size();
  const int number = rank.num_mappings++;
  {
    std::lock_guard<std::mutex> lock(world.mutex);
    World::Mapping& mapping = world.mappings[number];
    if (mapping.num_arrived++ == 0) {
      mapping.begin = world.mapped;
      world.mapped += static_cast<int64_t>(bytes) + 4096;
    }
    registered->begin = mapping.begin;
    // What it holds is not zero.
    std::memset(world.memory + rank.rank * World::kStride + mapping.begin, 0x5c, bytes);
  }
  Until(world.mutex, [&] { return world.mappings[number].num_arrived == world.n; });
  *window = reinterpret_cast<ncclWindow_t>(registered);
  return ncclSuccess;
}

ncclResult_t LsaPointer(ncclWindow_t window, size_t offset, int rank, void** address) {
  const Registered& registered = *reinterpret_cast<Registered*>(window);
  if (rank >= registered.world->team_size()) return ncclInvalidArgument;
  *address = registered.world->memory + (registered.first + rank) * World::kStride + registered.begin + offset +
             (rank == 1 ? registered.world->spacing_error.load() : 0);
  return ncclSuccess;
}

// Never blocks, unless told to; over once all ranks have come.
ncclResult_t InitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId key, int rank, ncclConfig_t* config) {
  World* world = nullptr;
  std::memcpy(&world, key.internal, sizeof world);
  if (config->blocking == 1) return *comm = reinterpret_cast<ncclComm_t>(own), ncclSuccess;  // of a node: as it is
  CHECK(config->blocking == 0 && num_ranks == world->n && rank == own->rank);
  std::lock_guard<std::mutex> lock(world->mutex);
  ++world->num_made;
  *comm = reinterpret_cast<ncclComm_t>(own);
  return ncclInProgress;
}

ncclResult_t AsyncError(ncclComm_t comm, ncclResult_t* result) {
  World& world = *Of(comm).world;
  std::lock_guard<std::mutex> lock(world.mutex);
  *result = world.num_made == world.n ? ncclSuccess : ncclInProgress;
  return ncclSuccess;
}

ncclResult_t Abort(ncclComm_t comm) {
  World& world = *Of(comm).world;
  std::lock_guard<std::mutex> lock(world.mutex);
  ++world.num_aborted;
  return ncclSuccess;
}

ncclResult_t MultimemPointer(ncclWindow_t window, size_t offset, void** address) {
  const Registered& registered = *reinterpret_cast<Registered*>(window);
  CHECK(registered.world->multimem);
  if (registered.world->rank_without_multicast == own->rank) return ncclUnhandledCudaError;
  *address = reinterpret_cast<void*>(kMulticast + registered.begin + offset);
  return ncclSuccess;
}

ncclResult_t QueryProperties(ncclComm_t comm, ncclCommProperties_t* properties) {
  properties->rank = Of(comm).rank;
  properties->nRanks = Of(comm).world->n;
  properties->cudaDev = Of(comm).rank;
  properties->deviceApiSupport = Of(comm).world->device_api;
  properties->multimemSupport = Of(comm).world->multimem && Of(comm).rank != Of(comm).world->rank_without_multimem;
  properties->nLsaTeams = Of(comm).world->num_lsa_teams;
  properties->ginType = Of(comm).rank == Of(comm).world->rank_without_gin ? NCCL_GIN_TYPE_NONE : Of(comm).world->gin;
  return ncclSuccess;
}

}  // namespace

const NcclLibrary* NcclLibrary::Open(const std::string&, std::string*) {
  static const NcclLibrary library = [] {
    NcclLibrary made = LibraryDouble();
    made.MemAlloc = &jaxcomm::MemAlloc;
    made.AllGather = &jaxcomm::AllGather;
    made.CommWindowRegister = &jaxcomm::WindowRegister;
    made.GetLsaDevicePointer = &jaxcomm::LsaPointer;
    made.GetLsaMultimemDevicePointer = &jaxcomm::MultimemPointer;
    made.CommQueryProperties = &jaxcomm::QueryProperties;
    made.CommInitRankConfig = &jaxcomm::InitRank;
    made.CommGetAsyncError = &jaxcomm::AsyncError;
    made.CommAbort = &jaxcomm::Abort;
    made.CommRevoke = [](ncclComm_t, int) { return ncclInternalError; };
    made.DevCommCreate = [](ncclComm_t comm, const ncclDevCommRequirements_t* requirements, ncclDevComm_t*) {
      CHECK(requirements->ginSignalCount == 5 * Of(comm).world->n);
      ++Of(comm).num_gin;
      return ncclSuccess;
    };
    made.GetUniqueId = [](ncclUniqueId* key) {
      std::memcpy(key->internal, &own->world, sizeof own->world);
      return own->world->split_fails ? ncclInternalError : ncclSuccess;
    };
    return made;
  }();
  return &library;
}

// Several nodes: test_between_nodes.cc.
cudaError_t cuda::LoadWatch() { return cudaErrorUnknown; }
cudaError_t cuda::LaunchBegin(const device::Comm&, device::Progress*, uint64_t, cudaStream_t) {
  return cudaErrorUnknown;
}
cudaError_t cuda::LaunchEnd(const device::Comm&, device::Progress*, cudaStream_t) { return cudaErrorUnknown; }

// The last rank to come runs the kernels of all.
cudaError_t doubles::Launch(int32_t channels, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                            std::function<void()> of_rank) {
  Rank* const rank = own;
  const int number = rank->num_kernels++;
  auto sent = std::make_shared<bool>(false);
  Of(stream).queue.push_back([=] {
    World& world = *rank->world;
    std::lock_guard<std::mutex> lock(world.mutex);
    World::Kernel& kernel = world.kernels[number];
    kernel.of_rank.resize(world.n);
    if (!*sent) {
      kernel.of_rank[rank->rank] = of_rank;
      CHECK(kernel.num_arrived == 0 || kernel.num_channels == channels);
      kernel.num_channels = channels;
      ++kernel.num_arrived;
      *sent = true;
    }
    if (kernel.num_arrived == world.n && !kernel.done) {
      static std::mutex machine;  // there is one
      std::lock_guard<std::mutex> machine_lock(machine);
      emulation::Launch(
          static_cast<unsigned>(channels), static_cast<unsigned>(world.n), threads, 1,
          [&] { kernel.of_rank[blockIdx.y](); }, shared_bytes);
      kernel.done = true;
    }
    return kernel.done;
  });
  return cudaSuccess;
}

std::unique_ptr<StreamDouble> MakeStream() { return std::make_unique<Stream>(); }

cudaStream_t doubles::NewStream() { return Keep(MakeStream())->handle(); }

void doubles::Wait(cudaStream_t stream) {
  while (!Of(stream).Drain()) std::this_thread::yield();
}

namespace cuda {

cudaError_t LoadGinKernel() { return cudaSuccess; }

cudaError_t Launch(const RankArgs& args, int32_t num_channels, cudaStream_t stream) {
  return doubles::Launch(num_channels, 4, 0, stream, [args] {
    NoNetwork network;
    Walk<NoNetwork> walk(args, network, static_cast<int32_t>(blockIdx.x));
    walk.Run();
  });
}

cudaError_t LaunchLocate(const LocateArgs& args, cudaStream_t stream) {
  return doubles::Launch(1, 4, 0, stream, [args] { Locate(args); });
}

// In place of GIN, a network that addresses all ranks' memory. GIN itself: test_gin.cc.
cudaError_t LaunchGin(const RankArgs& args, const GinNetworkArgs& gin, const ncclDevComm&, int32_t num_channels,
                      cudaStream_t stream) {
  World& world = *own->world;
  PeerNetworkArgs peers;
  peers.comm = gin.comm;
  const auto words = static_cast<size_t>(gin.comm.signals.num_channels) * world.n;
  {
    std::lock_guard<std::mutex> lock(world.mutex);
    world.far_pads.resize(words * world.n);
    world.far_sent.resize(world.n, std::vector<uint64_t>(words));
  }
  peers.comm.signals.pad = {reinterpret_cast<char*>(world.far_pads.data()),
                            static_cast<int64_t>(words * sizeof(uint64_t))};
  peers.comm.signals.sent = world.far_sent[own->rank].data();
  const auto window = [](const GinBuffer& buffer) {
    if (buffer.window == nullptr) return device::Window{};
    const Registered& registered = *static_cast<Registered*>(buffer.window);
    return device::Window{registered.world->memory + registered.begin + buffer.offset, World::kStride};
  };
  peers.input = window(gin.input);
  peers.output = window(gin.output);
  peers.scratch = window(gin.scratch);
  for (int32_t c = 0; c < gin.comm.signals.num_channels; ++c) CHECK(gin.puts[c] == 0);
  return doubles::Launch(num_channels, 4, 0, stream, [args, peers] {
    PeerNetwork network(peers);
    Walk<PeerNetwork>(args, network, static_cast<int32_t>(blockIdx.x)).Run();
  });
}

cudaError_t Launch(const FlaggedArgs& args, cudaStream_t stream) {
  ++own->num_flagged;
  return doubles::Launch(args.num_channels, 4, 0, stream, [args] {
    FlaggedCall call(args, static_cast<int32_t>(blockIdx.x));
    call.Run();
  });
}

cudaError_t Launch(const MultimemArgs& args, cudaStream_t stream) {
  ++own->num_multimem;
  return doubles::Launch(args.num_channels, 4, 0, stream, [args] {
    MultimemCall call(args, static_cast<int32_t>(blockIdx.x));
    call.Run();
  });
}

namespace {

// Runs `f` once per rank, in threads of their own.
void OnRanks(World& world, const std::function<void(Rank&)>& f) {
  static auto* ranks = new std::deque<Rank>;  // communicators are never deleted
  static std::mutex mutex;
  std::vector<std::thread> threads;
  for (int r = 0; r < world.n; ++r) {
    threads.emplace_back([&world, &f, r] {
      {
        std::lock_guard<std::mutex> lock(mutex);
        own = &ranks->emplace_back();
      }
      own->world = &world;
      own->rank = r;
      f(*own);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Communicator* Get(Rank& rank, std::string* error) {
  return Communicator::Get(reinterpret_cast<ncclComm_t>(&rank), error);
}

CallSpec SpecOf(Collective collective, int32_t num_ranks) {
  CallSpec spec;
  spec.op = Name(collective);
  spec.site = "here.py:1";
  spec.collective = collective;
  spec.group_size = num_ranks;
  return spec;
}

// A sum over all ranks of `count` elements, twice.
void Sum(Communicator& communicator, int64_t count) {
  const auto n = static_cast<int32_t>(communicator.size());
  std::string error;
  const auto call =
      DeviceCall::Make(SpecOf(Collective::kAllReduce, n), communicator, DType::kS32, count, count, &error);
  CHECK(call != nullptr);
  Stream stream;
  for (int32_t round = 0; round < 2; ++round) {
    std::vector<int32_t> x(count), y(count, -1);
    for (int64_t i = 0; i < count; ++i) x[i] = static_cast<int32_t>(communicator.rank() + i + round);
    CHECK(call->Launch(x.data(), y.data(), stream.handle()).empty());
    while (!stream.Drain()) std::this_thread::yield();
    for (int64_t i = 0; i < count; ++i) CHECK(y[i] == n * (n - 1) / 2 + n * (i + round));
  }
}

void TestCallsShareACommunicator() {
  for (const int n : {1, 2, 3}) {
    Communicator::Configure(20, 4);
    auto* world = new World(n);
    OnRanks(*world, [&](Rank& rank) {
      std::string error;
      Communicator* const communicator = Get(rank, &error);
      CHECK(communicator != nullptr && communicator->rank() == rank.rank && communicator->size() == n);
      CHECK(communicator->max_channels() == 4 && communicator->device() == rank.rank);
      CHECK(Get(rank, &error) == communicator);
      Sum(*communicator, 1);
      CHECK(rank.num_allocations == 1);  // small calls need no arena
      Sum(*communicator, 1000);
      CHECK(rank.num_flagged == 4);
      Sum(*communicator, 40000);  // several channels
      Sum(*communicator, 1000);
      CHECK(rank.num_flagged == 6);
      device::Window small, large, again;
      int64_t bytes = 0;
      CHECK(communicator->Reserve(1, &small, &bytes, &error));
      const int before = rank.num_allocations;
      CHECK(communicator->Reserve(1000, &again, &bytes, &error) && again.base == small.base);
      CHECK(rank.num_allocations == before);
      // An arena that is too small stays where it is, for those who have it.
      CHECK(communicator->Reserve(bytes + 1, &large, &bytes, &error) && rank.num_allocations == before + 1);
      CHECK(large.base != small.base);
      CHECK(communicator->Reserve(bytes, &again, &bytes, &error) && again.base == large.base);
      Sum(*communicator, 1000);
      CHECK(communicator->Failure().empty());
    });
  }
  std::printf("ok calls share a communicator\n");
}

// For all ranks or for none.
void TestMulticast() {
  Communicator::Configure(20, 4, "");
  const auto has_address = [](bool multimem, int without_support, int without_address) {
    auto* world = new World(3);
    world->multimem = multimem;
    world->rank_without_multimem = without_support;
    world->rank_without_multicast = without_address;
    std::vector<char*> bases(3);
    OnRanks(*world, [&](Rank& rank) {
      std::string error;
      device::Comm comm;
      CHECK(Get(rank, &error)->ReserveFor("mine", 100, &comm, &error));
      CHECK(comm.arena_bytes >= 100 && comm.arena.At(0) != nullptr);
      bases[rank.rank] = comm.arena_multicast.base;
    });
    CHECK(bases[0] == bases[1] && bases[1] == bases[2]);
    return reinterpret_cast<uintptr_t>(bases[0]) > kMulticast;
  };
  CHECK(has_address(true, -1, -1));
  CHECK(!has_address(true, -1, 1));
  CHECK(!has_address(true, 2, -1));
  CHECK(!has_address(false, -1, -1));
  std::printf("ok multicast addresses\n");
}

// Sums, blocks of them and gathers, in an arena of their own that grows; and what users hear where there is none.
void TestCallsByMultimem() {
  constexpr int kRanks = 3;
  Communicator::Configure(20, 4, "");
  const auto spec_of = [](Collective collective) {
    CallSpec spec = SpecOf(collective, kRanks);
    spec.algorithm = "multimem";
    return spec;
  };
  auto* world = new World(kRanks);
  world->multimem = true;
  emulation::Multicast& multicast = emulation::TheMulticast();
  multicast.base = reinterpret_cast<char*>(kMulticast);
  multicast.bytes = World::kStride;
  multicast.replicas.clear();
  for (int r = 0; r < kRanks; ++r) multicast.replicas.push_back(world->memory + r * World::kStride);
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    const int before = rank.num_allocations;
    std::vector<std::unique_ptr<DeviceCall>> calls;  // those with a smaller arena go on using it
    const auto value = [](int r, int64_t i) { return static_cast<float>(r + i % 50); };
    for (const int64_t count : {5, 200'001, 5}) {
      for (const Collective collective : {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather}) {
        const int64_t input_count = collective == Collective::kReduceScatter ? kRanks * count : count;
        const int64_t output_count = collective == Collective::kAllGather ? kRanks * count : count;
        calls.push_back(
            DeviceCall::Make(spec_of(collective), communicator, DType::kF32, input_count, output_count, &error));
        CHECK(calls.back() != nullptr && !calls.back()->shares_input() && !calls.back()->shares_output());
        std::vector<float> x(input_count), y(output_count, -1);
        for (int64_t i = 0; i < input_count; ++i) x[i] = value(rank.rank, i);
        for (const auto& call : {calls.front().get(), calls.back().get()}) {
          if (call == calls.front().get() && (collective != Collective::kAllReduce || count != 5)) continue;
          Stream stream;
          CHECK(call->Launch(x.data(), y.data(), reinterpret_cast<cudaStream_t>(&stream)).empty());
          CHECK(stream.queue.size() == 1);  // no copies
          while (!stream.Drain()) std::this_thread::yield();
          for (int64_t i = 0; i < output_count; ++i) {
            float expected = 0;
            if (collective == Collective::kAllGather) expected = value(static_cast<int>(i / count), i % count);
            const int64_t at = collective == Collective::kReduceScatter ? rank.rank * count + i : i;
            for (int r = 0; r < kRanks && collective != Collective::kAllGather; ++r) expected += value(r, at);
            CHECK(y[i] == expected);
          }
        }
      }
    }
    CHECK(rank.num_multimem == 11 && rank.num_allocations == before + 2);
    CallSpec maximum = spec_of(Collective::kAllReduce);
    maximum.reduce_op = ReduceOp::kMax;
    CHECK(DeviceCall::Make(maximum, communicator, DType::kF32, 5, 5, &error) == nullptr);
    CHECK(Has(error, "needs f32, bf16 or f16 to add up, nothing else"));
  });
  auto* without = new World(kRanks);
  without->multimem = true;
  without->rank_without_multicast = 1;
  OnRanks(*without, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    CHECK(DeviceCall::Make(spec_of(Collective::kAllReduce), communicator, DType::kF32, 5, 5, &error) == nullptr);
    CHECK(Has(error, "algorithm \"multimem\" needs NVLink SHARP, which the group's GPUs, their switch or NCCL"));
    Sum(communicator, 1000);  // all else goes on
  });
  std::printf("ok calls by multimem\n");
}

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

// Runs of an all_reduce in which peers read the operands and write the results. Ranks `without_input` and
// `without_output` have none in a window of XLA's.
void SumWhereXlaPutsIt(int n, int without_input, int without_output) {
  Communicator::Configure(20, 4);
  auto* world = new World(n);
  OnRanks(*world, [&](Rank& rank) {
    constexpr int64_t kCount = 700;
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    const XlaMemory memory(rank);
    CallSpec spec = SpecOf(Collective::kAllReduce, n);
    spec.algorithm = "direct";
    const auto call = DeviceCall::Make(spec, communicator, DType::kS32, kCount, kCount, &error, true);
    CHECK(call && (n == 1 || (call->shares_input() && call->shares_output())));
    Stream stream;
    const auto on_stream = stream.handle();
    std::vector<int32_t> x_elsewhere(kCount), y_elsewhere(kCount);
    for (int32_t run = 0; run < 6; ++run) {
      DeviceCall::XlaWindow input = {memory.window, memory.InputOf(run / 2)};
      DeviceCall::XlaWindow output = {memory.window, memory.OutputOf(run / 2)};
      int32_t* x = memory.At(input.offset);
      int32_t* y = memory.At(output.offset);
      if (rank.rank == without_input) input = {}, x = x_elsewhere.data();
      if (rank.rank == without_output) output = {}, y = y_elsewhere.data();
      CHECK(call->Locate(x, y, input, output, on_stream).empty());
      for (int32_t replay = 0; replay < 2; ++replay) {  // as a CUDA graph does it
        for (int64_t i = 0; i < kCount; ++i) x[i] = static_cast<int32_t>(rank.rank + i + 10 * run + replay), y[i] = -1;
        CHECK(call->Launch(x, y, on_stream).empty());
        while (!stream.Drain()) std::this_thread::yield();
        for (int64_t i = 0; i < kCount; ++i) CHECK(y[i] == n * (n - 1) / 2 + n * (i + 10 * run + replay));
        for (int64_t i = 0; i < kCount; ++i) x[i] = y[i] = 0x77;  // of somebody else now
      }
    }
    CHECK(communicator.Failure().empty());
  });
}

void TestBuffersWhereXlaPutsThem() {
  SumWhereXlaPutsIt(1, -1, -1);
  SumWhereXlaPutsIt(3, -1, -1);
  SumWhereXlaPutsIt(3, 1, -1);
  SumWhereXlaPutsIt(3, -1, 2);
  SumWhereXlaPutsIt(3, 0, 0);
  std::printf("ok buffers where XLA puts them, of some ranks in the arena\n");
}

void TestWindowsThatChange() {
  Communicator::Configure(20, 4);
  auto* world = new World(2);
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    const XlaMemory memory(rank);
    CallSpec spec = SpecOf(Collective::kAllGather, 2);
    spec.algorithm = "direct";
    const auto call = DeviceCall::Make(spec, communicator, DType::kS32, 4, 8, &error, true);
    CHECK(call && call->shares_input() && !call->shares_output());
    Stream stream;
    const auto on_stream = stream.handle();
    int32_t* const x = memory.At(64);
    int32_t* const other = memory.At(128);
    int32_t y[8] = {};
    CHECK(call->Locate(x, y, {memory.window, 64}, {}, on_stream).empty());
    CHECK(stream.queue.size() == 1);
    CHECK(call->Locate(x, y, {memory.window, 64}, {}, on_stream).empty());
    CHECK(stream.queue.size() == 1);  // nothing new to tell
    // A plan that has been captured copies nothing.
    CHECK(Has(call->Locate(x, y, {}, {}, on_stream), "the operand was in a window of XLA's before, but is not now"));
    CHECK(Has(call->Launch(other, y, on_stream), "other buffers than it has initialized it with"));
    // Peers can't find a window that is not spaced as the communicator's own.
    Sum(communicator, 1);  // both ranks are here
    world->spacing_error = 64;
    const auto copies = DeviceCall::Make(spec, communicator, DType::kS32, 4, 8, &error, true);
    CHECK(copies->Locate(x, y, {memory.window, 64}, {}, on_stream).empty());
    Sum(communicator, 1);
    world->spacing_error = 0;
    CHECK(copies->Launch(other, y, on_stream).empty());
  });
  std::printf("ok windows that change\n");
}

ncclUniqueId KeyOf(World* world) {
  ncclUniqueId key;
  std::memcpy(key.internal, &world, sizeof world);
  return key;
}

// Of two groups, this process (number 3) has all GPUs of the second one.
const std::vector<Member> kMembers = {{2, 1}, {2, 0}, {3, 1}, {3, 0}};

void TestOwnCommunicators() {
  Communicator::Configure(20, 4);
  XLA_FFI_Api old = {};
  old.struct_size = xla_abi::kFindExtensionOffset;  // as jaxlib 0.10.2 has it
  const XlaCollectives lends_none(&old, nullptr);
  const std::vector<int64_t> ids = {0, 1, 2, 3};
  const DeviceGroups groups(ids, 2);
  CHECK(Has(RequestCommunicator(lends_none, groups, {}), "0.11.2 or later"));
  CHECK(RequestCommunicator(lends_none, groups, kMembers).empty());
  ncclComm_t none = nullptr;
  CHECK(Has(OwnCommunicators::Get(kMembers, 2, 5, &none), "not one of those that the call was compiled for"));
  auto* world = new World(2);
  OwnCommunicators::Add(3, {kMembers[2], kMembers[3]}, KeyOf(world));
  OwnCommunicators::Add(3, {kMembers[2], kMembers[3]}, KeyOf(new World(7)));  // the first counts
  OnRanks(*world, [&](Rank& rank) {
    const int32_t device = 1 - rank.rank;  // ranks are as the group has them
    for (int i = 0; i < 2; ++i) {
      ncclComm_t nccl_comm = nullptr;
      CHECK(GetCommunicator(lends_none, groups, kMembers, device, &nccl_comm).empty());
      CHECK(nccl_comm == reinterpret_cast<ncclComm_t>(&rank));
    }
    std::string error;
    Sum(*Get(rank, &error), 100);
  });
  CHECK(world->num_made == 2 && world->num_aborted == 0);
  CHECK(Has(OwnCommunicators::Get({{3, 0}, {3, 2}}, 2, 2, &none), "this process has not compiled the call"));

  Communicator::Configure(0.1, 4);
  auto* late = new World(2);
  OwnCommunicators::Add(3, {{3, 0}, {4, 0}}, KeyOf(late));
  OnRanks(*late, [&](Rank& rank) {
    if (rank.rank == 1) return;
    for (int i = 0; i < 2; ++i) {
      ncclComm_t nccl_comm = nullptr;
      CHECK(Has(OwnCommunicators::Get({{3, 0}, {4, 0}}, 2, 0, &nccl_comm), "did not come to make its communicator"));
      CHECK(nccl_comm == nullptr);
    }
  });
  CHECK(late->num_made == 1 && late->num_aborted == 1);
  std::printf("ok communicators of our own\n");
}

// Three runs of a call by XLA's stages. Rank 1 has no collective memory.
void RunByXla(bool windows, bool lends) {
  constexpr int kRanks = 3;
  constexpr int64_t kCount = 500;
  Communicator::Configure(20, 4);
  auto* world = new World(kRanks);
  auto* state = new CallState;  // of all devices
  state->spec = SpecOf(Collective::kAllReduce, kRanks);
  state->spec.algorithm = "direct";
  state->spec.groups = {0, 1, 2};
  state->windows = windows;
  if (!lends) {
    const int32_t process = windows ? 8 : 7;  // communicators are kept
    state->members = {{process, 0}, {process, 1}, {process, 2}};
    OwnCommunicators::Add(process, state->members, KeyOf(world));
  }
  OnRanks(*world, [&](Rank& rank) {
    const XlaMemory memory(rank);
    Stream stream;
    XlaDouble xla;
    xla.state = state;
    xla.stream = stream.handle();
    xla.device = rank.rank;
    xla.has_extension = lends;
    xla.communicator = &rank;
    xla.window = memory.window;
    xla.memory = reinterpret_cast<char*>(memory.At(0));
    xla.memory_bytes = rank.rank == 1 ? 0 : XlaMemory::kBytes;
    const auto stage = [&](auto handler, XLA_FFI_ExecutionStage at, int32_t* x, int32_t* y) {
      return xla.Run(handler, at, x, kCount, y, kCount);
    };
    for (int32_t run = 0; run < 3; ++run) {
      xla.run = run;
      int32_t* const x = memory.At(memory.InputOf(run));
      int32_t* const y = memory.At(memory.OutputOf(run));
      CHECK(stage(&CudaPrepare, XLA_FFI_ExecutionStage_PREPARE, x, y).empty());
      CHECK(xla.num_communicators == lends);
      CHECK(xla.regions.size() == (windows && lends ? 2 : 0));
      if (windows && lends) {
        CHECK(xla.regions[0].buffer == x && xla.regions[1].buffer == y && xla.regions[1].bytes == 4 * kCount);
      }
      if (run == 0) {
        const std::string early = stage(&CudaExecute, XLA_FFI_ExecutionStage_EXECUTE, x, y);
        CHECK(Has(early, "XLA has not initialized the call on GPU"));
      }
      CHECK(stage(&CudaInitialize, XLA_FFI_ExecutionStage_INITIALIZE, x, y).empty());
      for (int64_t i = 0; i < kCount; ++i) x[i] = static_cast<int32_t>(rank.rank + i + run), y[i] = -1;
      const size_t before = stream.queue.size();
      CHECK(stage(&CudaExecute, XLA_FFI_ExecutionStage_EXECUTE, x, y).empty());
      // One kernel, which copies what must be copied; with windows, one before it.
      CHECK(stream.queue.size() - before == static_cast<size_t>(windows ? 2 : 1));
      while (!stream.Drain()) std::this_thread::yield();
      for (int64_t i = 0; i < kCount; ++i) CHECK(y[i] == kRanks * (kRanks - 1) / 2 + kRanks * (i + run));
    }
    std::string error;
    device::Report& report = *Get(rank, &error)->comm().report;
    report.state = device::Report::kComplete;
    xla.run = 3;
    int32_t* const x = memory.At(memory.InputOf(0));
    for (const auto& [handler, at] : {std::pair{&CudaInitialize, XLA_FFI_ExecutionStage_INITIALIZE},
                                      std::pair{&CudaExecute, XLA_FFI_ExecutionStage_EXECUTE}}) {
      CHECK(Has(stage(handler, at, x, x), "can't run, since a call before it failed"));
    }
  });
}

void TestStagesOfXla() {
  for (const bool windows : {false, true}) {
    for (const bool lends : {true, false}) Alone([&] { RunByXla(windows, lends); });
  }
  std::printf("ok calls by XLA's stages\n");
}

// All later runs use what the first one has found, whatever it would find now: no run plans again.
void TestPrepareFindsOnce() {
  Communicator::Configure(20, 4);
  CallState state;
  state.spec = SpecOf(Collective::kAllReduce, 2);
  state.spec.algorithm = "direct";
  state.spec.groups = {0, 2, 1, 3};
  state.windows = true;
  XlaDouble xla;
  xla.state = &state;
  int32_t x[4], y[4];
  for (int run = 0; run < 3; ++run) {
    CHECK(xla.Run(&CudaPrepare, XLA_FFI_ExecutionStage_PREPARE, x + run, 1, y + run, 1).empty());
    CHECK(xla.num_groups == 2 && xla.groups[0].size == 2 && xla.groups[1].size == 2);
    CHECK(xla.groups[1].ids[0] == 1 && xla.groups[1].ids[1] == 3);
    CHECK(xla.regions.size() == 2 && xla.regions[0].bytes == 4 && xla.regions[1].bytes == 4);
    CHECK(xla.regions[0].buffer == x + run && xla.regions[1].buffer == y + run);
    state.spec.algorithm = "none of this name";
    state.spec.group_size = 1;
  }
  std::printf("ok what is prepared is found once\n");
}

// Two devices of a process, each a group of its own. XLA ends a process in which one of them fails to initialize alone.
void TestLocalDevicesFailTogether() {
  Communicator::Configure(20, 4);
  CallState state;
  state.spec = SpecOf(Collective::kAllReduce, 1);
  state.spec.groups = {0, 1};
  struct Device {
    World* world = new World(1);
    Rank rank = {world, 0};
    Stream stream;
    XlaDouble xla;
  };
  Device devices[2];
  int32_t x[4] = {}, y[4];
  const auto stage = [&](int device, auto handler, XLA_FFI_ExecutionStage at, int64_t run) {
    Device& of = devices[device];
    own = &of.rank;
    of.xla.state = &state;
    of.xla.stream = of.stream.handle();
    of.xla.device = device;
    of.xla.run = run;
    of.xla.communicator = &of.rank;
    of.xla.num_communicators = 1;
    return of.xla.Run(handler, at, x, 4, y, 4);
  };
  const auto initialize = [&](int device, int64_t run) {
    return stage(device, &CudaInitialize, XLA_FFI_ExecutionStage_INITIALIZE, run);
  };
  for (int device = 0; device < 2; ++device) CHECK(initialize(device, 0).empty());

  // What one device alone can't do.
  CallState other;
  other.spec = state.spec;
  other.spec.group_size = 2;
  Device& of = devices[0];
  of.xla.state = &other;
  own = &of.rank;
  for (int64_t run = 1; run < 3; ++run) {
    of.xla.run = run;
    of.xla.num_communicators = 1;
    CHECK(of.xla.Run(&CudaInitialize, XLA_FFI_ExecutionStage_INITIALIZE, x, 4, y, 4).empty());
    const std::string late = of.xla.Run(&CudaExecute, XLA_FFI_ExecutionStage_EXECUTE, x, 4, y, 4);
    CHECK(Has(late, "the group's communicator has 1 ranks, the group 2"));
  }

  CHECK(initialize(0, 1).empty());
  std::string error;
  Get(devices[1].rank, &error)->comm().report->state = device::Report::kComplete;
  CHECK(initialize(1, 1).empty());  // as the other one
  for (int device = 0; device < 2; ++device) CHECK(Has(initialize(device, 2), "a call before it failed"));

  std::printf("ok local devices fail together\n");
}

void TestCallsOnTwoStreams() {
  Communicator::Configure(20, 4);
  auto* world = new World(1);
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    Stream one, other, captured;
    captured.captures = true;
    CHECK(communicator.Begin(one.handle()).empty() && communicator.End(one.handle()).empty());
    CHECK(communicator.Begin(one.handle()).empty() && one.num_waits == 0);
    CHECK(one.num_records == 1);
    CHECK(communicator.Begin(other.handle()).empty() && other.num_waits == 1 &&
          communicator.End(other.handle()).empty());
    CHECK(communicator.Begin(one.handle()).empty() && one.num_waits == 1);
    // What is captured waits for nothing, and nothing for it.
    CHECK(communicator.Begin(captured.handle()).empty() && communicator.End(captured.handle()).empty());
    CHECK(captured.num_waits == 0 && captured.num_records == 0);
    CHECK(communicator.Begin(other.handle()).empty() && other.num_waits == 1);
    // Each call does so.
    const auto call = DeviceCall::Make(SpecOf(Collective::kAllReduce, 1), communicator, DType::kS32, 8, 8, &error);
    int32_t x[8] = {}, y[8];
    CHECK(call->Launch(x, y, one.handle()).empty() && one.num_waits == 2 && one.num_records == 2);
  });
  std::printf("ok calls on two streams follow each other\n");
}

// One communicator for NVLink inside of nodes and for GIN between them.
void TestGinBetweenNodes() {
  for (const auto& [n, nodes] : {std::pair{2, 2}, std::pair{4, 2}, std::pair{6, 3}}) {
    Communicator::Configure(20, 4, "");
    auto* world = new World(n);
    world->num_lsa_teams = nodes;
    world->gin = NCCL_GIN_TYPE_GDAKI;
    world->split_fails = true;  // nobody wants other communicators
    OnRanks(*world, [&, n = n](Rank& rank) {
      std::string error;
      Communicator* const communicator = Get(rank, &error);
      CHECK(communicator != nullptr && communicator->gin() != nullptr && communicator->messenger() == nullptr);
      CHECK(communicator->seat().ranks_per_node == world->team_size() && rank.num_gin == 1);
      Sum(*communicator, 1);
      Sum(*communicator, 1000);
      Sum(*communicator, 40000);  // several channels
      device::Window larger;
      int64_t bytes = 0;
      CHECK(communicator->Reserve(1, &larger, &bytes, &error) &&
            communicator->Reserve(bytes + 1, &larger, &bytes, &error));
      Sum(*communicator, 1000);  // in the new arena
      const CallSpec spec = SpecOf(Collective::kBarrier, n);
      const auto barrier = DeviceCall::Make(spec, *communicator, DType::kS32, 0, 0, &error);
      Stream stream;
      CHECK(barrier != nullptr && barrier->Launch(nullptr, nullptr, stream.handle()).empty());
      while (!stream.Drain()) std::this_thread::yield();
      CHECK(communicator->Failure().empty());
    });
  }
  std::printf("ok GIN between nodes, NVLink inside\n");
}

// GIN is for all ranks or for none. Without it, each node gets a communicator, which here NCCL refuses.
void TestGinForAllOrNone() {
  Communicator::Configure(20, 4, "");
  for (const bool on_rank_1 : {true, false}) {
    auto* world = new World(4);
    world->num_lsa_teams = 2;
    world->gin = on_rank_1 ? NCCL_GIN_TYPE_PROXY : NCCL_GIN_TYPE_NONE;
    world->rank_without_gin = 1;
    world->split_fails = true;
    OnRanks(*world, [&](Rank& rank) {
      std::string error;
      CHECK(Get(rank, &error) == nullptr && Has(error, "ncclGetUniqueId"));
      CHECK(rank.num_gin == 0);
    });
  }
  std::printf("ok GIN for all ranks or for none\n");
}

void TestBuffersOfNothing() {
  Communicator::Configure(20, 4);
  auto* world = new World(2);
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    const auto call = DeviceCall::Make(SpecOf(Collective::kAllReduce, 2), communicator, DType::kF32, 0, 0, &error);
    CHECK(call && call->Launch(nullptr, nullptr, nullptr).empty());
    const auto aligned = DeviceCall::Make(SpecOf(Collective::kAllReduce, 2), communicator, DType::kF32, 1, 1, &error);
    char buffer[16];
    CHECK(aligned->Launch(buffer + 1, buffer, nullptr) == "the operand is not aligned to its elements of 4 bytes");
  });
  std::printf("ok buffers of nothing, buffers that are not aligned\n");
}

// All ranks are told what is wrong, at the first use and ever after.
void Refused(World* world, const std::string& expected, const Fault& of_rank_2 = {}) {
  OnRanks(*world, [&](Rank& rank) {
    if (rank.rank == 2) fault = of_rank_2;
    for (int i = 0; i < 2; ++i) {
      std::string error;
      CHECK(Get(rank, &error) == nullptr);
      if (!Has(error, expected)) std::fprintf(stderr, "rank %d: %s\n", rank.rank, error.c_str());
      CHECK(Has(error, expected));
    }
  });
}

void TestRefusals() {
  Communicator::Configure(20, 4);
  auto* nodes = new World(2);
  nodes->num_lsa_teams = 2;
  nodes->split_fails = true;
  Refused(nodes, "ncclGetUniqueId");
  auto* plain = new World(2);
  plain->device_api = false;
  Refused(plain, "have no windows");
  auto* null = new World(2);
  null->windows = false;
  Refused(null, "NCCL gave no window");
  Refused(new World(3), "rank 2 of the group has no 2097152 bytes of GPU memory left for the signals",
          {"ncclMemAlloc"});
  auto* uneven = new World(3);
  uneven->spacing_error = 64;
  Refused(uneven, "not equally spaced");
  Communicator::Configure(20, 1000);
  Refused(new World(1), "JAXCOMM_MAX_SMS is 1000, but GPU 0 has 132 SMs");
  std::printf("ok what can't work is refused\n");
}

void TestRanksThatDiffer() {
  Communicator::Configure(20, 4);
  auto* world = new World(2);
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    device::Window arena;
    int64_t bytes = 0;
    CHECK(!communicator.Reserve(int64_t{40 + 8 * rank.rank} << 20, &arena, &bytes, &error));
    CHECK(Has(error, "their programs differ"));
    CallSpec spec = SpecOf(Collective::kAllReduce, 2);
    spec.max_sms = 2 + rank.rank;
    for (const int64_t count : {1 << 22, 3000}) {  // a plan, messages with flags
      CHECK(DeviceCall::Make(spec, communicator, DType::kF32, count, count, &error) == nullptr);
      CHECK(Has(error, "(max_sms) must be the same on all ranks, but is " + std::to_string(3 - rank.rank) +
                           " on rank " + std::to_string(1 - rank.rank)));
    }
  });
  std::printf("ok ranks whose programs differ are told so\n");
}

// Settings of the environment. Rank 1 gets others when rank 0 has read its own.
void TestSettingsThatDiffer() {
  struct Settings {
    int32_t channels;
    bool windows;
  };
  const auto differ = [](Settings of_0, Settings of_1, const std::string& on_0, const std::string& on_1) {
    Communicator::Configure(20, of_0.channels, "", of_0.windows);
    auto* world = new World(2);
    OnRanks(*world, [&](Rank& rank) {
      if (rank.rank == 1) {
        Until(world->mutex, [&] { return world->gathers[0].num_arrived == 1; });
        Communicator::Configure(20, of_1.channels, "", of_1.windows);
      }
      for (int i = 0; i < 2; ++i) {
        std::string error;
        CHECK(Get(rank, &error) == nullptr);
        CHECK(Has(error, rank.rank == 0 ? on_0 : on_1));
      }
    });
  };
  differ({4, true}, {5, true}, "JAXCOMM_MAX_SMS must be the same on all ranks, but is 5 on rank 1 and 4 on rank 0",
         "JAXCOMM_MAX_SMS must be the same on all ranks, but is 4 on rank 0 and 5 on rank 1");
  differ({4, true}, {4, false}, "JAXCOMM_WINDOWS must be the same on all ranks, but is 0 on rank 1 and 1 on rank 0",
         "JAXCOMM_WINDOWS must be the same on all ranks, but is 1 on rank 0 and 0 on rank 1");
  std::printf("ok ranks whose settings differ are told so\n");
}

void TestARankThatDoesNotCome() {
  Communicator::Configure(0.2, 4);
  auto* world = new World(2);
  OnRanks(*world, [&](Rank& rank) {
    if (rank.rank == 1) return;
    std::string error;
    CHECK(Get(rank, &error) == nullptr);
    CHECK(Has(error, "did not come within 0.2 s (JAXCOMM_TIMEOUT_S)"));
  });
  std::printf("ok a rank that does not come is not waited for without end\n");
}

// What it has sent may be there when the other one comes, who then goes on.
void TestRanksThatDidNotMeet() {
  Communicator::Configure(0.2, 4);
  auto* world = new World(2);
  std::atomic<int> turn{0};
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    Communicator& other = *Get(*new Rank{new World(1), 0}, &error);
    if (rank.rank == 1) {
      while (turn < 1) std::this_thread::yield();
      CHECK(communicator.IsSameOnAllRanks("a", 1, &error));
      return;
    }
    CHECK(!communicator.IsSameOnAllRanks("a", 1, &error));
    const std::string late = "the other ranks of the group of 2 did not come within 0.2 s";
    CHECK(Has(error, late));
    turn = 1;
    const int before = rank.num_gathers;
    device::Window arena;
    int64_t bytes = 0;
    for (int i = 0; i < 2; ++i) {
      CHECK(!communicator.IsSameOnAllRanks("b", 1, &error) && Has(error, "ranks did not meet before: " + late));
      CHECK(!communicator.Reserve(1, &arena, &bytes, &error) && Has(error, "ranks did not meet before: " + late));
      CHECK(!communicator.AllDone("here", true, &error) && Has(error, "ranks did not meet before: " + late));
      CHECK(Has(communicator.Failure(), late));
    }
    CHECK(rank.num_gathers == before);
    CHECK(other.Failure().empty());
  });
  std::printf("ok ranks that did not meet don't go on as if they had\n");
}

// Of GPUs that have work for longer than the timeout, first runs still find all ranks.
void TestWorkBeforeIsNotCounted() {
  Communicator::Configure(0.5, 4);
  auto* world = new World(2);
  CallState states[2];
  for (CallState& state : states) {
    state.spec = SpecOf(Collective::kAllReduce, 2);
    state.spec.groups = {0, 1};
  }
  OnRanks(*world, [&](Rank& rank) {
    Stream stream;
    rank.busy = &stream;
    for (CallState& state : states) {
      const auto begin = std::chrono::steady_clock::now();
      stream.queue.push_back([=] { return std::chrono::steady_clock::now() - begin > std::chrono::seconds(1); });
      XlaDouble xla;
      xla.state = &state;
      xla.stream = stream.handle();
      xla.device = rank.rank;
      xla.communicator = &rank;
      xla.num_communicators = 1;
      int32_t x[4] = {1, 2, 3, 4}, y[4] = {};
      CHECK(xla.Run(&CudaInitialize, XLA_FFI_ExecutionStage_INITIALIZE, x, 4, y, 4).empty());
      CHECK(xla.Run(&CudaExecute, XLA_FFI_ExecutionStage_EXECUTE, x, 4, y, 4).empty());
      doubles::Wait(stream.handle());
      CHECK(y[3] == 8);
    }
    rank.busy = nullptr;
  });
  std::printf("ok what a GPU had to do before is not counted\n");
}

// To free memory waits for the GPU, and so perhaps for another device that needs the lock.
void TestReplacedCallsEndWithoutTheLock() {
  Communicator::Configure(20, 4);
  CallState state;
  state.spec = SpecOf(Collective::kAllReduce, 1);
  state.spec.algorithm = "direct";
  state.spec.groups = {0};
  int num_freed = 0;
  for (int run = 0; run < 2; ++run) {
    Rank& rank = *new Rank{new World(1), 0};
    own = &rank;
    Stream stream;
    XlaDouble xla;
    xla.state = &state;
    xla.stream = stream.handle();
    xla.run = run;
    xla.communicator = &rank;
    xla.num_communicators = 1;
    before_free = [&] {
      std::thread([&] {
        CHECK(state.mutex.try_lock());
        state.mutex.unlock();
      }).join();
      ++num_freed;
    };
    int32_t x[4] = {}, y[4];
    CHECK(xla.Run(&CudaInitialize, XLA_FFI_ExecutionStage_INITIALIZE, x, 4, y, 4).empty());
    before_free = nullptr;
    CHECK(num_freed == run);
  }
  std::printf("ok calls that are replaced end without the lock\n");
}

void TestNamesOfCalls() {
  auto first = std::make_unique<CallName>("first");
  const uint64_t number = first->number();
  std::vector<std::unique_ptr<CallName>> others;
  for (int i = 0; i < 1000; ++i) others.push_back(std::make_unique<CallName>("other"));
  first.reset();
  CHECK(CallName::Of(number) == "first");  // who asks late
  const uint64_t lasting = others[0]->number();
  for (size_t i = 1; i < others.size(); ++i) others[i].reset();
  CHECK(CallName::Of(number) == "a call");
  CHECK(CallName::Of(lasting) == "other" && lasting != number);
  CHECK(CallName("next").number() > lasting);
  std::printf("ok names of calls that have ended are forgotten\n");
}

void TestFailuresLast() {
  Communicator::Configure(20, 4);
  auto* world = new World(2);
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    Sum(communicator, 10);
    device::Report& report = *communicator.comm().report;
    const CallName name("psum at there.py:3");
    report.program = name.number();
    report.rank = rank.rank;
    report.peer = 1 - rank.rank;
    report.step = kEnter;
    report.state = device::Report::kClaimed;
    CHECK(communicator.Failure().empty());  // still being written
    const auto num_known = [&] {
      const std::vector<std::string> known = Communicator::Failures();
      return std::count_if(known.begin(), known.end(), [&](const std::string& failure) {
        return Has(failure, "there.py:3: rank " + std::to_string(rank.rank));
      });
    };
    CHECK(num_known() == 0);
    report.state = device::Report::kComplete;
    CHECK(num_known() == 1);
    const std::string me = std::to_string(rank.rank), peer = std::to_string(1 - rank.rank);
    for (int i = 0; i < 2; ++i) {
      CHECK(Has(communicator.Failure(), "psum at there.py:3: rank " + me + " gave up when entering: rank " + peer +
                                            " did not signal within 20 s"));
    }
  });
  std::printf("ok failures last\n");
}

// Kernels have given up, with runs behind them. A peer may be late, and still read from the arena what it found there;
// and whatever comes next on these GPUs may have the result of such a kernel for its operand.
void TestNothingComesAfterAGiveUp() {
  constexpr int64_t kCount = 40000;  // several channels
  Communicator::Configure(20, 4);
  auto* other_world = new World(2);
  OnRanks(*new World(2), [&](Rank& rank) {
    Rank& other_rank = *new Rank{other_world, rank.rank};  // of the same GPU
    Stream stream;
    const auto on_stream = stream.handle();
    const auto make = [&](Rank& of, const char* algorithm, int64_t count) {
      own = &of;
      CallSpec spec = SpecOf(Collective::kAllReduce, 2);
      spec.algorithm = algorithm;
      std::string error;
      auto call = DeviceCall::Make(spec, *Get(of, &error), DType::kS32, count, count, &error);
      CHECK(call != nullptr);
      return call;
    };
    const auto call = make(rank, "direct", kCount);
    const auto flagged = make(rank, "flagged", 2);
    const auto other = make(other_rank, "direct", kCount);
    CHECK(call->shares_input() && call->shares_output());
    const auto run = [&](Rank& of, const DeviceCall& launched, const std::vector<int32_t>& x) {
      own = &of;
      std::vector<int32_t> y(kCount, -1);
      for (int i = 0; i < 3; ++i) CHECK(launched.Launch(x.data(), y.data(), on_stream).empty());
      while (!stream.Drain()) std::this_thread::yield();
      return y;
    };
    const std::vector<int32_t> untouched(kCount, -1);
    CHECK(run(rank, *call, std::vector<int32_t>(kCount, 1 + rank.rank)) == std::vector<int32_t>(kCount, 3));
    CHECK(run(other_rank, *other, std::vector<int32_t>(kCount, 5)) == std::vector<int32_t>(kCount, 10));

    device::GiveUp(call->communicator().comm(), 1);
    std::string error;
    device::Window arena;
    int64_t bytes = 0;
    CHECK(call->communicator().Reserve(1, &arena, &bytes, &error));
    const std::vector<char> before(arena.At(rank.rank), arena.At(rank.rank) + bytes);
    const std::vector<int32_t> next(kCount, 77);
    CHECK(run(rank, *call, next) == untouched && run(rank, *flagged, next) == untouched);
    CHECK(std::equal(before.begin(), before.end(), arena.At(rank.rank)));
    CHECK(run(other_rank, *other, next) == untouched);
  });
  std::printf("ok nothing comes after a kernel that has given up\n");
}

// Calls on two communicators that have nothing in common but the process. The first to fail is named, for good.
void TestOneFailureEndsAllCalls() {
  Communicator::Configure(20, 4);
  CallState state;
  state.spec = SpecOf(Collective::kAllReduce, 1);
  state.spec.groups = {0};
  Rank ranks[3];
  Stream stream;
  XlaDouble xla;
  xla.state = &state;
  xla.stream = &stream;
  xla.communicator = &ranks[0];
  int32_t x[4] = {}, y[4];
  const auto stage = [&](auto handler, XLA_FFI_ExecutionStage at, int64_t run) {
    xla.run = run;
    xla.num_communicators = 1;
    return xla.Run(handler, at, x, 4, y, 4);
  };
  const auto fail = [&](Rank& rank, const char* call, uint64_t time_ns) {
    std::string error;
    device::Report& report = *Get(rank, &error)->comm().report;
    report.program = CallName(call).number();  // known a while longer
    report.time_ns = time_ns;
    report.state = device::Report::kComplete;
  };
  for (Rank& rank : ranks) {
    own = &rank;
    rank.world = new World(1);
    std::string error;
    CHECK(Get(rank, &error) != nullptr);
  }
  own = &ranks[0];
  CHECK(stage(&CudaInitialize, XLA_FFI_ExecutionStage_INITIALIZE, 1).empty());
  CHECK(Communicator::FirstFailure().empty());
  fail(ranks[1], "psum at second.py:1", 2000);
  fail(ranks[2], "psum at first.py:1", 1000);
  for (const auto& [handler, at] : {std::pair{&CudaExecute, XLA_FFI_ExecutionStage_EXECUTE},
                                    std::pair{&CudaInitialize, XLA_FFI_ExecutionStage_INITIALIZE}}) {
    CHECK(Has(stage(handler, at, 2), "here.py:1 can't run, since a call before it failed: psum at first.py:1: rank 0"));
  }
  fail(ranks[0], "psum at last.py:1", 1);  // told too late
  CHECK(Has(stage(&CudaExecute, XLA_FFI_ExecutionStage_EXECUTE, 3), "failed: psum at first.py:1"));
  CHECK(Communicator::Failures().size() == 3);
  std::printf("ok one failure ends all calls of the process\n");
}

}  // namespace
}  // namespace cuda

void doubles::OnRanks(int num_ranks, const std::function<void(int rank, void* nccl_comm)>& f) {
  auto* world = new World(num_ranks);
  cuda::OnRanks(*world, [&](Rank& rank) { f(rank.rank, &rank); });
}

}  // namespace jaxcomm

int main() {
  using jaxcomm::Alone;
  jaxcomm::cuda::CallState::id.type_id = 1;  // as registration does it
  Alone(jaxcomm::cuda::TestCallsShareACommunicator);
  Alone(jaxcomm::cuda::TestBuffersWhereXlaPutsThem);
  Alone(jaxcomm::cuda::TestWindowsThatChange);
  Alone(jaxcomm::cuda::TestOwnCommunicators);
  Alone(jaxcomm::cuda::TestStagesOfXla);
  Alone(jaxcomm::cuda::TestPrepareFindsOnce);
  Alone(jaxcomm::cuda::TestLocalDevicesFailTogether);
  Alone(jaxcomm::cuda::TestCallsOnTwoStreams);
  Alone(jaxcomm::cuda::TestMulticast);
  Alone(jaxcomm::cuda::TestCallsByMultimem);
  Alone(jaxcomm::cuda::TestGinBetweenNodes);
  Alone(jaxcomm::cuda::TestGinForAllOrNone);
  Alone(jaxcomm::cuda::TestBuffersOfNothing);
  Alone(jaxcomm::cuda::TestRefusals);
  Alone(jaxcomm::cuda::TestRanksThatDiffer);
  Alone(jaxcomm::cuda::TestSettingsThatDiffer);
  Alone(jaxcomm::cuda::TestARankThatDoesNotCome);
  Alone(jaxcomm::cuda::TestRanksThatDidNotMeet);
  Alone(jaxcomm::cuda::TestWorkBeforeIsNotCounted);
  Alone(jaxcomm::cuda::TestReplacedCallsEndWithoutTheLock);
  Alone(jaxcomm::cuda::TestNamesOfCalls);
  Alone(jaxcomm::cuda::TestFailuresLast);
  Alone(jaxcomm::cuda::TestNothingComesAfterAGiveUp);
  Alone(jaxcomm::cuda::TestOneFailureEndsAllCalls);
  Alone(jaxcomm::TestUserCalls);
  return 0;
}
