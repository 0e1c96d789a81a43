#include "cuda/runtime/send_recv_proxy.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <set>

#include "common/hash.h"
#include "cuda/kernels/launch.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/deadline.h"
#include "cuda/nccl/is_captured.h"
#include "cuda/nccl/nccl_calls.h"
#include "cuda/nccl/threads.h"
#include "cuda/nccl/wait_for_stream.h"
#include "cuda/runtime/make_stream.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr auto kLook = std::chrono::milliseconds(50);  // period of the watchdog
// How long the watchdog waits for a call of NCCL in another thread. LaunchBegin's kernel holds back for longer what
// must not be sent.
constexpr auto kPatience = std::chrono::milliseconds(500);
constexpr auto kPatienceAfterRevoke = std::chrono::seconds(5);

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

// Hashes of the sizes of all transfers between this rank and each peer.
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

StatusOr<std::unique_ptr<SendRecvProxy>> SendRecvProxy::Make(const NcclLibrary& nccl, ncclComm_t network,
                                                             const device::Comm& comm, device::Report* report,
                                                             double timeout_s, bool asynchronous) {
  std::unique_ptr<SendRecvProxy> made(new SendRecvProxy(nccl, network, comm, report, timeout_s));
  JAXCOMM_RETURN_IF_ERROR(made->Allocate(asynchronous));
  Threads::Start([send_recv_proxy = made.get()] { send_recv_proxy->RunWatchdog(); });
  return made;
}

Status SendRecvProxy::Allocate(bool asynchronous) {
  void* host = nullptr;
  const size_t handshake_bytes = 2 * static_cast<size_t>(comm_.world.size) * sizeof(uint64_t);
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("kernels", LoadWatchdog()));
  JAXCOMM_RETURN_IF_ERROR(MakeStream(asynchronous ? StreamUse::kAsynchronousMessages : StreamUse::kMessages, &stream_));
  JAXCOMM_RETURN_IF_ERROR(
      CheckCuda("cudaHostAlloc", cudaHostAlloc(&host, sizeof(device::WatchdogState), cudaHostAllocMapped)));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaHostGetDevicePointer",
                                    cudaHostGetDevicePointer(reinterpret_cast<void**>(&state_on_device_), host, 0)));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaMalloc", cudaMalloc(&handshake_, handshake_bytes)));
  state_ = new (host) device::WatchdogState;
  return OkStatus();
}

Status SendRecvProxy::Connect(const SendRecvSchedule& schedule, int64_t item_bytes, uint64_t call) {
  if (Status status = Handshake(schedule, item_bytes); !status.ok()) {
    Fail(call, status.message());
    return status;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Round& round : schedule.rounds) peers_[call].push_back(RanksText(PeersOf(round)));
  return OkStatus();
}

void SendRecvProxy::Forget(uint64_t call) {
  std::lock_guard<std::mutex> lock(mutex_);
  peers_.erase(call);
}

Status SendRecvProxy::Handshake(const SendRecvSchedule& schedule, int64_t item_bytes) {
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
  const auto at = [this](int64_t word) { return handshake_ + word * static_cast<int64_t>(sizeof(uint64_t)); };
  {
    std::lock_guard<std::mutex> lock(enqueue_mutex_);
    uint64_t failed_call;
    JAXCOMM_RETURN_IF_ERROR(Failure(&failed_call));  // NCCL's communicator may be gone
    JAXCOMM_RETURN_IF_ERROR(CheckCuda(
        "cudaMemcpyAsync", cudaMemcpyAsync(handshake_, words.data(), bytes, cudaMemcpyHostToDevice, stream_)));
    const std::string peers = RanksText(PeersOf(handshake)) + " of other nodes";
    // NCCL connects to new peers in the thread that ends the group, without a limit.
    const auto status = std::make_shared<Status>();
    const bool begun = RunBounded(
        [this, status, handshake, at] { *status = SendRecv(handshake, at, sizeof(uint64_t)); }, Deadline(timeout_s_));
    if (!begun) return Late(peers, timeout_s_);
    JAXCOMM_RETURN_IF_ERROR(*status);
    JAXCOMM_RETURN_IF_ERROR(WaitForStream(stream_, timeout_s_, peers));
    JAXCOMM_RETURN_IF_ERROR(CheckCuda(
        "cudaMemcpyAsync", cudaMemcpyAsync(words.data(), handshake_, bytes, cudaMemcpyDeviceToHost, stream_)));
    JAXCOMM_RETURN_IF_ERROR(WaitForStream(stream_, timeout_s_, peers));
  }
  for (const auto& [peer, hash] : received) {
    if (words[static_cast<size_t>(comm_.world.size) + peer] == hash) continue;
    return InvalidArgumentError("rank " + std::to_string(peer) + " sends other messages between nodes than rank " +
                                std::to_string(comm_.world.rank) + " expects: their programs differ");
  }
  return OkStatus();
}

