// Communicators and calls of ffi/cuda between nodes, on doubles of the CUDA runtime and of NCCL: ranks are threads, and
// so is each stream. Nothing but events orders two streams, and each kernel runs emulated on the thread of its stream,
// so what the host forgets to order goes wrong. Messages go as NCCL's: matched in order between each two ranks of a
// communicator, read until the receiver has them, waited for without end.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nccl_device/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gpu_doubles.h"

// Here only: the sources under test are compiled as for a GPU's host.
#define JAXCOMM_EMULATION JAXCOMM_TEST_EMULATION
#include "../../ffi/cuda/call.h"
#include "../../ffi/cuda/launch.h"
#include "../../ffi/cuda/launch_locate.h"
#include "../../ffi/plan/algorithms.h"
#include "../check.h"
#include "alone.h"

namespace jaxcomm {
namespace {

// One for everything: what the doubles do is short. Never deleted: streams outlive the tests.
auto& mutex = *new std::mutex;
auto& changed = *new std::condition_variable;

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
  struct Meeting {
    std::map<int, std::vector<char>> brought;  // by rank
    std::vector<char> memory;                  // of a window
  };
  std::map<int, Meeting> meetings;
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

struct Stream : StreamDouble {
  std::deque<std::function<void()>> queue;
  size_t num_running = 0;
  std::thread thread;

