#include "cuda/runtime/send_recv_proxy.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <set>
#include <thread>

#include "common/hash.h"
#include "cuda/kernels/launch.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/wait_for_stream.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr auto kLook = std::chrono::milliseconds(50);  // how often the thread looks
// How long it lets a call of NCCL's go on that another thread is in. Begin holds back for longer what must not be sent.
constexpr auto kPatience = std::chrono::milliseconds(500);

std::string RanksText(const std::set<int32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (const int32_t rank : ranks) text += (rank == *ranks.begin() ? " " : ", ") + std::to_string(rank);
  return text;
}

std::set<int32_t> PeersOf(const Round& round) {
  std::set<int32_t> peers;
  for (const Transfer& transfer : round.sends) peers.insert(transfer.peer);
  for (const Transfer& transfer : round.receives) peers.insert(transfer.peer);
  return peers;
}

// Of all that one rank sends to another.
std::map<int32_t, uint64_t> Hashes(const std::vector<Round>& rounds, std::vector<Transfer> Round::* messages,
                                   int64_t item_bytes) {
  std::map<int32_t, uint64_t> hashes;  // by peer
  for (const Round& round : rounds) {
    for (const Transfer& transfer : round.*messages) {
      uint64_t& hash = hashes[transfer.peer];
      hash = Mix(hash, static_cast<uint64_t>(transfer.count * item_bytes));
    }
  }
  return hashes;
}

}  // namespace

std::unique_ptr<SendRecvProxy> SendRecvProxy::Make(const NcclLibrary& nccl, ncclComm_t network,
                                                   const device::Comm& comm, device::Report* report, double timeout_s,
                                                   std::string* error) {
  std::unique_ptr<SendRecvProxy> made(new SendRecvProxy(nccl, network, comm, report, timeout_s));
  if (!made->Allocate(error)) return nullptr;
  std::thread([send_recv_proxy = made.get()] { send_recv_proxy->RunWatchdog(); }).detach();
  return made;
}

bool SendRecvProxy::Allocate(std::string* error) {
  void* host = nullptr;
  const auto check = [&](const char* name, cudaError_t status) { return (*error = Problem(name, status)).empty(); };
  // Streams of unlike priority share no queue of the hardware, where one would wait for the other: the next segment may
  // be what others need before they can send.
  int lowest = 0, highest = 0;
  const size_t handshake_bytes = 2 * static_cast<size_t>(comm_.world.size) * sizeof(uint64_t);
  if (!check("kernels", LoadWatchdog()) ||
      !check("cudaDeviceGetStreamPriorityRange", cudaDeviceGetStreamPriorityRange(&lowest, &highest)) ||
      !check("cudaStreamCreate", cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest)) ||
      !check("cudaHostAlloc", cudaHostAlloc(&host, sizeof(device::WatchdogState), cudaHostAllocMapped)) ||
      !check("cudaHostGetDevicePointer",
             cudaHostGetDevicePointer(reinterpret_cast<void**>(&state_on_device_), host, 0)) ||
      !check("cudaMalloc", cudaMalloc(&handshake_, handshake_bytes))) {
    return false;
  }
  state_ = new (host) device::WatchdogState;
  return true;
}

bool SendRecvProxy::Connect(const SendRecvSchedule& schedule, int64_t item_bytes, uint64_t call, std::string* error) {
  if (!Handshake(schedule, item_bytes, error)) {
    Fail(call, *error);
    return false;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Round& round : schedule.rounds) peers_[call].push_back(RanksText(PeersOf(round)));
  return true;
}

void SendRecvProxy::Forget(uint64_t call) {
  std::lock_guard<std::mutex> lock(mutex_);
  peers_.erase(call);
}