Status SendRecvProxy::MakeEvents(const SendRecvSchedule& schedule, RoundEvents* events) const {
  const auto make = [](cudaEvent_t* event) {
    return CheckCuda("cudaEventCreate", cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  };
  events->over.resize(schedule.rounds.size());
  JAXCOMM_RETURN_IF_ERROR(make(&events->packed));
  for (cudaEvent_t& event : events->over) JAXCOMM_RETURN_IF_ERROR(make(&event));
  return OkStatus();
}

void SendRecvProxy::Free(const RoundEvents& events) {
  if (events.packed != nullptr) cudaEventDestroy(events.packed);
  for (cudaEvent_t event : events.over) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

Status SendRecvProxy::SendRecv(const Round& round, const std::function<char*(int64_t)>& at, int64_t item_bytes) {
  std::lock_guard<std::timed_mutex> lock(nccl_mutex_);
  if (closed_) return UnavailableError("messages between nodes: NCCL's communicator has been aborted");
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
  while (result == ncclInProgress && Threads::Sleep(std::chrono::milliseconds(1))) {  // NCCL_COMM_BLOCKING=0
    if (const ncclResult_t asked = nccl_.CommGetAsyncError(network_, &result); asked != ncclSuccess) result = asked;
  }
  return CheckNccl(nccl_, network_, "messages between nodes", result);
}

Status SendRecvProxy::Post(const CallProgram& call, const RankArgs& args, int32_t number, const RoundEvents& events,
                           cudaStream_t stream) {
  const Round& round = call.schedule.rounds[number];
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaEventRecord", cudaEventRecord(events.packed, stream)));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_, events.packed, 0)));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("kernel", LaunchBegin(args.comm, state_on_device_, number + 1, stream_)));
  char* const scratch = args.scratch.At(args.comm.local.rank);
  const auto at = [&](int64_t item) { return scratch + item * call.item_bytes; };
  JAXCOMM_RETURN_IF_ERROR(SendRecv(round, at, call.item_bytes));
  if (round.unpack >= 0) {
    const cudaError_t launched = Launch(ArgsOfLaunch(call, args, round.unpack), call.num_channels, stream_);
    JAXCOMM_RETURN_IF_ERROR(CheckCuda("kernel", launched));
  }
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("kernel", LaunchEnd(args.comm, state_on_device_, stream_)));
  return CheckCuda("cudaEventRecord", cudaEventRecord(events.over[number], stream_));
}

Status SendRecvProxy::Run(const CallProgram& call, const RankArgs& args, const RoundEvents& events,
                          cudaStream_t stream) {
  if (IsCaptured(stream)) {
    return UnavailableError(
        "the GPUs of the group form several nodes, though they are on one host by JAX's account, and NCCL's messages "
        "between nodes can't be part of a CUDA graph. Set XLA_FLAGS=--xla_gpu_enable_command_buffer= or "
        "JAXCOMM_ALGORITHM=xla");
  }
  std::lock_guard<std::mutex> lock(enqueue_mutex_);
  uint64_t failed_call;
  JAXCOMM_RETURN_IF_ERROR(Failure(&failed_call));  // NCCL's communicator may be gone
  bool copied_in = false;
  for (const Action& action : call.schedule.actions) {
    if (action.kind == Action::kLaunch) {
      RankArgs launch_args = ArgsOfLaunch(call, args, action.number);
      if (!copied_in) launch_args.copy_in = args.copy_in;
      if (&action == &call.schedule.actions.back()) launch_args.copy_out = args.copy_out;
      copied_in = true;
      JAXCOMM_RETURN_IF_ERROR(CheckCuda("kernel", Launch(launch_args, call.num_channels, stream)));
    } else if (action.kind == Action::kPost) {
      JAXCOMM_RETURN_IF_ERROR(Post(call, args, action.number, events, stream));
    } else {
      JAXCOMM_RETURN_IF_ERROR(
          CheckCuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, events.over[action.number], 0)));
    }
  }
  return OkStatus();
}

Status SendRecvProxy::Failure(uint64_t* call) const {
  std::lock_guard<std::mutex> lock(mutex_);
  *call = failed_call_;
  return failure_;
}

void SendRecvProxy::RunWatchdog() {
  uint64_t count = 0;
  auto since = std::chrono::steady_clock::now();
  for (;;) {
    if (!Threads::Sleep(kLook)) return;
    const bool held = __atomic_load_n(&state_->held, __ATOMIC_ACQUIRE) != 0;  // set after a report
    if (__atomic_load_n(&report_->state, __ATOMIC_ACQUIRE) == device::Report::kComplete) {
      return Fail(report_->call_id, "");  // the report holds the reason
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
    if (!failure_.ok()) return;  // set by the watchdog or by Connect()
    failed_call_ = call;
    failure_ = DeadlineExceededError(text.empty() ? "a kernel aborted" : text);
  }
  __atomic_store_n(&report_->abort, 1, __ATOMIC_RELEASE);  // the ranks of the node must not use this rank's data either
  closed_ = true;
  std::unique_lock<std::timed_mutex> lock(nccl_mutex_, kPatience);
  __atomic_store_n(&state_->aborting, 1, __ATOMIC_RELEASE);
  if (!lock) {
    RevokeNcclComm(nccl_, network_);
    // A thread that stays inside of NCCL is left there: NCCL allows no other call on the communicator meanwhile.
    if (!lock.try_lock_for(kPatienceAfterRevoke)) return;
  }
  lock.unlock();  // a call of NCCL that begins now finds closed_
  // ncclCommAbort returns only after all CUDA graphs that use the communicator are gone.
  AbortNcclComm(nccl_, network_);
}

}  // namespace cuda
}  // namespace jaxcomm