  Stream() {
    thread = std::thread([this] {
      emulation::TheMachine().yields = true;
      std::minstd_rand random(std::random_device{}());
      for (;;) {
        std::function<void()> next;
        Until([&] { return !queue.empty(); });
        Locked([&] {
          next = std::move(queue.front());
          queue.pop_front();
        });
        if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        next();
        Locked([&] { --num_running; });
      }
    });
    thread.detach();
  }
  void Push(std::function<void()> work) override {
    Locked([&] {
      queue.push_back(std::move(work));
      ++num_running;
    });
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

Rank& Of(ncclComm_t comm) { return *reinterpret_cast<Rank*>(comm); }
Stream& Of(cudaStream_t stream) { return static_cast<Stream&>(AnyOf(stream)); }

ncclComm_t MakeRank(Group* group, int rank) {
  auto made = std::make_unique<Rank>();
  made->group = group;
  made->rank = rank;
  return reinterpret_cast<ncclComm_t>(Keep(std::move(made)));
}

ncclResult_t AllGather(const void* from, void* to, size_t count, ncclDataType_t, ncclComm_t comm, cudaStream_t stream) {
  Rank& rank = Of(comm);
  const int number = rank.num_meetings++;
  const size_t bytes = count * sizeof(uint64_t);
  Of(stream).Push([=, &rank] {
    Group& group = *rank.group;
    Group::Meeting* meeting = nullptr;
    Locked([&] {
      meeting = &group.meetings[number];
      const char* bytes_from = static_cast<const char*>(from);
      meeting->brought[rank.rank].assign(bytes_from, bytes_from + bytes);
    });
    Until([&] { return static_cast<int>(meeting->brought.size()) == group.n(); });
    for (const auto& [r, brought] : meeting->brought)
      std::memcpy(static_cast<char*>(to) + r * bytes, brought.data(), bytes);
  });
  return ncclSuccess;
}

// Who this thread is in the group that XLA has made.
thread_local Rank* own = nullptr;

std::map<uint64_t, Group*>& Groups() {  // by key
  static auto* groups = new std::map<uint64_t, Group*>;
  return *groups;
}

ncclResult_t GetUniqueId(ncclUniqueId* key) {
  static std::atomic<uint64_t> number{0};
  const uint64_t words[16] = {++number, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, number};
  static_assert(sizeof words == sizeof *key);
  std::memcpy(key, words, sizeof words);
  return ncclSuccess;
}

ncclResult_t InitRank(ncclComm_t* made, int n, ncclUniqueId key, int rank, ncclConfig_t* config) {
  uint64_t words[16];
  std::memcpy(words, &key, sizeof words);
  CHECK(config->blocking == 1 && words[0] != 0 && words[0] == words[15]);
  if (own->group->cluster->init_fails) return ncclInternalError;
  Group* group = nullptr;
  Group::Meeting* meeting = nullptr;
  Locked([&] {
    Group*& shared = Groups()[words[0]];
    if (shared == nullptr) {
      shared = new Group;
      shared->cluster = own->group->cluster;
      shared->ranks.resize(n);
    }
    group = shared;
    CHECK(group->n() == n && rank < n);
    group->ranks[rank] = own->group->ranks[own->rank];
    meeting = &group->meetings[-1];
    meeting->brought[rank];
  });
  Until([&] { return static_cast<int>(meeting->brought.size()) == n; });
  if (Fails("ncclCommInitRankConfig")) return ncclInternalError;
  *made = MakeRank(group, rank);
  return ncclSuccess;
}

struct Registered {
  char* begin = nullptr;
  int64_t stride = 0;
  int first = 0;  // rank of the team
};

ncclResult_t WindowRegister(ncclComm_t comm, void*, size_t bytes, ncclWindow_t* window, int) {
  Rank& rank = Of(comm);
  Group& group = *rank.group;
  CHECK(group.num_lsa_teams() == 1 || group.cluster->gin);
  auto registered = std::make_unique<Registered>();
  registered->stride = static_cast<int64_t>(bytes) + 4096;
  registered->first = rank.rank - rank.rank % (group.n() / group.num_lsa_teams());
  const bool fails = Fails("ncclCommWindowRegister");
  Group::Meeting* meeting = nullptr;
  Locked([&] {
    meeting = &group.meetings[rank.num_meetings++];
    meeting->memory.resize(registered->stride * group.n(), 0x5c);
    meeting->brought[rank.rank];
  });
  Until([&] { return static_cast<int>(meeting->brought.size()) == group.n(); });
  if (fails) return ncclUnhandledCudaError;
  registered->begin = meeting->memory.data();
  *window = reinterpret_cast<ncclWindow_t>(Keep(std::move(registered)));
  return ncclSuccess;
}

ncclResult_t LsaPointer(ncclWindow_t window, size_t offset, int rank, void** address) {
  const Registered& registered = *reinterpret_cast<Registered*>(window);
  if (Fails("ncclGetLsaDevicePointer")) return ncclInternalError;
  *address = registered.begin + (registered.first + rank) * registered.stride + offset;
  return ncclSuccess;
}

ncclResult_t QueryProperties(ncclComm_t comm, ncclCommProperties_t* properties) {
  if (Fails("ncclCommQueryProperties")) return ncclInternalError;
  const Rank& rank = Of(comm);
  properties->rank = rank.rank;
  properties->nRanks = rank.group->n();
  properties->cudaDev = rank.group->ranks[rank.rank];
  properties->nLsaTeams = rank.group->num_lsa_teams();
  const bool connected = properties->nLsaTeams == 1 || rank.group->cluster->gin;
  properties->deviceApiSupport = connected && (rank.group->cluster->peers_in_host || properties->nRanks == 1);
  properties->ginType = rank.group->cluster->gin ? NCCL_GIN_TYPE_PROXY : NCCL_GIN_TYPE_NONE;
  return ncclSuccess;
}

// Waits for all ranks, also those where it fails.
ncclResult_t DevCommCreate(ncclComm_t comm, const ncclDevCommRequirements_t*, ncclDevComm_t*) {
  const bool fails = Fails("ncclDevCommCreate");
  Rank& rank = Of(comm);
  Group::Meeting* meeting = nullptr;
  Locked([&] {
    meeting = &rank.group->meetings[rank.num_meetings++];
    meeting->brought[rank.rank];
  });
  Until([&] { return static_cast<int>(meeting->brought.size()) == rank.group->n(); });
  return fails ? ncclInvalidUsage : ncclSuccess;
}

// Of the group that this thread is in.
struct Transfer {
  bool send;
  char* memory;
  size_t bytes;
  int peer;
  Rank* rank;
  Stream* stream;
};
thread_local std::vector<Transfer> transfers;

ncclResult_t Send(const void* from, size_t bytes, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  CHECK(type == ncclInt8);
  transfers.push_back({true, static_cast<char*>(const_cast<void*>(from)), bytes, peer, &Of(comm), &Of(stream)});
  return ncclSuccess;
}
ncclResult_t Recv(void* to, size_t bytes, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  CHECK(type == ncclInt8);
  transfers.push_back({false, static_cast<char*>(to), bytes, peer, &Of(comm), &Of(stream)});
  return ncclSuccess;
}

void RunGroup(const std::vector<Transfer>& group) {
  std::vector<std::shared_ptr<Message>> sent;
  for (const Transfer& transfer : group) {
    if (!transfer.send) continue;
    auto message = std::make_shared<Message>();
    message->from = transfer.memory;
    message->bytes = transfer.bytes;
    sent.push_back(message);
    Locked([&] { transfer.rank->group->links[{transfer.rank->rank, transfer.peer}].push_back(message); });
  }
  for (const Transfer& transfer : group) {
    if (transfer.send) continue;
    auto& link = [&]() -> auto& {
      std::lock_guard<std::mutex> lock(mutex);
      return transfer.rank->group->links[{transfer.peer, transfer.rank->rank}];
    }();
    Until([&] { return !link.empty() || transfer.rank->aborted; });
    if (transfer.rank->aborted) return;
    Locked([&] {
      CHECK(link.front()->bytes == transfer.bytes);
      std::memcpy(transfer.memory, link.front()->from, transfer.bytes);
      link.front()->taken = true;
      link.pop_front();
    });
  }
  for (const auto& message : sent) Until([&] { return message->taken || group[0].rank->aborted; });
}

// Called by launches of this thread: of kernels, and of NCCL's.
thread_local std::function<void()> before_launch, before_group;
// Of communicators.
std::atomic<int> num_aborted{0}, num_revoked{0};

ncclResult_t GroupEnd() {
  std::vector<Transfer> group;
  group.swap(transfers);
  if (group.empty()) return ncclSuccess;
  Rank& rank = *group[0].rank;
  CHECK(!rank.in_call.exchange(true));
  if (before_group) before_group();
  group[0].stream->Push([group] { RunGroup(group); });
  rank.in_call = false;
  return ncclSuccess;
}

ncclResult_t Abort(ncclComm_t comm) {
  CHECK(!Of(comm).in_call);
  Locked([&] { Of(comm).aborted = true; });
  ++Of(comm).group->cluster->num_aborted;
  ++num_aborted;
  return ncclSuccess;
}

ncclResult_t Revoke(ncclComm_t comm, int flags) {
  CHECK(flags == NCCL_REVOKE_DEFAULT);
  Locked([&] { Of(comm).aborted = true; });
  ++num_revoked;
  return ncclSuccess;
}

}  // namespace

const NcclLibrary* NcclLibrary::Open(const std::string&, std::string*) {
  static const NcclLibrary library = [] {
    NcclLibrary made = LibraryDouble();
    made.AllGather = &jaxcomm::AllGather;
    made.GetUniqueId = &jaxcomm::GetUniqueId;
    made.CommInitRankConfig = &jaxcomm::InitRank;
    made.CommAbort = &jaxcomm::Abort;
    made.DevCommCreate = &jaxcomm::DevCommCreate;
    made.CommRevoke = &jaxcomm::Revoke;
    made.CommWindowRegister = &jaxcomm::WindowRegister;
    made.GetLsaDevicePointer = &jaxcomm::LsaPointer;
    made.CommQueryProperties = &jaxcomm::QueryProperties;
    made.GroupStart = [] { return ncclSuccess; };
    made.GroupEnd = &jaxcomm::GroupEnd;
    made.Send = &jaxcomm::Send;
    made.Recv = &jaxcomm::Recv;
    return made;
  }();
  return &library;
}

std::unique_ptr<StreamDouble> MakeStream() { return std::make_unique<Stream>(); }

namespace cuda {

// Calls with GIN: test_communicator.cc.
cudaError_t LoadGinKernel() { return Fails("kernels of GIN") ? cudaErrorUnknown : cudaSuccess; }
cudaError_t LaunchGin(const RankArgs&, const GinNetworkArgs&, const ncclDevComm&, int32_t, cudaStream_t) {
  return cudaErrorUnknown;
}
cudaError_t LoadWatch() { return cudaSuccess; }

// For one node.
cudaError_t Launch(const FlaggedArgs&, cudaStream_t) { return cudaErrorUnknown; }
cudaError_t Launch(const MultimemArgs&, cudaStream_t) { return cudaErrorUnknown; }
cudaError_t LaunchLocate(const LocateArgs&, cudaStream_t) { return cudaErrorUnknown; }

cudaError_t Launch(const RankArgs& args, int32_t num_channels, cudaStream_t stream) {
  if (before_launch) before_launch();
  Of(stream).Push([=] {
    emulation::Launch(static_cast<unsigned>(num_channels), 1, 2, 1, [&] {
      NoNetwork network;
      Walk<NoNetwork> walk(args, network, static_cast<int32_t>(blockIdx.x));
      walk.Run();
    });
  });
  return cudaSuccess;
}

cudaError_t LaunchBegin(const device::Comm& comm, device::Progress* progress, uint64_t round, cudaStream_t stream) {
  Of(stream).Push([=] { emulation::Launch(1, 1, 1, 1, [&] { BeginRound(comm, *progress, round); }); });
  return cudaSuccess;
}

cudaError_t LaunchEnd(const device::Comm& comm, device::Progress* progress, cudaStream_t stream) {
  Of(stream).Push([=] { emulation::Launch(1, 1, 1, 1, [&] { EndRound(comm, *progress); }); });
  return cudaSuccess;
}

namespace {

std::vector<int> Hosts(int num_nodes, int ranks_per_node) {
  std::vector<int> hosts;
  for (int r = 0; r < num_nodes * ranks_per_node; ++r) hosts.push_back(r / ranks_per_node);
  return hosts;
}

// Runs `f` with the communicator that XLA would lend, once per rank, in threads of their own.
void OnRanks(const Cluster& cluster, const std::function<void(ncclComm_t, int)>& f) {
  auto group = std::make_unique<Group>();
  group->cluster = &cluster;
  for (size_t r = 0; r < cluster.hosts.size(); ++r) group->ranks.push_back(static_cast<int>(r));
  Group* const shared = Keep(std::move(group));
  std::vector<std::thread> threads;
  for (int r = 0; r < shared->n(); ++r) {
    threads.emplace_back([&f, shared, r] {
      const ncclComm_t comm = MakeRank(shared, r);
      own = &Of(comm);
      f(comm, r);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Stream& OwnStream() {
  thread_local Stream* stream = Keep(std::make_unique<Stream>());
  return *stream;
}

CallSpec SpecOf(Collective collective, int32_t num_ranks, const std::string& algorithm) {
  CallSpec spec;
  spec.op = Name(collective);
  spec.site = "here.py:1";
  spec.collective = collective;
  spec.algorithm = algorithm;
  spec.group_size = num_ranks;
  spec.root = num_ranks / 2;
  for (int32_t r = 0; collective == Collective::kPermute && r < num_ranks; ++r) {
    spec.source_of.push_back((r + 1) % num_ranks);
  }
  return spec;
}

int32_t InputOf(int32_t rank, int64_t element, int round) {
  return static_cast<int32_t>(1000003 * rank + 7 * element + round);
}

// Element i of the result.
int32_t ResultOf(const CallSpec& spec, int32_t rank, int64_t i, int64_t block_count, int round) {
  const auto n = static_cast<int32_t>(spec.group_size);
  const auto sum = [&](int64_t element) {
    uint32_t result = 0;
    for (int32_t r = 0; r < n; ++r) result += static_cast<uint32_t>(InputOf(r, element, round));
    return static_cast<int32_t>(result);
  };
  const int64_t within = i % block_count;
  const auto block = static_cast<int32_t>(i / block_count);
  switch (spec.collective) {
    case Collective::kAllToAll:
      return InputOf(block, rank * block_count + within, round);
    case Collective::kAllGather:
      return InputOf(block, within, round);
    case Collective::kAllReduce:
      return sum(i);
    case Collective::kReduceScatter:
      return sum(rank * block_count + i);
    case Collective::kPermute:
      return InputOf(spec.source_of[rank], i, round);
    default:
      return InputOf(spec.root, i, round);
  }
}

void RunCalls(Communicator& communicator, const CallSpec& spec, int64_t block_count) {
  Request request;
  request.collective = spec.collective;
  request.geometry.ranks_per_node = communicator.size();
  request.block_count = block_count;
  std::string error;
  const auto call =
      DeviceCall::Make(spec, communicator, DType::kS32, InputCount(request), OutputCount(request), &error);
  if (!call) std::fprintf(stderr, "%s %s: %s\n", spec.op.c_str(), spec.algorithm.c_str(), error.c_str());
  CHECK(call != nullptr);
  Stream& stream = OwnStream();
  // One behind the other, without waiting in between: buffers of one are still in use while the next is put there.
  constexpr int kNumRounds = 2;
  std::vector<std::vector<int32_t>> inputs, outputs;
  for (int round = 0; round < kNumRounds; ++round) {
    inputs.emplace_back(InputCount(request));
    outputs.emplace_back(OutputCount(request), -1);
    for (size_t i = 0; i < inputs.back().size(); ++i) inputs.back()[i] = InputOf(communicator.rank(), i, round);
  }
  for (int round = 0; round < kNumRounds; ++round) {
    CHECK(call->Launch(inputs[round].data(), outputs[round].data(), stream.handle()).empty());
  }
  Until([&] { return stream.num_running == 0; });
  CHECK(communicator.Failure().empty());
  for (int round = 0; round < kNumRounds; ++round) {
    for (size_t i = 0; i < outputs[round].size(); ++i) {
      CHECK(outputs[round][i] == ResultOf(spec, communicator.rank(), i, block_count, round));
    }
  }
}

struct Shape {
  std::vector<int> hosts;
  int32_t ranks_per_node;  // that are found
  bool peers_in_host = true;
};

void TestCalls() {
  std::atomic<int> num_calls{0};
  const std::vector<Shape> shapes = {
      {Hosts(2, 1), 1}, {Hosts(2, 2), 2},  {Hosts(2, 3), 3},  {Hosts(2, 4), 4},        {Hosts(3, 2), 2},
      {Hosts(4, 1), 1}, {{0, 0, 0, 1}, 1}, {{0, 1, 0, 1}, 1}, {{0, 0, 0, 0, 1, 1}, 2}, {Hosts(2, 2), 1, false},
  };
  for (const Shape& shape : shapes) {
    Communicator::Configure(60, 3);
    Cluster cluster(shape.hosts);
    cluster.peers_in_host = shape.peers_in_host;
    OnRanks(cluster, [&](ncclComm_t comm, int) {
      std::string error;
      Communicator* const communicator = Communicator::Get(comm, &error);
      if (communicator == nullptr) std::fprintf(stderr, "%s\n", error.c_str());
      CHECK(communicator != nullptr && communicator->messenger() != nullptr);
      CHECK(communicator->seat().ranks_per_node == shape.ranks_per_node);
      Request request;
      request.geometry.ranks_per_node = shape.ranks_per_node;
      request.geometry.num_nodes = communicator->size() / shape.ranks_per_node;
      request.geometry.all_addressable = false;
      for (int c = 0; c <= static_cast<int>(Collective::kBarrier); ++c) {
        request.collective = static_cast<Collective>(c);
        for (const Algorithm& algorithm : Algorithms(request.collective)) {
          const CallSpec spec = SpecOf(request.collective, communicator->size(), algorithm.name);
          request.source_of = spec.source_of;
          if (!algorithm.supports(request)) continue;
          const bool large = std::string(algorithm.name) == "hierarchical" || c % 2 == 0;
          RunCalls(*communicator, spec, request.collective == Collective::kBarrier ? 0 : large ? 9001 : 5);
          ++num_calls;
        }
      }
    });
    // Of nodes that NCCL does not take for such.
    CHECK(cluster.num_aborted == (shape.peers_in_host ? 0 : static_cast<int>(shape.hosts.size())));
  }
  CHECK(num_calls > 300);
  std::printf("ok %d calls between nodes\n", num_calls.load());
}

// NCCL would make one node of them.
void TestNamedNodes() {
  for (const auto& [names, ranks_per_node] :
       {std::pair{"aabb", 2}, {"aaaa", 4}, {"abab", 1}, {"aaab", 1}, {"abcd", 1}}) {
    std::atomic<int> turn{0};
    OnRanks(Hosts(1, 4), [&, names = names, ranks_per_node = ranks_per_node](ncclComm_t comm, int rank) {
      // The name is the process's, so each rank has its own for as long as it takes to look.
      while (turn < rank) std::this_thread::yield();
      Communicator::Configure(60, 3, std::string(1, names[rank]));
      std::thread next([&] {
        while (Of(comm).num_meetings == 0) std::this_thread::yield();
        ++turn;
      });
      std::string error;
      Communicator* const communicator = Communicator::Get(comm, &error);
      next.join();
      CHECK(communicator != nullptr && communicator->seat().ranks_per_node == ranks_per_node);
      CHECK((communicator->messenger() == nullptr) == (ranks_per_node == 4));
    });
  }
  std::printf("ok names make nodes\n");
}

void TestInitFails() {
  Communicator::Configure(20, 3);
  Cluster cluster(Hosts(2, 2));
  cluster.init_fails = true;
  OnRanks(cluster, [&](ncclComm_t comm, int) {
    std::string error;
    CHECK(Communicator::Get(comm, &error) == nullptr && Has(error, "ncclCommInitRankConfig: failed"));
  });
  std::printf("ok a communicator that can't be made is an error\n");
}

std::unique_ptr<DeviceCall> Sum(Communicator& communicator, int64_t count, std::string* error) {
  return DeviceCall::Make(SpecOf(Collective::kAllReduce, communicator.size(), "hierarchical"), communicator,
                          DType::kS32, count, count, error);
}

void TestARankThatDoesNotConnect() {
  Communicator::Configure(3, 3);
  OnRanks(Hosts(2, 2), [&](ncclComm_t comm, int rank) {
    std::string error;
    Communicator& communicator = *Communicator::Get(comm, &error);
    device::Window arena;
    int64_t bytes;
    CHECK(communicator.Reserve(1, &arena, &bytes, &error));
    if (rank == 3) {
      CHECK(communicator.IsSameOnAllRanks("all", 1, &error) && communicator.AllDone("here", true, &error));
      return;
    }
    const auto call = Sum(communicator, 100, &error);
    CHECK((call == nullptr) == (rank == 1));  // of rank 3's rail
    if (rank != 1) return;
    const std::string late = "rank 3 of other nodes did not come within 3 s (JAXCOMM_TIMEOUT_S)";
    CHECK(Has(error, late));
    // Rank 3 might take for the answer to a later call what this one has sent: there is none.
    CHECK(Has(communicator.Failure(), late));
    CHECK(!communicator.messenger()->Connect({}, 4, 0, &error) && Has(error, late));
    CHECK(!Of(comm).aborted);  // XLA's
  });
  std::printf("ok a rank that does not connect is named\n");
}

// What two ranks are told when `of_rank_1` happens. `reached`: it has.
std::vector<std::string> MakeWithFault(const Cluster& cluster, double timeout_s, const Fault& of_rank_1,
                                       bool* reached) {
  Communicator::Configure(timeout_s, 3);
  std::vector<std::string> errors(2);
  std::vector<int> ways(2);
  OnRanks(cluster, [&](ncclComm_t comm, int rank) {
    if (rank == 1) fault = of_rank_1;
    Communicator* const communicator = Communicator::Get(comm, &errors[rank]);
    if (communicator != nullptr) {
      DeviceCall::Make(SpecOf(Collective::kAllReduce, 2, "ring"), *communicator, DType::kS32, 99, 99, &errors[rank]);
      ways[rank] = (communicator->gin() ? 1 : 0) + (communicator->messenger() ? 2 : 0);
    }
    if (rank == 1) *reached = fault.skipped < 0;
    fault = {};
  });
  CHECK(ways[0] == ways[1]);
  return errors;
}

// Everything that one rank does alone fails, one after the other: then all ranks have an error, or none.
void TestOneRankFails() {
  struct Kind {
    std::vector<int> hosts;
    bool gin;
    int num_errors, num_fallbacks;
  };
  for (const Kind& kind : {Kind{Hosts(1, 2), false, 14, 0}, {Hosts(2, 1), false, 22, 0}, {Hosts(2, 1), true, 12, 4}}) {
    int num_errors = 0, num_fallbacks = 0;
    for (const char* call :
         {"few SMs", "kernels", "kernels of GIN", "cudaMalloc", "cudaHostAlloc", "cudaStreamCreate", "cudaMemsetAsync",
          "cudaEventCreate", "ncclMemAlloc", "ncclCommWindowRegister", "ncclGetLsaDevicePointer",
          "ncclCommQueryProperties", "ncclCommInitRankConfig", "ncclDevCommCreate"}) {
      // The first ones come before ranks can tell each other anything.
      const bool early = call == std::string("cudaMalloc") || call == std::string("cudaHostAlloc") ||
                         call == std::string("cudaStreamCreate") || call == std::string("ncclCommQueryProperties");
      for (int skipped = early ? 1 : 0;; ++skipped) {
        Cluster& cluster = *Keep(std::make_unique<Cluster>(kind.hosts));
        cluster.gin = kind.gin;
        bool reached = false;
        const std::vector<std::string> errors = MakeWithFault(cluster, 60, {call, skipped}, &reached);
        if (!reached) break;
        CHECK(errors[0].empty() == errors[1].empty());
        CHECK(errors[0].empty() || Has(errors[0], "rank 1 of the group "));
        if (errors[0].empty() && call == std::string("few SMs")) break;  // enough without NCCL's own kernels
        ++(errors[0].empty() ? num_fallbacks : num_errors);
      }
    }
    CHECK(num_errors == kind.num_errors && num_fallbacks == kind.num_fallbacks);
  }
  std::printf("ok what fails on one rank is an error on all, or another way is taken by all\n");
}

// As where the network has no strong signals: NCCL finds out when it is asked to make what kernels need.
void TestGinThatFails() {
  Communicator::Configure(60, 3);
  for (const bool everywhere : {true, false}) {
    Cluster& cluster = *Keep(std::make_unique<Cluster>(Hosts(2, 2)));
    cluster.gin = true;
    OnRanks(cluster, [&](ncclComm_t comm, int rank) {
      if (everywhere || rank == 2) fault = {"ncclDevCommCreate"};
      std::string error;
      Communicator* const communicator = Communicator::Get(comm, &error);
      CHECK(communicator != nullptr && communicator->gin() == nullptr && communicator->messenger() != nullptr);
      CHECK(communicator->seat().ranks_per_node == 2 && !communicator->seat().gin);
      RunCalls(*communicator, SpecOf(Collective::kAllReduce, 4, "hierarchical"), 1000);
    });
  }
  std::printf("ok messages where GIN fails\n");
}

void TestProgramsThatDiffer() {
  Communicator::Configure(20, 3);
  OnRanks(Hosts(2, 1), [&](ncclComm_t comm, int rank) {
    std::string error;
    Communicator& communicator = *Communicator::Get(comm, &error);
    const auto call = DeviceCall::Make(SpecOf(Collective::kAllReduce, 2, "ring"), communicator, DType::kS32,
                                       100 + rank * 900, 100 + rank * 900, &error);
    CHECK(!call && Has(error, "their programs differ"));
  });
  std::printf("ok programs that differ are told apart\n");
}

// Of a call that rank 3 does not come to. Rank 1 waits for its messages, rank 2 for its signals; rank 0, and whoever
// learns nothing else, for what these two don't send any more.
void TestARankThatDoesNotCome() {
  Communicator::Configure(3, 3);
  OnRanks(Hosts(2, 2), [&](ncclComm_t comm, int rank) {
    std::string error;
    Communicator& communicator = *Communicator::Get(comm, &error);
    const auto call = Sum(communicator, 100, &error);
    CHECK(call != nullptr);
    if (rank == 3) return;
    std::vector<int32_t> x(100), y(100);
    Stream& stream = OwnStream();
    CHECK(call->Launch(x.data(), y.data(), stream.handle()).empty());
    Until([&] { return stream.num_running == 0; });
    std::string failure;
    for (int i = 0; failure.empty() && i < 500; ++i) {
      failure = communicator.Failure();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (failure.empty()) std::fprintf(stderr, "rank %d has not failed\n", rank);
    CHECK(Has(failure, "all_reduce at here.py:1: rank " + std::to_string(rank) + " gave up "));
    CHECK(Has(failure, "within 3 s (JAXCOMM_TIMEOUT_S)"));
    if (rank == 1) CHECK(Has(failure, "in round 0 of the messages between nodes: rank 3 did not come"));
    if (rank == 2) CHECK(Has(failure, "when entering: rank 3 did not signal"));
    // Later calls say so, and put nothing on a stream.
    CHECK(!call->Launch(x.data(), y.data(), stream.handle()).empty() || Has(communicator.Failure(), "gave up"));
    Until([&] { return stream.num_running == 0; });
  });
  std::printf("ok a rank that does not come ends in errors on all others\n");
}

// Rank 3 comes to a call when all others have given up, with runs behind it: what they brought to the call is still
// there, and they have heard of each other's failure at most.
void TestRunsBehindAGiveUp() {
  Communicator::Configure(3, 3);
  std::atomic<int> num_over{0};
  OnRanks({Hosts(2, 2)}, [&](ncclComm_t comm, int rank) {
    constexpr int64_t kCount = 9001;
    std::string error;
    Communicator& communicator = *Communicator::Get(comm, &error);
    const auto call = Sum(communicator, kCount, &error);
    CHECK(call && call->shares_input());
    device::Window arena;
    int64_t bytes;
    CHECK(communicator.Reserve(1, &arena, &bytes, &error));
    const auto* in_arena = arena.At<int32_t>(communicator.comm().local.rank);  // where the operand begins
    Stream& stream = OwnStream();
    std::vector<std::vector<int32_t>> x;
    std::vector<int32_t> y(kCount);
    for (int run = 0; run < 4; ++run) x.emplace_back(kCount, 1000 * run + rank);
    const auto launch = [&](int run) { return call->Launch(x[run].data(), y.data(), stream.handle()); };
    CHECK(launch(0).empty());
    Until([&] { return stream.num_running == 0; });
    CHECK(y == std::vector<int32_t>(kCount, 6) && in_arena[kCount - 1] == rank);
    if (rank == 3) {
      while (num_over < 3) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      CHECK(launch(1).empty());
      Until([&] { return stream.num_running == 0; });
    } else {
      for (int run = 1; run < 4; ++run) CHECK(launch(run).empty());
      Until([&] { return stream.num_running == 0; });
      ++num_over;
    }
    CHECK(std::equal(x[1].begin(), x[1].end(), in_arena));
    std::string failure;
    for (int i = 0; failure.empty() && i < 500; ++i) {
      failure = communicator.Failure();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(!failure.empty());
  });
  std::printf("ok runs behind a call that is given up bring nothing\n");
}

// On the GPU of rank 0, and on another communicator: what it would send to the other node has no meaning.
void TestAGiveUpElsewhereOnTheGpu() {
  Communicator::Configure(3, 3);
  OnRanks({Hosts(2, 1)}, [&](ncclComm_t comm, int rank) {
    std::string error;
    Communicator& communicator = *Communicator::Get(comm, &error);
    const auto call =
        DeviceCall::Make(SpecOf(Collective::kAllReduce, 2, "ring"), communicator, DType::kS32, 100, 100, &error);
    CHECK(call != nullptr);
    std::vector<int32_t> x(100, 1), y(100);
    Stream& stream = OwnStream();
    if (rank == 0) device::Stop(communicator.comm());
    CHECK(call->Launch(x.data(), y.data(), stream.handle()).empty());
    Until([&] { return stream.num_running == 0; });
    std::string failure;
    for (int i = 0; failure.empty() && i < 500; ++i) {
      failure = communicator.Failure();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(Has(failure, rank == 0 ? "all_reduce at here.py:1: has sent nothing to other nodes"
                                 : "in round 0 of the messages between nodes: rank 0 did not come"));
  });
  std::printf("ok a GPU on which something gave up sends nothing\n");
}

// Rank 1 does not come. Rank 0 goes on starting calls until CUDA takes no more launches, which are a kernel's or
// `in_nccl`, before the round that stands still has been aborted.
void TestAFullQueueOfLaunches(bool in_nccl) {
  Communicator::Configure(3, 3);
  OnRanks({Hosts(2, 1)}, [&](ncclComm_t comm, int rank) {
    std::string error;
    Communicator& communicator = *Communicator::Get(comm, &error);
    const auto call =
        DeviceCall::Make(SpecOf(Collective::kAllReduce, 2, "ring"), communicator, DType::kS32, 100, 100, &error);
    CHECK(call != nullptr);
    if (rank == 1) return;
    std::vector<int32_t> x(100), y(100);
    Stream& stream = OwnStream();
    const auto launch = [&] { return call->Launch(x.data(), y.data(), stream.handle()); };
    CHECK(launch().empty());
    (in_nccl ? before_group : before_launch) = [] {
      const auto begin = std::chrono::steady_clock::now();
      while (num_aborted + num_revoked == 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(20));  // nobody aborts
      }
    };
    CHECK(Has(launch(), "NCCL's communicator has been aborted"));  // in this round, or before the next
    Until([&] { return stream.num_running == 0; });
    for (int i = 0; num_aborted == 0 && i < 500; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(num_aborted == 1 && num_revoked == (in_nccl ? 1 : 0));
    CHECK(Has(communicator.Failure(), "in round 0 of the messages between nodes: rank 1 did not come"));
  });
  std::printf("ok a full queue of launches%s does not keep a round from being aborted\n", in_nccl ? " in NCCL" : "");
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm

int main() {
  using jaxcomm::Alone;
  Alone(jaxcomm::cuda::TestCalls);
  Alone(jaxcomm::cuda::TestNamedNodes);
  Alone(jaxcomm::cuda::TestInitFails);
  Alone(jaxcomm::cuda::TestARankThatDoesNotConnect);
  Alone(jaxcomm::cuda::TestGinThatFails);
  Alone(jaxcomm::cuda::TestProgramsThatDiffer);
  Alone(jaxcomm::cuda::TestARankThatDoesNotCome);
  Alone(jaxcomm::cuda::TestOneRankFails);
  Alone(jaxcomm::cuda::TestRunsBehindAGiveUp);
  Alone(jaxcomm::cuda::TestAGiveUpElsewhereOnTheGpu);
  for (const bool in_nccl : {false, true}) Alone([&] { jaxcomm::cuda::TestAFullQueueOfLaunches(in_nccl); });
  return 0;
}
