#include "cuda/runtime/communicator.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <new>
#include <utility>

#include "common/hash.h"
#include "cuda/kernels/exchange_offsets.cuh"
#include "cuda/kernels/launch.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/scoped_device.h"
#include "cuda/runtime/abort_flag.h"
#include "cuda/runtime/call_names.h"

namespace jaxcomm {
namespace cuda {
namespace {

// Small enough for the memory that XLA leaves to others, large enough for most calls of a model.
constexpr int64_t kLeastArenaBytes = 32 << 20;

struct Shared {
  std::mutex mutex;
  Communicator::Settings settings;
  std::vector<Communicator*> communicators;
  std::string first_failure;
};

Shared& GetShared() {
  static auto* shared = new Shared;
  return *shared;
}

}  // namespace

void Communicator::Configure(double timeout_s, int32_t max_channels, const std::string& node_id, bool windows) {
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  Communicator::Settings& settings = GetShared().settings;
  settings.timeout_s = timeout_s;
  settings.max_channels = max_channels;
  settings.node_name = node_id.empty() ? 0 : Mix(1, std::string_view(node_id));
  settings.windows = windows;
}

Communicator::Settings Communicator::Configured() {
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  return GetShared().settings;
}

Communicator* Communicator::Get(ncclComm_t nccl_comm, std::string* error) {
  struct Entry {
    std::mutex mutex;                      // held while it is made: other devices make theirs at the same time
    Communicator* communicator = nullptr;  // never deleted
    std::string error;
  };
  static std::mutex mutex;
  static auto* entries = new std::map<ncclComm_t, Entry>;
  Entry* entry;
  {
    std::lock_guard<std::mutex> lock(mutex);
    entry = &(*entries)[nccl_comm];
  }
  std::lock_guard<std::mutex> lock(entry->mutex);
  Communicator*& known = entry->communicator;
  if (known == nullptr && entry->error.empty()) {
    // XLA has loaded the library that made the communicator.
    if (const NcclLibrary* nccl = NcclLibrary::Open("", &entry->error)) {
      known = new Communicator(*nccl, nccl_comm, Configured());
      if (!known->Make(&entry->error) && entry->error.empty()) entry->error = "unknown failure";
    }
    if (entry->error.empty()) {
      std::lock_guard<std::mutex> shared_lock(GetShared().mutex);
      GetShared().communicators.push_back(known);
    }
  }
  *error = entry->error;
  return entry->error.empty() ? known : nullptr;
}

namespace {

std::vector<Communicator*> AllCommunicators() {
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  return GetShared().communicators;
}

}  // namespace

std::string Communicator::FirstFailure() {
  uint64_t first_ns = UINT64_MAX;
  std::string first;
  for (Communicator* const communicator : AllCommunicators()) {
    uint64_t time_ns = 0;
    const std::string failure = communicator->KernelFailure(&time_ns);
    if (failure.empty() || (!first.empty() && time_ns >= first_ns)) continue;
    first = failure;
    first_ns = time_ns;
  }
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  if (GetShared().first_failure.empty()) GetShared().first_failure = first;
  return GetShared().first_failure;
}

std::vector<std::string> Communicator::Failures() {
  std::vector<std::string> failures;
  for (Communicator* const communicator : AllCommunicators()) {
    if (std::string failure = communicator->Failure(); !failure.empty()) failures.push_back(std::move(failure));
  }
  return failures;
}

bool Communicator::Make(std::string* error) {
  comm_.timeout_ns = static_cast<uint64_t>(settings_.timeout_s * 1e9);
  comm_.signals.num_channels = settings_.max_channels + 1;
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  if (!QueryProperties(&properties, error)) return false;
  ScopedDevice keep;
  // Until there is a bootstrap, no rank can tell the others that it has failed.
  if (!CheckCuda("cudaSetDevice", cudaSetDevice(device_), error) || !bootstrap_.Make(rank(), size(), error)) {
    return false;
  }
  int num_sms = 0;
  const bool ready = CheckCuda("cudaDeviceGetAttribute",
                               cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device_), error) &&
                     CheckDevice(num_sms, error);
  if (!bootstrap_.AllDone("when it loaded kernels", ready, error) ||
      !bootstrap_.CheckEqual("JAXCOMM_MAX_SMS", static_cast<uint64_t>(max_channels()), error) ||
      !bootstrap_.CheckEqual("JAXCOMM_SYMMETRIC_BUFFERS", settings_.windows ? 1 : 0, error)) {
    return false;
  }
  const bool can_gin = Gin::Usable(nccl_, properties);
  Nodes nodes;
  if (!FindNodes(bootstrap_, properties, settings_.node_name, can_gin, &nodes, error)) return false;
  if (nodes.gin && !MakeGin(error)) return false;
  if (nodes.gin && !gin_ && !FindNodes(bootstrap_, properties, settings_.node_name, false, &nodes, error)) return false;
  comm_.local = nodes.own;
  memory_.emplace(bootstrap_, nodes, properties.multimemSupport && nccl_.GetLsaMultimemDevicePointer != nullptr);
  if (!bootstrap_.AllDone("when it made counters", MakeLocalMemory(error), error) || !MakeCounters(error)) return false;
  return comm_.local.size == size() || gin_ || MakeSendRecvProxy(num_sms, error);
}

bool Communicator::CheckDevice(int num_sms, std::string* error) const {
  if (max_channels() > num_sms) {
    *error = "JAXCOMM_MAX_SMS is " + std::to_string(max_channels()) + ", but GPU " + std::to_string(device_) + " has " +
             std::to_string(num_sms) + " SMs";
    return false;
  }
  return CheckCuda("kernels", LoadKernel(), error) && CheckCuda("kernels", LoadLlKernel(), error) &&
         CheckCuda("kernels", LoadMultimemKernel(), error);
}

bool Communicator::MakeSendRecvProxy(int num_sms, std::string* error) {
  // Kernels that wait for their node must leave room for NCCL's, or no rank comes any further.
  constexpr int32_t kSmsOfNccl = 34;
  const bool room = max_channels() + kSmsOfNccl <= num_sms;
  if (!room) {
    *error = "JAXCOMM_MAX_SMS is " + std::to_string(max_channels()) + ", but between nodes " +
             std::to_string(kSmsOfNccl) + " of the " + std::to_string(num_sms) + " SMs of GPU " +
             std::to_string(device_) + " must be left to NCCL";
  }
  ncclComm_t network = nullptr;
  // Everybody again: what goes between nodes must not meet what XLA sends on its communicator.
  if (!bootstrap_.AllDone("when it looked for room for NCCL", room, error) ||
      !MakeSubCommunicator(bootstrap_, 0, size(), &network, error)) {
    return false;
  }
  send_recv_proxy_ = SendRecvProxy::Make(nccl_, network, comm_, report_, settings_.timeout_s, error);
  return bootstrap_.AllDone("when it made streams for messages", send_recv_proxy_ != nullptr, error);
}

bool Communicator::QueryProperties(ncclCommProperties_t* properties, std::string* error) {
  for (const char* name : {"ncclMemAlloc", "ncclMemFree", "ncclCommWindowRegister", "ncclCommQueryProperties",
                           "ncclGetLsaDevicePointer"}) {
    *error = nccl_.WhyNot(name);
    if (!error->empty()) return false;
  }
  const ncclResult_t asked = nccl_.CommQueryProperties(bootstrap_.nccl_comm(), properties);
  if (!bootstrap_.Check("ncclCommQueryProperties", asked, error)) return false;
  device_ = properties->cudaDev;
  comm_.world = {properties->rank, properties->nRanks, 0, 1};
  return true;
}

bool Communicator::MakeLocalMemory(std::string* error) {
  const size_t counters_bytes =
      static_cast<size_t>(comm_.local.size) * sizeof(uint64_t) * static_cast<size_t>(comm_.signals.num_channels);
  const size_t epochs_bytes = static_cast<size_t>(max_channels()) * sizeof(uint64_t);
  void* host = nullptr;
  void* report = nullptr;
  char* counters = nullptr;
  if (!CheckCuda("cudaHostAlloc", cudaHostAlloc(&host, sizeof(device::Report), cudaHostAllocMapped), error) ||
      !CheckCuda("cudaHostGetDevicePointer", cudaHostGetDevicePointer(&report, host, 0), error) ||
      !CheckCuda("cudaMalloc", cudaMalloc(&counters, 2 * counters_bytes + epochs_bytes), error) ||
      !CheckCuda("cudaMemsetAsync",
                 cudaMemsetAsync(counters, 0, 2 * counters_bytes + epochs_bytes, bootstrap_.stream()), error)) {
    return false;
  }
  report_ = new (host) device::Report;
  comm_.report = static_cast<device::Report*>(report);
  comm_.abort_flag = AbortFlag(device_, error);
  comm_.signals.sent = reinterpret_cast<uint64_t*>(counters);
  comm_.signals.received = reinterpret_cast<uint64_t*>(counters + counters_bytes);
  comm_.ll_slots.epochs = reinterpret_cast<uint64_t*>(counters + 2 * counters_bytes);
  return comm_.abort_flag != nullptr;
}

// Signals, LL slots and the offset table have memory of their own, which stays where it is when the arena grows.
bool Communicator::MakeCounters(std::string* error) {
  device::LlSlots& slots = comm_.ll_slots;
  slots.num_channels = std::min(max_channels(), kLlChannels);
  slots.num_units = kLlUnits;
  const int64_t num_ranks = comm_.local.size;
  const int64_t slot_bytes = 2 * num_ranks * slots.num_channels * slots.num_units * int64_t{sizeof(uint64_t[2])};
  const int64_t pad_bytes = num_ranks * comm_.signals.num_channels * int64_t{sizeof(uint64_t)};
  const int64_t bytes = WholePages(slot_bytes + pad_bytes + OffsetTableBytes(comm_.local.size));
  device::Window& pad = comm_.signals.pad;
  if (!memory_->Allocate("signals", bytes, &pad, error) || !memory_->Clear(pad, bytes, error)) return false;
  slots.pad = pad;
  pad.base += slot_bytes;
  offset_table_ = {pad.base + pad_bytes, pad.stride};
  return true;
}

bool Communicator::IsSameOnAllRanks(const char* what, uint64_t own, std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  ScopedDevice keep;
  return CheckCuda("cudaSetDevice", cudaSetDevice(device_), error) && bootstrap_.CheckEqual(what, own, error);
}

bool Communicator::AllDone(const char* at, bool own, std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  ScopedDevice keep;
  return CheckCuda("cudaSetDevice", cudaSetDevice(device_), error) && bootstrap_.AllDone(at, own, error);
}

// What it can't make on all ranks, it makes on none: there are other ways between nodes. What NCCL has made where it
// could stays. False: ranks have not met.
bool Communicator::MakeGin(std::string* error) {
  const auto bytes = static_cast<size_t>(Gin::CountBytes(comm_.signals.num_channels, size()));
  uint64_t* counts = nullptr;
  std::string problem;
  bool all_can = CheckCuda("kernels", LoadGinKernel(), &problem) &&
                 CheckCuda("cudaMalloc", cudaMalloc(&counts, bytes), &problem) &&
                 CheckCuda("cudaMemsetAsync", cudaMemsetAsync(counts, 0, bytes, bootstrap_.stream()), &problem);
  // After this, all counts are zero.
  if (!bootstrap_.AllTrue(all_can, &all_can, error)) return false;
  std::unique_ptr<Gin> made;
  if (all_can) {
    const auto check = [this](const char* name, ncclResult_t result, std::string* why) {
      return bootstrap_.Check(name, result, why);
    };
    made = Gin::Make(nccl_, bootstrap_.nccl_comm(), comm_, counts, check, &problem);
    if (!bootstrap_.AllTrue(made != nullptr, &all_can, error)) return false;
  }
  if (all_can) {
    gin_ = std::move(made);
    return true;
  }
  cudaFree(counts);
  static std::once_flag warned;
  std::call_once(warned, [&] {
    std::fprintf(stderr, "jaxcomm: no GIN between nodes: rank %d of %d: %s; NCCL sends and receives instead\n", rank(),
                 size(), problem.empty() ? "another rank can't" : problem.c_str());
  });
  return true;
}

namespace {

// False also if nobody can tell.
bool IsCaptured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) cudaGetLastError();
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

std::string Communicator::Begin(cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string error;
  if (last_ != nullptr && last_stream_ != stream && !IsCaptured(stream)) {
    CheckCuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, last_, 0), &error);
  }
  return error;
}

