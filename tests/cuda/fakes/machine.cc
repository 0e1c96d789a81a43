// The functions of machine.h, with the kernels. Compiled with JAXCOMM_EMULATION.
#include "machine.h"

#include "../../../ffi/cuda/kernels/launch.h"
#include "../../../ffi/cuda/kernels/launch_exchange_offsets.h"
#include "peer_network.cuh"

namespace jaxcomm {
namespace fake {

thread_local Rank* own = nullptr;

namespace {

ncclResult_t MemAlloc(void** memory, size_t) {
  ++own->num_allocations;
  return FakeLibrary().MemAlloc(memory, 1);
}

ncclResult_t AllGather(const void* from, void* to, size_t count, ncclDataType_t, ncclComm_t comm, cudaStream_t stream) {
  Rank& rank = Of(comm);
  if (Fails("ncclAllGather")) return ncclInternalError;
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

}  // namespace

// Blocks until all ranks have arrived, as NCCL does. The window's memory is at another address than the registered
// memory: jaxcomm may rely only on NCCL's guarantees.
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
    char* const memory = world.memory + rank.rank * World::kStride + mapping.begin;
    CHECK(mapping.begin + static_cast<int64_t>(bytes) <= World::kStride);
    CHECK(mprotect(memory, bytes, PROT_READ | PROT_WRITE) == 0);
    std::memset(memory, 0x5c, bytes);  // memory is not zero at first
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

namespace {

// Does not block unless the configuration says so. Complete once all ranks have arrived.
ncclResult_t InitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId key, int rank, ncclConfig_t* config) {
  World* world = nullptr;
  std::memcpy(&world, key.internal, sizeof world);
  if (config->blocking == 1)
    return *comm = reinterpret_cast<ncclComm_t>(own), ncclSuccess;  // of a node: without change
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

// The last rank to arrive runs the kernels of all ranks.
cudaError_t Launch(int32_t channels, unsigned threads, size_t shared_bytes, cudaStream_t stream,
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
      static std::mutex machine;  // all worlds share it
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

std::unique_ptr<FakeStream> MakeStream() { return std::make_unique<Stream>(); }

cudaStream_t NewStream() { return Keep(MakeStream())->handle(); }

void Wait(cudaStream_t stream) {
  while (!Of(stream).Drain()) std::this_thread::yield();
}

// Runs `f` once per rank, on separate threads.
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

void OnRanks(int num_ranks, const std::function<void(int rank, void* nccl_comm)>& f) {
  OnRanks(*new World(num_ranks), [&](Rank& rank) { f(rank.rank, &rank); });
}

StatusOr<cuda::Communicator*> Get(Rank& rank) { return cuda::Communicator::Get(reinterpret_cast<ncclComm_t>(&rank)); }

CallSpec SpecOf(Collective collective, int32_t num_ranks) {
  CallSpec spec;
  spec.op = Name(collective);
  spec.site = "here.py:1";
  spec.collective = collective;
  spec.group_size = num_ranks;
  return spec;
}

void Sum(cuda::Communicator& communicator, int64_t count) {
  const auto n = static_cast<int32_t>(communicator.size());
  const auto call =
      Ok(cuda::DeviceCall::Make(SpecOf(Collective::kAllReduce, n), communicator, DType::kS32, count, count));
  Stream stream;
  for (int32_t round = 0; round < 2; ++round) {
    std::vector<int32_t> x(count), y(count, -1);
    for (int64_t i = 0; i < count; ++i) x[i] = static_cast<int32_t>(communicator.rank() + i + round);
    CHECK(call->Launch(x.data(), y.data(), stream.handle()).ok());
    while (!stream.Drain()) std::this_thread::yield();
    for (int64_t i = 0; i < count; ++i) CHECK(y[i] == n * (n - 1) / 2 + n * (i + round));
  }
}

}  // namespace fake

StatusOr<const NcclLibrary*> NcclLibrary::Open(const std::string&) {
  static const NcclLibrary library = [] {
    NcclLibrary made = fake::FakeLibrary();
    made.MemAlloc = &fake::MemAlloc;
    made.AllGather = &fake::AllGather;
    made.CommWindowRegister = &fake::WindowRegister;
    made.GetLsaDevicePointer = &fake::LsaPointer;
    made.GetLsaMultimemDevicePointer = &fake::MultimemPointer;
    made.CommQueryProperties = &fake::QueryProperties;
    made.CommInitRankConfig = &fake::InitRank;
    made.CommGetAsyncError = &fake::AsyncError;
    made.CommAbort = &fake::Abort;
    made.CommRevoke = [](ncclComm_t, int) { return ncclInternalError; };
    made.DevCommCreate = [](ncclComm_t comm, const ncclDevCommRequirements_t* requirements, ncclDevComm_t*) {
      CHECK(requirements->ginSignalCount == 5 * fake::Of(comm).world->n);
      ++fake::Of(comm).num_gin;
      return ncclSuccess;
    };
    made.GetUniqueId = [](ncclUniqueId* key) {
      std::memcpy(key->internal, &fake::own->world, sizeof fake::own->world);
      return fake::own->world->split_fails ? ncclInternalError : ncclSuccess;
    };
    return made;
  }();
  return &library;
}

namespace cuda {

using fake::own;
using fake::Registered;
using fake::World;

// Several nodes without GIN are in cluster.h.
cudaError_t LoadWatchdog() { return cudaErrorUnknown; }
cudaError_t LaunchBegin(const device::Comm&, device::WatchdogState*, uint64_t, cudaStream_t) {
  return cudaErrorUnknown;
}
cudaError_t LaunchEnd(const device::Comm&, device::WatchdogState*, cudaStream_t) { return cudaErrorUnknown; }

cudaError_t LoadGinKernel() { return cudaSuccess; }

cudaError_t Launch(const RankArgs& args, int32_t num_channels, cudaStream_t stream) {
  return fake::Launch(num_channels, 4, 0, stream, [args] {
    NoNetwork network;
    ChannelExecutor<NoNetwork> executor(args, network, static_cast<int32_t>(blockIdx.x));
    executor.Run();
  });
}

cudaError_t LaunchExchangeOffsets(const ExchangeOffsetsArgs& args, cudaStream_t stream) {
  return fake::Launch(1, 4, 0, stream, [args] { ExchangeOffsets(args); });
}

// A network that addresses all ranks' memory replaces GIN. test_gin.cc tests GIN itself.
cudaError_t LaunchGin(const RankArgs& args, const GinNetworkArgs& gin, const ncclDevComm&, int32_t num_channels,
                      cudaStream_t stream) {
  fake::World& world = *fake::own->world;
  PeerNetworkArgs peers;
  peers.comm = gin.comm;
  const auto words = static_cast<size_t>(gin.comm.signals.num_channels) * world.n;
  {
    std::lock_guard<std::mutex> lock(world.mutex);
    world.remote_pads.resize(words * world.n);
    world.remote_sent.resize(world.n, std::vector<uint64_t>(words));
  }
  peers.comm.signals.pad = {reinterpret_cast<char*>(world.remote_pads.data()),
                            static_cast<int64_t>(words * sizeof(uint64_t))};
  peers.comm.signals.sent = world.remote_sent[own->rank].data();
  const auto window = [](const GinBuffer& buffer) {
    if (buffer.window == nullptr) return device::Window{};
    const Registered& registered = *static_cast<Registered*>(buffer.window);
    return device::Window{registered.world->memory + registered.begin + buffer.offset, World::kStride};
  };
  peers.input = window(gin.input);
  peers.output = window(gin.output);
  peers.scratch = window(gin.scratch);
  for (int32_t c = 0; c < gin.comm.signals.num_channels; ++c) CHECK(gin.puts[c] == 0);
  return fake::Launch(num_channels, 4, 0, stream, [args, peers] {
    PeerNetwork network(peers);
    ChannelExecutor<PeerNetwork>(args, network, static_cast<int32_t>(blockIdx.x)).Run();
  });
}

cudaError_t Launch(const LlArgs& args, cudaStream_t stream) {
  ++own->num_ll;
  return fake::Launch(args.num_channels, 4, 0, stream, [args] {
    LlCall call(args, static_cast<int32_t>(blockIdx.x));
    call.Run();
  });
}

cudaError_t Launch(const MultimemArgs& args, cudaStream_t stream) {
  ++own->num_multimem;
  return fake::Launch(args.num_channels, 4, 0, stream, [args] {
    MultimemCall call(args, static_cast<int32_t>(blockIdx.x));
    call.Run();
  });
}

}  // namespace cuda
}  // namespace jaxcomm