bool SendRecvProxy::Handshake(const SendRecvSchedule& schedule, int64_t item_bytes, std::string* error) {
  const std::map<int32_t, uint64_t> sent = Hashes(schedule.rounds, &Round::sends, item_bytes);
  const std::map<int32_t, uint64_t> received = Hashes(schedule.rounds, &Round::receives, item_bytes);
  std::vector<uint64_t> words(2 * static_cast<size_t>(comm_.world.size));
  const size_t bytes = words.size() * sizeof(uint64_t);
  Round handshake;
  for (const auto& [peer, hash] : sent) {
    words[peer] = hash;
    handshake.sends.push_back({peer, peer, 1});
  }
  for (const auto& [peer, hash] : received) handshake.receives.push_back({peer, comm_.world.size + peer, 1});
  const auto at = [&](int64_t word) { return handshake_ + word * static_cast<int64_t>(sizeof(uint64_t)); };
  {
    std::lock_guard<std::mutex> lock(enqueue_mutex_);
    uint64_t failed_call;
    if (*error = Failure(&failed_call); !error->empty()) return false;  // NCCL's communicator may be gone
    *error =
        Problem("cudaMemcpyAsync", cudaMemcpyAsync(handshake_, words.data(), bytes, cudaMemcpyHostToDevice, stream_));
    if (error->empty()) *error = SendRecv(handshake, at, sizeof(uint64_t));
    const std::string peers = RanksText(PeersOf(handshake)) + " of other nodes";
    if (!error->empty() || !WaitForStream(stream_, timeout_s_, peers, error)) return false;
    *error =
        Problem("cudaMemcpyAsync", cudaMemcpyAsync(words.data(), handshake_, bytes, cudaMemcpyDeviceToHost, stream_));
    if (!error->empty() || !WaitForStream(stream_, timeout_s_, peers, error)) return false;
  }
  for (const auto& [peer, hash] : received) {
    if (words[static_cast<size_t>(comm_.world.size) + peer] == hash) continue;
    *error = "rank " + std::to_string(peer) + " sends other messages between nodes than rank " +
             std::to_string(comm_.world.rank) + " expects: their programs differ";
    return false;
  }
  return true;
}

bool SendRecvProxy::MakeEvents(const SendRecvSchedule& schedule, RoundEvents* events, std::string* error) const {
  const auto make = [&](cudaEvent_t* event) {
    return (*error = Problem("cudaEventCreate", cudaEventCreateWithFlags(event, cudaEventDisableTiming))).empty();
  };
  events->over.resize(schedule.rounds.size());
  return make(&events->packed) &&
         std::all_of(events->over.begin(), events->over.end(), [&](cudaEvent_t& event) { return make(&event); });
}