std::string Communicator::End(cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string error;
  if (IsCaptured(stream)) return error;
  if (last_ == nullptr &&
      !CheckCuda("cudaEventCreate", cudaEventCreateWithFlags(&last_, cudaEventDisableTiming), &error)) {
    return error;
  }
  CheckCuda("cudaEventRecord", cudaEventRecord(last_, stream), &error);
  last_stream_ = stream;
  return error;
}

bool Communicator::Reserve(int64_t bytes, device::Window* arena, int64_t* arena_bytes, std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > arena_bytes_ || arena_bytes_ == 0) {
    ScopedDevice keep;
    if (!CheckCuda("cudaSetDevice", cudaSetDevice(device_), error)) return false;
    // Twice as much as the last: what old programs and CUDA graphs still use is never more than what the newest has.
    const int64_t whole = WholePages(std::max({bytes, 2 * arena_bytes_, kLeastArenaBytes}));
    device::Window window;
    if (!memory_->Allocate("arena", whole, &window, error)) return false;
    arena_ = window;
    arena_bytes_ = whole;
  }
  *arena = arena_;
  *arena_bytes = arena_bytes_;
  return true;
}

bool Communicator::ReserveFor(const std::string& owner, int64_t bytes, device::Comm* comm, std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  Arena& arena = arenas_[owner];
  if (bytes > arena.bytes) {
    ScopedDevice keep;
    const std::string what = "arena of " + owner;
    Arena made;
    made.bytes = WholePages(std::max(bytes, 2 * arena.bytes));
    if (!CheckCuda("cudaSetDevice", cudaSetDevice(device_), error) ||
        !memory_->Allocate(what.c_str(), made.bytes, &made.window, error, &made.multicast) ||
        !memory_->Clear(made.window, made.bytes, error)) {
      return false;
    }
    arena = made;
  }
  comm->arena = arena.window;
  comm->arena_multicast = arena.multicast;
  comm->arena_bytes = arena.bytes;
  return true;
}

