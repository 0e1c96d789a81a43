// The functions of cluster.h, with the kernels. Compiled with JAXCOMM_EMULATION.
#include "cluster.h"

#include <chrono>
#include <cstring>
#include <random>

#include "../../../ffi/cuda/kernels/launch.h"
#include "../../../ffi/cuda/kernels/launch_exchange_offsets.h"
#include "../../../ffi/cuda/kernels/launch_moe_one_shot.h"
#include "../../../ffi/cuda/kernels/launch_rail_rows.h"
#include "../../../ffi/cuda/kernels/launch_rows.h"
#include "../../../ffi/cuda/nccl/threads.h"
#include "../../../ffi/cuda/runtime/own_communicators.h"
#include "reductions.h"

namespace jaxcomm {
namespace fake {

Stream::Stream() {
  thread = std::thread([this] {
    emulation::TheMachine().yields = true;
    // Spinning ranks take turns on few cores, so a deadline of seconds passes after millions of switches.
    emulation::TheMachine().switch_ns = 1000;
    std::minstd_rand random(std::random_device{}());
    for (;;) {
      std::function<void()> next;
      {
        std::unique_lock<std::mutex> lock(mutex);
        while (queue.empty()) pushed.wait(lock);
        next = std::move(queue.front());
        queue.pop_front();
      }
      if (random() % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      next();
      Locked([&] { --num_running; });
    }
  });
  thread.detach();
}

namespace {

ncclComm_t MakeRank(Group* group, int rank) {
  auto made = std::make_unique<Rank>();
  made->group = group;
  made->rank = rank;
  return reinterpret_cast<ncclComm_t>(Keep(std::move(made)));
}

// The rank of this thread in the group that XLA has made.
thread_local Rank* own = nullptr;

// Runs a call on another thread with the thread-local state of a rank's thread.
cuda::Carried Carry(std::function<void()> call) {
  struct Carry {
    Rank* rank;
    Fault fault;
    std::function<void()> before_group, after_init;
  };
  const auto carry = std::make_shared<Carry>(Carry{own, fault, before_group, after_init});
  return {[carry, call = std::move(call)] {
            own = carry->rank;
            fault = carry->fault;
            before_group = carry->before_group;
            after_init = carry->after_init;
            call();
            carry->fault = fault;
          },
          [carry] { fault = carry->fault; }};
}
const bool carries = (cuda::carry_to_thread = &Carry) != nullptr;

// A call that waits for other ranks ends when the communicator is revoked.
void Meet(Rank& rank, const Group::Rendezvous& rendezvous) {
  Until([&] { return static_cast<int>(rendezvous.brought.size()) == rank.group->n() || rank.aborted; });
}

ncclResult_t AllGather(const void* from, void* to, size_t count, ncclDataType_t, ncclComm_t comm, cudaStream_t stream) {
  Rank& rank = Of(comm);
  if (Fails("ncclAllGather")) return ncclInternalError;
  const int number = rank.num_meetings++;
  const size_t bytes = count * sizeof(uint64_t);
  Of(stream).Push([=, &rank] {
    Group& group = *rank.group;
    Group::Rendezvous* rendezvous = nullptr;
    Locked([&] {
      rendezvous = &group.all_rendezvous[number];
      const char* bytes_from = static_cast<const char*>(from);
      rendezvous->brought[rank.rank].assign(bytes_from, bytes_from + bytes);
    });
    Until([&] { return static_cast<int>(rendezvous->brought.size()) == group.n() || rank.aborted; });
    if (rank.aborted) return;
    for (const auto& [r, brought] : rendezvous->brought)
      std::memcpy(static_cast<char*>(to) + r * bytes, brought.data(), bytes);
  });
  return ncclSuccess;
}

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
  if (own->group->cluster.init_fails) return ncclInternalError;
  Group* group = nullptr;
  Group::Rendezvous* rendezvous = nullptr;
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
    group->first_device = own->group->first_device;
    rendezvous = &group->all_rendezvous[-1];
    rendezvous->brought[rank];
  });
  const bool fails = Fails("ncclCommInitRankConfig");
  const bool first = own->made == nullptr;
  *made = MakeRank(group, rank);
  if (first) own->made = &Of(*made);
  const std::atomic<bool>* const joins = own->group->cluster.joins;
  while (!first && n > 1 && joins != nullptr && !*joins) std::this_thread::yield();
  Meet(Of(*made), *rendezvous);
  if (fails) return ncclInternalError;
  if (first && after_init) after_init();
  return ncclSuccess;
}

struct Registered {
  char* begin = nullptr;
  int64_t stride = 0;
  int first = 0;  // first rank of the team
};

ncclResult_t WindowRegister(ncclComm_t comm, void*, size_t bytes, ncclWindow_t* window, int) {
  Rank& rank = Of(comm);
  Group& group = *rank.group;
  CHECK(group.num_lsa_teams() == 1 || group.cluster.gin);
  auto registered = std::make_unique<Registered>();
  registered->stride = static_cast<int64_t>(bytes) + 4096;
  registered->first = rank.rank - rank.rank % (group.n() / group.num_lsa_teams());
  const bool fails = Fails("ncclCommWindowRegister");
  Group::Rendezvous* rendezvous = nullptr;
  Locked([&] {
    rendezvous = &group.all_rendezvous[rank.num_meetings++];
    rendezvous->memory.resize(registered->stride * group.n(), 0x5c);
    rendezvous->brought[rank.rank];
  });
  Meet(rank, *rendezvous);
  if (fails || rank.aborted) return ncclUnhandledCudaError;
  registered->begin = rendezvous->memory.data();
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
  Rank& rank = Of(comm);
  rank.asked = true;
  properties->rank = rank.rank;
  properties->nRanks = rank.group->n();
  properties->cudaDev = rank.group->first_device + rank.group->ranks[rank.rank];
  properties->nLsaTeams = rank.group->num_lsa_teams();
  const bool connected = properties->nLsaTeams == 1 || rank.group->cluster.gin;
  properties->deviceApiSupport = connected && (rank.group->cluster.peers_in_host || properties->nRanks == 1);
  properties->ginType = rank.group->cluster.gin ? NCCL_GIN_TYPE_PROXY : NCCL_GIN_TYPE_NONE;
  return ncclSuccess;
}

// Waits for all ranks, also if one of them fails.
ncclResult_t DevCommCreate(ncclComm_t comm, const ncclDevCommRequirements_t*, ncclDevComm_t*) {
  const bool fails = Fails("ncclDevCommCreate");
  Rank& rank = Of(comm);
  Group::Rendezvous* rendezvous = nullptr;
  Locked([&] {
    rendezvous = &rank.group->all_rendezvous[rank.num_meetings++];
    rendezvous->brought[rank.rank];
  });
  Meet(rank, *rendezvous);
  return fails ? ncclInvalidUsage : ncclSuccess;
}

// A call in the current NCCL group of this thread.
struct SendRecvCall {
  bool send;
  char* memory;
  size_t bytes;
  int peer;
  Rank* rank;
  Stream* stream;
};
thread_local std::vector<SendRecvCall> transfers;

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

void RunGroup(const std::vector<SendRecvCall>& group) {
  std::vector<std::shared_ptr<Message>> sent;
  for (const SendRecvCall& transfer : group) {
    if (!transfer.send) continue;
    auto message = std::make_shared<Message>();
    message->from = transfer.memory;
    message->bytes = transfer.bytes;
    sent.push_back(message);
    Locked([&] { transfer.rank->group->links[{transfer.rank->rank, transfer.peer}].push_back(message); });
  }
  for (const SendRecvCall& transfer : group) {
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

ncclResult_t GroupEnd() {
  std::vector<SendRecvCall> group;
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
  ++*Of(comm).group->cluster.num_aborted;
  ++num_aborted;
  return ncclSuccess;
}

ncclResult_t Revoke(ncclComm_t comm, int flags) {
  CHECK(flags == NCCL_REVOKE_DEFAULT);
  Locked([&] {
    Of(comm).aborted = true;
    ++num_revoked;
  });
  return ncclSuccess;
}

}  // namespace

std::unique_ptr<FakeStream> MakeStream() { return std::make_unique<Stream>(); }

std::vector<int> Hosts(int num_nodes, int ranks_per_node) {
  std::vector<int> hosts;
  for (int r = 0; r < num_nodes * ranks_per_node; ++r) hosts.push_back(r / ranks_per_node);
  return hosts;
}

void OnRanks(const Cluster& cluster, const std::function<void(ncclComm_t, int)>& f) {
  auto group = std::make_unique<Group>();
  group->cluster = cluster;
  for (size_t r = 0; r < cluster.hosts.size(); ++r) group->ranks.push_back(static_cast<int>(r));
  static std::atomic<int> number{0};
  group->first_device = 100 * number++;
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

StatusOr<cuda::Communicator*> Get(ncclComm_t of_xla) {
  const Rank& rank = Of(of_xla);
  return cuda::OwnCommunicator(of_xla, rank.group->first_device + rank.rank);
}

Stream& OwnStream() {
  thread_local Stream* stream = Keep(std::make_unique<Stream>());
  return *stream;
}

}  // namespace fake

StatusOr<const NcclLibrary*> NcclLibrary::Open(const std::string&) {
  static const NcclLibrary library = [] {
    NcclLibrary made = fake::FakeLibrary();
    made.AllGather = &fake::AllGather;
    made.GetUniqueId = &fake::GetUniqueId;
    made.CommInitRankConfig = &fake::InitRank;
    made.CommAbort = &fake::Abort;
    made.DevCommCreate = &fake::DevCommCreate;
    made.CommRevoke = &fake::Revoke;
    made.CommGetAsyncError = [](ncclComm_t, ncclResult_t* result) { return *result = ncclSuccess; };
    made.CommCount = [](ncclComm_t comm, int* n) { return *n = fake::Of(comm).group->n(), ncclSuccess; };
    made.CommUserRank = [](ncclComm_t comm, int* rank) { return *rank = fake::Of(comm).rank, ncclSuccess; };
    made.CommWindowRegister = &fake::WindowRegister;
    made.GetLsaDevicePointer = &fake::LsaPointer;
    made.CommQueryProperties = &fake::QueryProperties;
    made.GroupStart = [] { return ncclSuccess; };
    made.GroupEnd = &fake::GroupEnd;
    made.Send = &fake::Send;
    made.Recv = &fake::Recv;
    return made;
  }();
  return &library;
}

namespace cuda {

// Calls with GIN are in machine.h.
cudaError_t LaunchGin(const RankArgs&, const GinNetworkArgs&, const ncclDevComm&, int32_t, cudaStream_t) {
  return cudaErrorUnknown;
}
cudaError_t LaunchRailRows(const RailRowArgs&, const ncclDevComm&, cudaStream_t) { return cudaErrorUnknown; }
cudaError_t LoadWatchdog() { return cudaSuccess; }

// For one node only.
cudaError_t Launch(const LlArgs&, cudaStream_t) { return cudaErrorUnknown; }
cudaError_t Launch(const MultimemArgs&, cudaStream_t) { return cudaErrorUnknown; }
cudaError_t LaunchRows(const RowArgs&, cudaStream_t) { return cudaErrorUnknown; }
cudaError_t LaunchSlices(const SliceArgs&, cudaStream_t) { return cudaErrorUnknown; }
cudaError_t LaunchMoeOneShot(const MoeOneShotArgs&, cudaStream_t) { return cudaErrorUnknown; }
cudaError_t LaunchExchangeOffsets(const ExchangeOffsetsArgs&, cudaStream_t) { return cudaErrorUnknown; }

cudaError_t Launch(const RankArgs& args, int32_t num_channels, cudaStream_t stream) {
  if (!fake::plan_shared.Allows(BulkSharedBytes(args.bulk))) return cudaErrorInvalidValue;
  if (fake::before_launch) fake::before_launch();
  fake::Of(stream).Push([=] {
    const auto run = [&] {
      NoNetwork network;
      ChannelExecutor<NoNetwork> executor(args, network, static_cast<int32_t>(blockIdx.x), device::DynamicShared());
      executor.Run();
    };
    const auto shared_bytes = static_cast<size_t>(BulkSharedBytes(args.bulk));
    emulation::Launch(static_cast<unsigned>(num_channels), 1, 2, 1, run, shared_bytes);
  });
  return cudaSuccess;
}

cudaError_t LaunchBegin(const device::Comm& comm, device::WatchdogState* state, uint64_t round, cudaStream_t stream) {
  fake::Of(stream).Push([=] { emulation::Launch(1, 1, 1, 1, [&] { BeginRound(comm, *state, round); }); });
  return cudaSuccess;
}

cudaError_t LaunchEnd(const device::Comm& comm, device::WatchdogState* state, cudaStream_t stream) {
  fake::Of(stream).Push([=] { emulation::Launch(1, 1, 1, 1, [&] { EndRound(comm, *state); }); });
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace jaxcomm
