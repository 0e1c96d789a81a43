// The functions of machine.h. machine_kernels.cc has the launches. Compiled with JAXCOMM_EMULATION.
#include "machine.h"

#include <unistd.h>

#include <algorithm>
#include <set>

#include "../../../ffi/cuda/kernels/executor.cuh"
#include "../../../ffi/cuda/nccl/threads.h"
#include "../../../ffi/cuda/runtime/own_communicators.h"

namespace jaxcomm {
namespace fake {

thread_local Rank* own = nullptr;

namespace {

// Runs a call on another thread with the thread-local state of a rank's thread.
cuda::Carried Carry(std::function<void()> call) {
  struct Carry {
    Rank* rank;
    Fault fault;
    std::function<void()> after_init;
  };
  const auto carry = std::make_shared<Carry>(Carry{own, fault, after_init});
  return {[carry, call = std::move(call)] {
            own = carry->rank;
            fault = carry->fault;
            after_init = carry->after_init;
            call();
            carry->fault = fault;
          },
          [carry] { fault = carry->fault; }};
}
const bool carries = (cuda::carry_to_thread = &Carry) != nullptr;

// NCCL allows one call at a time on a communicator. A call that waits for other ranks ends when it is revoked.
struct InCall {
  explicit InCall(Rank& of) : rank(of) { CHECK(!rank.in_call->exchange(true)); }
  ~InCall() { *rank.in_call = false; }
  template <typename F>
  ncclResult_t Until(F condition) {
    while (!condition()) {
      if (*rank.revoked) return ncclRemoteError;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return ncclSuccess;
  }
  Rank& rank;
};

ncclResult_t MemAlloc(void** memory, size_t) {
  ++own->num_allocations;
  const ncclResult_t allocated = FakeLibrary().MemAlloc(memory, 1);
  if (allocated == ncclSuccess) ++num_symmetric;
  return allocated;
}

ncclResult_t AllGather(const void* from, void* to, size_t count, ncclDataType_t, ncclComm_t comm, cudaStream_t stream) {
  Rank& rank = Of(comm);
  const InCall in_call(rank);
  if (Fails("ncclAllGather")) return ncclInternalError;
  while (rank.world->connects != nullptr && !*rank.world->connects) std::this_thread::yield();
  const int number = rank.num_gathers++;
  const size_t bytes = count * sizeof(uint64_t);
  auto sent = std::make_shared<bool>(false);
  Of(stream).queue.push_back([&rank, number, bytes, from, to, sent] {
    if (*rank.revoked) return true;
    if (own->busy != nullptr && !own->busy->Drain()) return false;
    std::lock_guard<std::mutex> lock(rank.world->mutex);
    World::Gather& gather = rank.world->gathers[number];
    gather.bytes.resize(bytes * rank.world->n);
    if (!*sent) {
      char* const at = gather.bytes.data() + bytes * rank.rank;
      std::memcpy(at, from, bytes);
      // The first word of the first exchange is the incarnation of the process.
      if (bytes == 2 * sizeof(uint64_t) && rank.restarted != 0) std::memcpy(at, &rank.restarted, sizeof(uint64_t));
      ++gather.num_arrived;
      *sent = true;
    }
    if (gather.num_arrived < rank.world->n) return false;
    std::memcpy(to, gather.bytes.data(), gather.bytes.size());
    return true;
  });
  return ncclSuccess;
}

}  // namespace

World::World(int num_ranks, World* of)
    : n(num_ranks), root(of != nullptr ? *of : *this), first_device([] {
        static std::atomic<int> number{0};
        return 100 * number++;
      }()) {
  const int file = memfd_create("world", 0);
  CHECK(file >= 0 && ftruncate(file, n * kStride) == 0);
  for (int r = 0; r < n; ++r) {
    void* const view = mmap(nullptr, n * kStride, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    CHECK(view != MAP_FAILED);
    memory.push_back(static_cast<char*>(view));
  }
  close(file);
}

void Destroy(Rank& of_xla) {
  of_xla.destroyed = true;
  CHECK(mprotect(of_xla.world->memory[of_xla.rank], of_xla.world->n * World::kStride, PROT_NONE) == 0);
}

// Blocks until all ranks have arrived, as NCCL does. The window's memory is at another address than the registered
// memory: jaxcomm may rely only on NCCL's guarantees.
ncclResult_t WindowRegister(ncclComm_t comm, void*, size_t bytes, ncclWindow_t* window, int flags) {
  Rank& rank = Of(comm);
  // XLA asks for NCCL's symmetric kernels on its own communicator.
  CHECK(flags == (rank.world == &rank.world->root ? NCCL_WIN_COLL_SYMMETRIC : NCCL_WIN_DEFAULT));
  InCall in_call(rank);
  World& world = *rank.world;
  *window = nullptr;
  if (!world.root.windows) return ncclSuccess;
  auto* registered = Keep(std::make_unique<Registered>());
  registered->rank = &rank;
  registered->first = rank.rank / world.team_size() * world.team_size();
  const int number = rank.num_mappings++;
  {
    std::lock_guard<std::mutex> lock(world.mutex);
    World::Mapping& mapping = world.mappings[number];
    if (mapping.num_arrived == 0) {
      mapping.begin = world.mapped;
      world.mapped += static_cast<int64_t>(bytes) + 4096;
    }
    registered->begin = mapping.begin;
    CHECK(mapping.begin + static_cast<int64_t>(bytes) <= World::kStride);
    for (int r = 0; r < world.n; ++r) {
      char* const at = world.memory[rank.rank] + r * World::kStride + mapping.begin;
      CHECK(mprotect(at, bytes, PROT_READ | PROT_WRITE) == 0);
      if (r == rank.rank) std::memset(at, 0x5c, bytes);  // memory is not zero at first
    }
    if (world.root.never_registers != rank.rank) ++mapping.num_arrived;
  }
  const auto all_arrived = [&world, number] {
    std::lock_guard<std::mutex> lock(world.mutex);
    return world.mappings[number].num_arrived == world.n;
  };
  const bool fails = Fails("ncclCommWindowRegister");
  const ncclResult_t result = in_call.Until(all_arrived);
  if (fails) return ncclUnhandledCudaError;
  if (result == ncclSuccess) *window = reinterpret_cast<ncclWindow_t>(registered);
  return result;
}

ncclResult_t LsaPointer(ncclWindow_t window, size_t offset, int rank, void** address) {
  const Registered& registered = *reinterpret_cast<Registered*>(window);
  CHECK(!registered.rank->destroyed);
  const World& world = *registered.rank->world;
  if (Fails("ncclGetLsaDevicePointer")) return ncclInternalError;
  if (rank >= world.team_size()) return ncclInvalidArgument;
  *address = registered.At(rank, static_cast<int64_t>(offset)) + (rank == 1 ? world.root.spacing_error.load() : 0);
  return ncclSuccess;
}

namespace {

// What a key of NCCL's has: the world of XLA's communicator, and the number of jaxcomm's communicator.
struct Key {
  World* root;
  int number;
};

// Never deleted.
Rank* NewRank(World& world, int rank) {
  Rank* const made = Keep(std::make_unique<Rank>());
  made->world = &world;
  made->rank = rank;
  return made;
}

// Blocks until all ranks have arrived.
ncclResult_t InitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId key, int rank, ncclConfig_t* config) {
  Key made_of;
  std::memcpy(&made_of, key.internal, sizeof made_of);
  World* const root = made_of.root;
  CHECK(config->blocking == 1 && config->minCTAs == 1 && config->maxCTAs == 1 && rank < num_ranks);
  CHECK(config->numRmaCtx == 0 && config->collnetEnable == 0 && config->nChannelsPerNetPeer == 1);
  if (root->never_joins == rank) return ncclInternalError;
  const bool fails = Fails("ncclCommInitRankConfig");
  World* world = nullptr;
  {
    std::lock_guard<std::mutex> lock(root->mutex);
    std::unique_ptr<World>& shared = root->own[made_of.number];
    if (!shared) shared = std::make_unique<World>(num_ranks, root);
    world = shared.get();
    CHECK(world->n == num_ranks);
    ++world->num_made;
    ++root->num_made;
  }
  own->made = NewRank(*world, rank);
  own->made->number = own->device();
  *comm = reinterpret_cast<ncclComm_t>(own->made);
  InCall(*own->made).Until([&] {
    std::lock_guard<std::mutex> lock(root->mutex);
    return world->num_made == world->n;
  });
  if (fails) return ncclInternalError;
  if (after_init) std::exchange(after_init, nullptr)();
  return rank % 2 == 0 ? ncclInProgress : ncclSuccess;  // NCCL_COMM_BLOCKING=0 of some processes
}

ncclResult_t AsyncError(ncclComm_t comm, ncclResult_t* result) {
  Of(comm);
  return *result = ncclSuccess;
}

ncclResult_t Abort(ncclComm_t comm) {
  World& root = Of(comm).world->root;
  CHECK(&root != Of(comm).world);  // XLA's communicator is not jaxcomm's to abort
  std::lock_guard<std::mutex> lock(root.mutex);
  ++root.num_aborted;
  return ncclSuccess;
}

ncclResult_t Revoke(ncclComm_t comm, int) {
  CHECK(&Of(comm).world->root != Of(comm).world);
  *Of(comm).revoked = true;
  return ncclSuccess;
}

ncclResult_t MultimemPointer(ncclWindow_t window, size_t offset, void** address) {
  const Registered& registered = *reinterpret_cast<Registered*>(window);
  const World& root = registered.rank->world->root;
  CHECK(root.multimem);
  if (root.multicast_hangs) return InCall(*registered.rank).Until([] { return false; });
  if (root.rank_without_multicast == own->rank) return ncclUnhandledCudaError;
  *address = reinterpret_cast<void*>(kMulticast + registered.begin + offset);
  return ncclSuccess;
}

ncclResult_t QueryProperties(ncclComm_t comm, ncclCommProperties_t* properties) {
  if (Fails("ncclCommQueryProperties")) return ncclInternalError;
  const Rank& rank = Of(comm);
  const World& root = rank.world->root;
  *rank.asked = true;
  CHECK(&root != rank.world);  // on XLA's communicator, this would make NCCL reserve addresses
  properties->rank = rank.rank;
  properties->nRanks = rank.world->n;
  properties->cudaDev = rank.device();
  properties->deviceApiSupport = root.device_api;
  properties->multimemSupport = root.multimem && rank.rank != root.rank_without_multimem;
  properties->nLsaTeams = rank.world->n / rank.world->team_size();
  properties->ginType = rank.rank == root.rank_without_gin ? NCCL_GIN_TYPE_NONE : root.gin;
  return ncclSuccess;
}

std::mutex stopped_mutex;
auto& stopped_gpus = *new std::set<int>;  // by device; threads may outlive the program's objects

}  // namespace

bool IsStopped() {
  std::lock_guard<std::mutex> lock(stopped_mutex);
  return own != nullptr && stopped_gpus.count(own->device()) != 0;
}

cudaError_t LaunchNothing(cudaStream_t stream) {
  return Launch(-1, 0, 0, stream, [] {});
}

// The last rank to arrive runs the kernels of all ranks.
cudaError_t Launch(int32_t channels, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> of_rank) {
  if (Of(stream).captures) {
    Of(stream).graph.push_back([=](cudaStream_t on) { Launch(channels, threads, shared_bytes, on, of_rank); });
    return cudaSuccess;
  }
  if (IsStopped()) return cudaErrorLaunchFailure;
  Rank* const rank = own;
  const int number = rank->num_kernels++;
  auto sent = std::make_shared<bool>(false);
  Of(stream).queue.push_back([=] {
    World& world = *rank->world;
    std::lock_guard<std::mutex> lock(world.mutex);
    const int which = number % world.beside;
    World::Kernel& kernel = world.kernels[number / world.beside];
    const int num_kernels = world.n * world.beside;
    kernel.of_rank.resize(num_kernels);
    kernel.devices.resize(num_kernels);
    kernel.num_channels.resize(world.beside, -1);
    if (!*sent) {
      kernel.of_rank[which * world.n + rank->rank] = of_rank;
      kernel.devices[which * world.n + rank->rank] = rank->device();
      CHECK(channels == -1 || kernel.num_channels[which] == -1 || kernel.num_channels[which] == channels);
      kernel.num_channels[which] = std::max(kernel.num_channels[which], channels);
      kernel.threads = std::max(kernel.threads, threads);
      kernel.shared_bytes = std::max(kernel.shared_bytes, shared_bytes);
      if (shared_bytes > most_shared_bytes) most_shared_bytes = shared_bytes;
      ++kernel.num_arrived;
      *sent = true;
    }
    if (kernel.num_arrived == num_kernels && !kernel.done) {
      static std::mutex machine;  // all worlds share it
      std::lock_guard<std::mutex> machine_lock(machine);
      const int most_channels = *std::max_element(kernel.num_channels.begin(), kernel.num_channels.end());
      const auto run = [&] {
        const auto at = static_cast<int>(blockIdx.y);
        if (static_cast<int>(blockIdx.x) < kernel.num_channels[at / world.n]) kernel.of_rank[at]();
      };
      emulation::Launch(static_cast<unsigned>(most_channels), static_cast<unsigned>(num_kernels), kernel.threads,
                        world.seed, run, kernel.shared_bytes);
      kernel.done = true;
      std::lock_guard<std::mutex> stopped_lock(stopped_mutex);
      for (size_t at = 0; at < kernel.devices.size(); ++at) {
        if (emulation::TheMachine().trapped[at] != 0) stopped_gpus.insert(kernel.devices[at]);
      }
    }
    return kernel.done;
  });
  return cudaSuccess;
}

void Replay(const Stream& captured, cudaStream_t stream) {
  for (const auto& launch : captured.graph) launch(stream);
}

cudaStream_t NewStream() { return Keep(std::make_unique<Stream>())->handle(); }

void Wait(cudaStream_t stream) {
  while (!Of(stream).Drain()) std::this_thread::yield();
}

void OnRanks(World& world, const std::function<void(Rank&)>& f) {
  std::vector<std::thread> threads;
  for (int r = 0; r < world.n; ++r) {
    threads.emplace_back([&world, &f, r] {
      own = NewRank(world, r);
      f(*own);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void OnRanks(int num_ranks, const std::function<void(int rank, void* nccl_comm)>& f) {
  OnRanks(*new World(num_ranks), [&](Rank& rank) { f(rank.rank, &rank); });
}

StatusOr<cuda::Communicator*> Get(Rank& rank) {
  return cuda::OwnCommunicator(reinterpret_cast<ncclComm_t>(&rank), rank.device());
}

CallSpec SpecOf(Collective collective, int32_t num_ranks, const std::string& algorithm) {
  CallSpec spec;
  spec.op = Name(collective);
  spec.site = "here.py:1";
  spec.collective = collective;
  spec.group_size = num_ranks;
  spec.algorithm = algorithm;
  for (int32_t r = 0; r < num_ranks; ++r) spec.groups.push_back(r);
  return spec;
}

cuda::GpuCallState* StateOf(const CallSpec& spec, bool symmetric_buffers) {
  auto* const state = new cuda::GpuCallState;
  state->spec = spec;
  state->symmetric_buffers = symmetric_buffers;
  return state;
}

void Sum(cuda::Communicator& communicator, int64_t count) {
  DataCall<> call(communicator, SpecOf(Collective::kAllReduce, communicator.size()), count);
  Stream stream;
  for (int32_t round = 0; round < 2; ++round) {
    call.Launch(round, stream.handle());
    Wait(stream.handle());
    CHECK(call.IsRight(round));
  }
}

}  // namespace fake

StatusOr<const NcclLibrary*> NcclLibrary::Open(const std::string&) {
  static const NcclLibrary library = [] {
    NcclLibrary made = fake::FakeLibrary();
    made.MemAlloc = &fake::MemAlloc;
    made.MemFree = [](void* memory) { return --fake::num_symmetric, std::free(memory), ncclSuccess; };
    made.AllGather = &fake::AllGather;
    made.CommWindowRegister = &fake::WindowRegister;
    made.GetLsaDevicePointer = &fake::LsaPointer;
    made.GetLsaMultimemDevicePointer = &fake::MultimemPointer;
    made.CommQueryProperties = &fake::QueryProperties;
    made.CommInitRankConfig = &fake::InitRank;
    made.CommGetAsyncError = &fake::AsyncError;
    made.CommAbort = &fake::Abort;
    made.CommRevoke = &fake::Revoke;
    made.CommCount = [](ncclComm_t comm, int* n) { return *n = fake::Of(comm).world->n, ncclSuccess; };
    made.CommUserRank = [](ncclComm_t comm, int* rank) { return *rank = fake::Of(comm).rank, ncclSuccess; };
    made.DevCommCreate = [](ncclComm_t comm, const ncclDevCommRequirements_t* requirements, ncclDevComm_t*) {
      const int num_channels = cuda::Communicator::Configured().max_channels + 1;
      CHECK(requirements->ginSignalCount == num_channels * fake::Of(comm).world->n);
      ++fake::own->num_gin;
      return fake::Fails("ncclDevCommCreate") ? ncclInvalidUsage : ncclSuccess;
    };
    // The first key is that of the group's own communicator.
    made.GetUniqueId = [](ncclUniqueId* key) {
      fake::World& root = *fake::own->world;
      if (fake::Fails("ncclGetUniqueId")) return ncclSystemError;
      std::lock_guard<std::mutex> lock(root.mutex);
      const fake::Key made_of = {&root, ++root.num_keys};
      std::memcpy(key->internal, &made_of, sizeof made_of);
      return ncclSuccess;
    };
    return made;
  }();
  return &library;
}

}  // namespace jaxcomm