ncclWindow_t Communicator::Registered(const device::Window& arena) {
  std::lock_guard<std::mutex> lock(mutex_);
  return memory_->Registered(arena);
}

// What NCCL says of peers is right only if their buffers lie as far from the begin of their windows as this rank's: it
// is looked at for the distance between ranks, nothing else.
bool Communicator::OffsetOf(ncclWindow_t window, int64_t offset, int64_t* buffer_offset, std::string* error) const {
  device::Window addressed;
  if (!memory_->Address(window, offset, &addressed, error)) return false;
  if (size() > 1 && addressed.stride != comm_.signals.pad.stride) {
    *error = "XLA's window is " + std::to_string(addressed.stride) + " bytes apart from rank to rank, jaxcomm's " +
             std::to_string(comm_.signals.pad.stride);
    return false;
  }
  *buffer_offset = OffsetOf(addressed, 0);
  return true;
}

int64_t Communicator::OffsetOf(const device::Window& arena, int64_t offset) const {
  return arena.At(rank(), offset) - comm_.signals.pad.At(rank());
}

std::string Communicator::Failure() {
  uint64_t time_ns;
  const std::string failure = KernelFailure(&time_ns);
  return failure.empty() ? bootstrap_.Failure() : failure;
}

std::string Communicator::WhyNot() {
  const std::string first = FirstFailure();
  return first.empty() ? Failure() : first;
}

std::string Communicator::KernelFailure(uint64_t* time_ns) {
  const bool reported = __atomic_load_n(&report_->state, __ATOMIC_ACQUIRE) == device::Report::kComplete;
  uint64_t call = 0;
  std::string of_messages;
  if (send_recv_proxy_ && !reported) of_messages = send_recv_proxy_->Failure(&call);
  if (!reported && of_messages.empty()) return "";
  *time_ns = reported ? report_->time_ns : UINT64_MAX;
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failure_.empty()) {
    if (reported) call = report_->call_id;
    const std::string name = CallName::Of(call);
    failure_ = reported ? FailureText(*report_, name, settings_.timeout_s) : name + ": " + of_messages;
  }
  return failure_;
}

}  // namespace cuda
}  // namespace jaxcomm
