// Communicators and calls of ffi/cuda on doubles of the CUDA runtime and of NCCL: ranks are threads, memory is the
// host's, a stream is a queue, and the kernels of all ranks run emulated once all have come to them.
//
// The doubles stand in for a machine whose GPUs address each other's memory. What they can't show is whether NCCL and
// CUDA behave as they do.
// Before the emulation, which takes words for itself that are names of parameters in them.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nccl_device/core.h>

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
#include <vector>

// Here only: the sources under test are compiled as for a GPU's host.
#define JAXCOMM_EMULATION JAXCOMM_TEST_EMULATION
#include "../../ffi/cuda/call.h"
#include "../../ffi/cuda/launch.h"
#include "../native/check.h"
#include "doubles.h"

namespace jaxcomm {
namespace {

// What the ranks of a communicator share.
struct World {
  explicit World(int num_ranks) : n(num_ranks) {}

  const int n;
  int num_lsa_teams = 1;
  bool device_api = true;
  bool windows = true;
  bool multimem = false;
  int rank_without_multicast = -1;
  int rank_without_memory = -1;
  int64_t spacing_error = 0;

  struct Gather {
    std::vector<char> bytes;
    int num_arrived = 0;
  };
  struct Mapping {
    std::vector<char> bytes;
    int64_t stride = 0;
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
};

struct Rank {
  World* world = nullptr;
  int rank = 0;
  int num_gathers = 0, num_mappings = 0, num_kernels = 0;
  int num_allocations = 0;
  int num_flagged = 0;  // calls of messages with flags
};

struct Stream {
  std::deque<std::function<bool()>> queue;  // each tells whether it is over
  bool Drain() {
    while (!queue.empty() && queue.front()()) queue.pop_front();
    return queue.empty();
  }
};

struct Registered {
  World::Mapping* mapping = nullptr;
  World* world = nullptr;
};

constexpr uintptr_t kMulticast = 0x123000;  // nothing lies there

thread_local Rank* own = nullptr;  // of this thread

// What NCCL and CUDA would keep until the end of the process.
void Keep(void* memory) {
  static std::mutex mutex;
  static auto* kept = new std::vector<void*>;
  std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(memory);
}

Rank& Of(ncclComm_t comm) { return *reinterpret_cast<Rank*>(comm); }
Stream& Of(cudaStream_t stream) { return *reinterpret_cast<Stream*>(stream); }

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
  if (own->world->rank_without_memory == own->rank) return ncclUnhandledCudaError;
  *memory = std::malloc(1);  // nobody looks: bytes lie in windows
  Keep(*memory);
  return ncclSuccess;
}

ncclResult_t AllGather(const void* from, void* to, size_t count, ncclDataType_t, ncclComm_t comm, cudaStream_t stream) {
  Rank& rank = Of(comm);
  const int number = rank.num_gathers++;
  const size_t bytes = count * sizeof(uint64_t);
  auto sent = std::make_shared<bool>(false);
  Of(stream).queue.push_back([&rank, number, bytes, from, to, sent] {
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
  auto* registered = new Registered;
  Keep(registered);
  registered->world = &world;
  const int number = rank.num_mappings++;
  {
    std::lock_guard<std::mutex> lock(world.mutex);
    World::Mapping& mapping = world.mappings[number];
    mapping.stride = static_cast<int64_t>(bytes) + 4096;
    // What it holds is not zero.
    mapping.bytes.resize(mapping.stride * world.n + 4096, 0x5c);
    ++mapping.num_arrived;
    registered->mapping = &mapping;
  }
  Until(world.mutex, [&] { return registered->mapping->num_arrived == world.n; });
  *window = reinterpret_cast<ncclWindow_t>(registered);
  return ncclSuccess;
}

ncclResult_t LsaPointer(ncclWindow_t window, size_t offset, int rank, void** address) {
  const Registered& registered = *reinterpret_cast<Registered*>(window);
  *address = registered.mapping->bytes.data() + rank * registered.mapping->stride + offset +
             (rank == 1 ? registered.world->spacing_error : 0);
  return ncclSuccess;
}

ncclResult_t MultimemPointer(ncclWindow_t window, size_t offset, void** address) {
  const Registered& registered = *reinterpret_cast<Registered*>(window);
  CHECK(registered.world->multimem);
  if (registered.world->rank_without_multicast == own->rank) return ncclUnhandledCudaError;
  *address = reinterpret_cast<void*>(kMulticast + offset);
  return ncclSuccess;
}

ncclResult_t QueryProperties(ncclComm_t comm, ncclCommProperties_t* properties) {
  properties->rank = Of(comm).rank;
  properties->nRanks = Of(comm).world->n;
  properties->cudaDev = Of(comm).rank;
  properties->deviceApiSupport = Of(comm).world->device_api;
  properties->multimemSupport = Of(comm).world->multimem;
  properties->nLsaTeams = Of(comm).world->num_lsa_teams;
  return ncclSuccess;
}

}  // namespace

const NcclLibrary* NcclLibrary::Open(const std::string&, std::string*) {
  static const NcclLibrary library = [] {
    NcclLibrary made;
    made.version = NCCL_VERSION_CODE;
    made.MemAlloc = &jaxcomm::MemAlloc;
    made.MemFree = [](void*) { return ncclSuccess; };
    made.AllGather = &jaxcomm::AllGather;
    made.CommWindowRegister = &jaxcomm::WindowRegister;
    made.GetLsaDevicePointer = &jaxcomm::LsaPointer;
    made.GetLsaMultimemDevicePointer = &jaxcomm::MultimemPointer;
    made.CommQueryProperties = &jaxcomm::QueryProperties;
    made.GetErrorString = [](ncclResult_t) { return "failed"; };
    return made;
  }();
  return &library;
}

std::string NcclLibrary::WhyNot(const std::string&) const { return ""; }

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

cudaStream_t doubles::NewStream() { return reinterpret_cast<cudaStream_t>(new Stream); }

void doubles::Wait(cudaStream_t stream) {
  while (!Of(stream).Drain()) std::this_thread::yield();
}

namespace cuda {

cudaError_t LoadKernel() { return cudaSuccess; }
cudaError_t LoadFlaggedKernel() { return cudaSuccess; }

cudaError_t Launch(const RankArgs& args, int32_t num_channels, cudaStream_t stream) {
  return doubles::Launch(num_channels, 4, 0, stream, [args] {
    NoNetwork network;
    Walk<NoNetwork> walk(args, network, static_cast<int32_t>(blockIdx.x));
    walk.Run();
  });
}

cudaError_t Launch(const FlaggedArgs& args, cudaStream_t stream) {
  ++own->num_flagged;
  return doubles::Launch(args.num_channels, 4, 0, stream, [args] {
    FlaggedCall call(args, static_cast<int32_t>(blockIdx.x));
    call.Run();
  });
}

namespace {

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

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
    CHECK(call->Launch(x.data(), y.data(), reinterpret_cast<cudaStream_t>(&stream)).empty());
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
  Communicator::Configure(20, 4);
  const auto base = [](bool multimem, int rank_without) {
    auto* world = new World(3);
    world->multimem = multimem;
    world->rank_without_multicast = rank_without;
    std::vector<char*> bases(3);
    OnRanks(*world, [&](Rank& rank) {
      std::string error;
      device::Comm comm;
      CHECK(Get(rank, &error)->ReserveFor("mine", 100, &comm, &error));
      CHECK(comm.arena_bytes >= 100 && comm.arena.At(0) != nullptr);
      bases[rank.rank] = comm.arena_multicast.base;
    });
    CHECK(bases[0] == bases[1] && bases[1] == bases[2]);
    return reinterpret_cast<uintptr_t>(bases[0]);
  };
  CHECK(base(true, -1) == kMulticast);
  CHECK(base(true, 1) == 0);
  CHECK(base(false, -1) == 0);
  std::printf("ok multicast addresses\n");
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
void Refused(World* world, const std::string& expected) {
  OnRanks(*world, [&](Rank& rank) {
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
  Refused(nodes, "between nodes not supported yet on GPUs");
  auto* plain = new World(2);
  plain->device_api = false;
  Refused(plain, "has no windows");
  auto* null = new World(2);
  null->windows = false;
  Refused(null, "NCCL gave no window");
  auto* full = new World(3);
  full->rank_without_memory = 2;
  Refused(full, "rank 2 of the group has no 2097152 bytes of GPU memory left for the signals");
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

void TestFailuresLast() {
  Communicator::Configure(20, 4);
  auto* world = new World(2);
  OnRanks(*world, [&](Rank& rank) {
    std::string error;
    Communicator& communicator = *Get(rank, &error);
    Sum(communicator, 10);
    device::Report& report = *communicator.comm().report;
    report.program = Communicator::AddCall("psum at there.py:3");
    report.rank = rank.rank;
    report.peer = 1 - rank.rank;
    report.step = kEnter;
    report.state = device::Report::kClaimed;
    CHECK(communicator.Failure().empty());  // still being written
    report.state = device::Report::kComplete;
    const std::string me = std::to_string(rank.rank), peer = std::to_string(1 - rank.rank);
    for (int i = 0; i < 2; ++i) {
      CHECK(Has(communicator.Failure(), "psum at there.py:3: rank " + me + " gave up when entering: rank " + peer +
                                            " did not signal within 20 s"));
    }
  });
  std::printf("ok failures last\n");
}

}  // namespace
}  // namespace cuda

void doubles::OnRanks(int num_ranks, const std::function<void(int rank, void* nccl_comm)>& f) {
  auto* world = new World(num_ranks);
  cuda::OnRanks(*world, [&](Rank& rank) { f(rank.rank, &rank); });
}

}  // namespace jaxcomm

extern "C" {
using jaxcomm::Of;

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "failed"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 132, cudaSuccess; }
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  std::memset(*memory, 0x5c, bytes);  // what it holds is not zero
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) { return cudaMalloc(memory, bytes); }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = jaxcomm::doubles::NewStream();
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  Of(stream).queue.push_back([=] { return std::memset(memory, value, bytes), true; });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (stream == cudaStreamPerThread) return std::memcpy(to, from, bytes), cudaSuccess;
  // From the host's pageable memory, CUDA has read it when the call returns.
  auto staged = std::make_shared<std::vector<char>>();
  const char* source = static_cast<const char*>(from);
  if (kind == cudaMemcpyHostToDevice) staged->assign(source, source + bytes);
  Of(stream).queue.push_back([=] { return std::memcpy(to, staged->empty() ? source : staged->data(), bytes), true; });
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return Of(stream).Drain() ? cudaSuccess : cudaErrorNotReady; }
}

int main() {
  jaxcomm::cuda::TestCallsShareACommunicator();
  jaxcomm::cuda::TestMulticast();
  jaxcomm::cuda::TestBuffersOfNothing();
  jaxcomm::cuda::TestRefusals();
  jaxcomm::cuda::TestRanksThatDiffer();
  jaxcomm::cuda::TestARankThatDoesNotCome();
  jaxcomm::cuda::TestFailuresLast();
  jaxcomm::TestUserCalls();
  return 0;
}