void SendRecvProxy::Free(const RoundEvents& events) {
  if (events.packed != nullptr) cudaEventDestroy(events.packed);
  for (cudaEvent_t event : events.over) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

std::string SendRecvProxy::SendRecv(const Round& round, const std::function<char*(int64_t)>& at, int64_t item_bytes) {
  std::lock_guard<std::timed_mutex> lock(nccl_mutex_);
  if (closed_) return "messages between nodes: NCCL's communicator has been aborted";
  ncclResult_t result = nccl_.GroupStart();
  for (const Transfer& transfer : round.sends) {
    if (result != ncclSuccess) break;
    const auto bytes = static_cast<size_t>(transfer.count * item_bytes);
    result = nccl_.Send(at(transfer.begin), bytes, ncclInt8, transfer.peer, network_, stream_);
  }
  for (const Transfer& transfer : round.receives) {
    if (result != ncclSuccess) break;
    const auto bytes = static_cast<size_t>(transfer.count * item_bytes);
    result = nccl_.Recv(at(transfer.begin), bytes, ncclInt8, transfer.peer, network_, stream_);
  }
  const ncclResult_t ended = nccl_.GroupEnd();
  if (result == ncclSuccess) result = ended;
  return result == ncclSuccess ? "" : std::string("messages between nodes: ") + nccl_.GetErrorString(result);
}

std::string SendRecvProxy::Post(const CallProgram& call, const RankArgs& args, int32_t number,
                                const RoundEvents& events, cudaStream_t stream) {
  const Round& round = call.schedule.rounds[number];
  std::string problem = Problem("cudaEventRecord", cudaEventRecord(events.packed, stream));
  if (problem.empty()) problem = Problem("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_, events.packed, 0));
  if (problem.empty()) problem = Problem("kernel", LaunchBegin(args.comm, state_on_device_, number + 1, stream_));
  char* const scratch = args.scratch.At(args.comm.local.rank);
  if (problem.empty()) {
    problem = SendRecv(round, [&](int64_t item) { return scratch + item * call.item_bytes; }, call.item_bytes);
  }
  if (problem.empty() && round.unpack >= 0) {
    problem = Problem("kernel", Launch(OfWalk(call, args, round.unpack), call.num_channels, stream_));
  }
  if (problem.empty()) problem = Problem("kernel", LaunchEnd(args.comm, state_on_device_, stream_));
  if (problem.empty()) problem = Problem("cudaEventRecord", cudaEventRecord(events.over[number], stream_));
  return problem;
}

std::string SendRecvProxy::Run(const CallProgram& call, const RankArgs& args, const RoundEvents& events,
                               cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(enqueue_mutex_);
  uint64_t failed_call;
  std::string problem = Failure(&failed_call);  // NCCL's communicator may be gone
  bool copied_in = false;
  for (const Action& action : call.schedule.actions) {
    if (!problem.empty()) break;
    if (action.kind == Action::kWalk) {
      RankArgs walk = OfWalk(call, args, action.number);
      if (!copied_in) walk.copy_in = args.copy_in;
      if (&action == &call.schedule.actions.back()) walk.copy_out = args.copy_out;
      copied_in = true;
      problem = Problem("kernel", Launch(walk, call.num_channels, stream));
    } else if (action.kind == Action::kPost) {
      problem = Post(call, args, action.number, events, stream);
    } else {
      problem = Problem("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, events.over[action.number], 0));
    }
  }
  return problem;
}

std::string SendRecvProxy::Failure(uint64_t* call) const {
  std::lock_guard<std::mutex> lock(mutex_);
  *call = failed_call_;
  return failure_;
}

void SendRecvProxy::RunWatchdog() {
  uint64_t count = 0;
  auto since = std::chrono::steady_clock::now();
  for (;;) {
    std::this_thread::sleep_for(kLook);
    const bool held = __atomic_load_n(&state_->held, __ATOMIC_ACQUIRE) != 0;  // comes after a report
    if (__atomic_load_n(&report_->state, __ATOMIC_ACQUIRE) == device::Report::kComplete) {
      return Fail(report_->call_id, "");  // the report says why
    }
    if (held) {
      return Fail(__atomic_load_n(&state_->call, __ATOMIC_RELAXED),
                  "has sent nothing to other nodes, since a kernel of another communicator aborted on this GPU");
    }
    const auto now = std::chrono::steady_clock::now();
    const uint64_t seen = __atomic_load_n(&state_->count, __ATOMIC_ACQUIRE);
    const uint64_t round = __atomic_load_n(&state_->round, __ATOMIC_RELAXED);
    if (seen != count || round == 0) since = now;
    count = seen;
    if (std::chrono::duration<double>(now - since).count() <= timeout_s_) continue;
    const uint64_t call = __atomic_load_n(&state_->call, __ATOMIC_RELAXED);
    std::string peers = "other nodes";
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = peers_.find(call);
      if (found != peers_.end() && round <= found->second.size()) peers = found->second[round - 1];
    }
    return Fail(call, "rank " + std::to_string(comm_.world.rank) + " aborted in round " + std::to_string(round - 1) +
                          " of the messages between nodes: " + peers + " did not come within " +
                          TimeoutText(timeout_s_));
  }
}

void SendRecvProxy::Fail(uint64_t call, const std::string& text) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) return;  // of the thread that watches, or of a call that does not connect
    failed_call_ = call;
    failure_ = text.empty() ? "a kernel aborted" : text;
  }
  __atomic_store_n(&report_->abort, 1, __ATOMIC_RELEASE);  // what this rank has for its node has no meaning either
  closed_ = true;
  std::unique_lock<std::timed_mutex> lock(nccl_mutex_, kPatience);
  __atomic_store_n(&state_->aborting, 1, __ATOMIC_RELEASE);
  if (!lock) {
    nccl_.CommRevoke(network_, NCCL_REVOKE_DEFAULT);
    lock.lock();
  }
  lock.unlock();  // whoever comes now finds it closed
  // It does not return before all CUDA graphs that use the communicator are gone: nobody waits for it.
  std::thread([nccl = &nccl_, network = network_] { nccl->CommAbort(network); }).detach();
}

}  // namespace cuda
}  // namespace jaxcomm
