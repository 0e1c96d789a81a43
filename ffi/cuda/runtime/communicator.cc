#include "cuda/runtime/communicator.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "common/hash.h"
#include "cuda/kernels/exchange_offsets.cuh"
#include "cuda/kernels/launch.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/device_memory.h"
#include "cuda/nccl/failed_processes.h"
#include "cuda/nccl/first_contact.h"
#include "cuda/nccl/nccl_calls.h"
#include "cuda/program/launch_limits.h"
#include "cuda/runtime/call_names.h"

namespace jaxcomm::cuda {
namespace {

// Small enough for the memory that XLA leaves free, large enough for most calls of a model.
constexpr int64_t kLeastArenaBytes = 32 << 20;
constexpr char kBegin[] = "when it made its communicator";

struct Shared {
  std::mutex mutex;
  Communicator::Settings settings;
  std::vector<Communicator*> communicators;
  Status first_failure;
  Status own_failure;
};

Shared& GetShared() {
  static auto* shared = new Shared;
  return *shared;
}

std::vector<Communicator*> AllCommunicators() {
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  return GetShared().communicators;
}

}  // namespace

void Communicator::Configure(double timeout_s, int32_t max_channels, const std::string& node_id, bool symmetric_buffers,
                             int32_t process, int32_t num_processes, bool bulk_copy) {
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  const uint64_t node_name = node_id.empty() ? 0 : Mix(1, std::string_view(node_id));
  GetShared().settings = {timeout_s, max_channels, node_name, symmetric_buffers, process, num_processes, bulk_copy};
}

Communicator::Settings Communicator::Configured() {
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  return GetShared().settings;
}

StatusOr<Communicator*> Communicator::Make(const NcclLibrary& nccl, const StatusOr<ncclComm_t>& nccl_comm,
                                           const std::vector<uint64_t>& processes, const AllDoneFunction& all_done) {
  if (!nccl_comm.ok()) return all_done(kBegin, nccl_comm.status());
  const Settings settings = Configured();
  auto* const made = new Communicator(*new Bootstrap(nccl, *nccl_comm, settings.timeout_s, processes), settings, false);
  JAXCOMM_RETURN_IF_ERROR(made->Make(all_done));
  return made->Register();
}

Communicator* Communicator::Register() {
  {
    std::lock_guard<std::mutex> lock(GetShared().mutex);
    GetShared().communicators.push_back(this);
  }
  AbortIfFailed();  // NoteFailure() may have come too early for this communicator
  return this;
}

StatusOr<Communicator*> Communicator::AsynchronousLane() {
  std::lock_guard<std::mutex> lock(lane_mutex_);
  if (!lane_) lane_ = MakeAsynchronousLane();
  return *lane_;
}

StatusOr<Communicator*> Communicator::MakeAsynchronousLane() {
  std::lock_guard<std::mutex> lock(bootstrap_.mutex);
  ScopedDevice keep;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(device_)));
  auto* const made = new Communicator(bootstrap_, settings_, true);
  made->properties_ = properties_;
  made->device_ = device_;
  made->num_sms_ = num_sms_;
  made->bulk_copies_ = bulk_copies_;
  made->comm_.world = comm_.world;
  made->comm_.local = comm_.local;
  made->comm_.timeout_ns = comm_.timeout_ns;
  JAXCOMM_RETURN_IF_ERROR(made->MakeLane());
  return made->Register();
}

Status Communicator::FirstFailure() {
  uint64_t first_ns = UINT64_MAX;
  Status first;
  for (Communicator* const communicator : AllCommunicators()) {
    uint64_t time_ns = 0;
    const Status failure = communicator->KernelFailure(&time_ns);
    if (failure.ok() || (!first.ok() && time_ns >= first_ns)) continue;
    first = failure;
    first_ns = time_ns;
  }
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  if (GetShared().first_failure.ok()) GetShared().first_failure = first;
  return GetShared().first_failure;
}

std::vector<std::string> Communicator::Failures() {
  std::vector<std::string> failures;
  for (Communicator* const communicator : AllCommunicators()) {
    // The lanes of a group share the failures of their bootstrap.
    const Status failure = communicator->asynchronous_ ? communicator->KernelFailure() : communicator->Failure();
    if (!failure.ok()) failures.push_back(failure.message());
  }
  return failures;
}

Status Communicator::MakeBootstrap() {
  properties_ = NoProperties(nccl_);
  const ncclResult_t asked = nccl_.CommQueryProperties(bootstrap_.nccl_comm(), &properties_);
  JAXCOMM_RETURN_IF_ERROR(CheckNccl(nccl_, bootstrap_.nccl_comm(), "ncclCommQueryProperties", asked));
  device_ = properties_.cudaDev;
  comm_.world = {properties_.rank, properties_.nRanks, 0, 1};
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(device_)));
  return bootstrap_.Make(rank(), size());
}

Status Communicator::Make(const AllDoneFunction& all_done) {
  comm_.timeout_ns = static_cast<uint64_t>(settings_.timeout_s * 1e9);
  ScopedDevice keep;
  JAXCOMM_RETURN_IF_ERROR(all_done(kBegin, MakeBootstrap()));
  int num_sms = 0;
  Status ready =
      CheckCuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device_));
  if (ready.ok()) ready = CheckBulkCopies();
  if (ready.ok()) ready = LoadKernels();
  JAXCOMM_RETURN_IF_ERROR(bootstrap_.AllDone("when it loaded kernels", ready));
  JAXCOMM_RETURN_IF_ERROR(bootstrap_.CheckEqual("JAXCOMM_MAX_SMS", static_cast<uint64_t>(settings_.max_channels)));
  JAXCOMM_RETURN_IF_ERROR(bootstrap_.CheckEqual("JAXCOMM_SYMMETRIC_BUFFERS", settings_.symmetric_buffers ? 1 : 0));
  JAXCOMM_ASSIGN_OR_RETURN(const std::vector<uint64_t> sms, bootstrap_.AllGather(static_cast<uint64_t>(num_sms)));
  num_sms_ = static_cast<int64_t>(*std::min_element(sms.begin(), sms.end()));
  JAXCOMM_ASSIGN_OR_RETURN(const int32_t ranks_per_node,
                           FindRanksPerNode(bootstrap_, properties_, settings_.node_name));
  comm_.local = {rank() % ranks_per_node, ranks_per_node, rank() / ranks_per_node * ranks_per_node, 1};
  return MakeLane();
}

Status Communicator::MakeLane() {
  const LaneChannels channels = MaxChannels(num_sms_, settings_.max_channels);
  comm_.signals.num_channels = (asynchronous_ ? channels.asynchronous : channels.synchronous) + 1;
  JAXCOMM_RETURN_IF_ERROR(comm_.local.size == size() ? CheckWindows() : MakeGin());
  memory_.emplace(bootstrap_, comm_.local, properties_.multimemSupport);
  JAXCOMM_RETURN_IF_ERROR(bootstrap_.AllDone("when it made counters", MakeLocalMemory()));
  return MakeCounters();
}

Status Communicator::CheckWindows() {
  JAXCOMM_ASSIGN_OR_RETURN(const bool all_have,
                           bootstrap_.AllTrue(properties_.deviceApiSupport && properties_.nLsaTeams == 1));
  if (all_have) return OkStatus();
  return UnavailableError(
      "NCCL makes no windows on the memory of the group's GPUs: they can't address each other's memory, "
      "NCCL_WIN_ENABLE or NCCL_CUMEM_ENABLE is 0, or the driver is too old (see python -m jaxcomm.info "
      "--communicator); pass algorithm=\"xla\"");
}

Status Communicator::CheckBulkCopies() {
  if (!settings_.bulk_copy) return OkStatus();
  int major = 0, minor = 0, shared_bytes = 0;
  for (const auto& [attribute, value] :
       {std::pair{cudaDevAttrComputeCapabilityMajor, &major}, std::pair{cudaDevAttrComputeCapabilityMinor, &minor},
        std::pair{cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_bytes}}) {
    JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(value, attribute, device_)));
  }
  const int64_t needed_bytes = std::max(BulkSharedBytes(kPlanStages), SliceSharedBytes(kSliceThreads, kSliceStages));
  // Code for older GPUs also runs on newer ones.
  int ptx_version = 0;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("kernels", FindPtxVersion(&ptx_version)));
  bulk_copies_ = major >= 9 && shared_bytes >= needed_bytes && ptx_version >= 90;
  static std::once_flag warned;
  if (bulk_copies_) return OkStatus();
  std::call_once(warned, [&] {
    std::fprintf(stderr,
                 "jaxcomm: JAXCOMM_BULK_COPY=1 has no effect on GPU %d: compute capability %d.%d with %d bytes of "
                 "shared memory per thread block, code for %d.%d; bulk copies need 9.0 and %lld bytes\n",
                 device_, major, minor, shared_bytes, ptx_version / 10, ptx_version % 10,
                 static_cast<long long>(needed_bytes));
  });
  return OkStatus();
}

Status Communicator::LoadKernels() const {
  for (const cudaError_t loaded : {Load<RankArgs>(bulk_copies_ ? kPlanStages : BulkStages{}), Load<LlArgs>(),
                                   Load<RowArgs>(), Load<SliceArgs>(bulk_copies_ ? kSliceStages : BulkStages{}),
                                   Load<RouteAndDispatchArgs>(), Load<MultimemArgs>()}) {
    JAXCOMM_RETURN_IF_ERROR(CheckCuda("kernels", loaded));
  }
  return OkStatus();
}

Status Communicator::MakeLocalMemory() {
  const size_t counters_bytes =
      static_cast<size_t>(comm_.local.size) * sizeof(uint64_t) * static_cast<size_t>(comm_.signals.num_channels);
  const size_t epochs_bytes = static_cast<size_t>(max_channels()) * sizeof(uint64_t);
  const size_t all_bytes = 2 * counters_bytes + epochs_bytes + sizeof(uint64_t);
  void* host = nullptr;
  void* report = nullptr;
  char* counters = nullptr;
  JAXCOMM_RETURN_IF_ERROR(
      CheckCuda("cudaHostAlloc", cudaHostAlloc(&host, sizeof(device::Report), cudaHostAllocMapped)));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaHostGetDevicePointer", cudaHostGetDevicePointer(&report, host, 0)));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaMalloc", cudaMalloc(&counters, all_bytes)));
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaMemsetAsync", cudaMemsetAsync(counters, 0, all_bytes, bootstrap_.stream())));
  report_ = new (host) device::Report;
  comm_.report = static_cast<device::Report*>(report);
  comm_.signals.sent = reinterpret_cast<uint64_t*>(counters);
  comm_.signals.received = reinterpret_cast<uint64_t*>(counters + counters_bytes);
  comm_.ll_slots.epochs = reinterpret_cast<uint64_t*>(counters + 2 * counters_bytes);
  comm_.num_calls = reinterpret_cast<uint64_t*>(counters + 2 * counters_bytes + epochs_bytes);
  JAXCOMM_ASSIGN_OR_RETURN(comm_.abort_flag, AbortFlag(device_, settings_.timeout_s));
  return OkStatus();
}

// Signals, LL slots and the offset table have memory of their own, which does not move when the arena grows.
Status Communicator::MakeCounters() {
  device::LlSlots& slots = comm_.ll_slots;
  slots.num_channels = std::min(max_channels(), kLlChannels);
  slots.num_units = kLlUnits;
  const int64_t num_ranks = comm_.local.size;
  const int64_t slot_bytes = 2 * num_ranks * slots.num_channels * slots.num_units * int64_t{sizeof(uint64_t[2])};
  const int64_t pad_bytes = num_ranks * comm_.signals.num_channels * int64_t{sizeof(uint64_t)};
  const int64_t bytes = WholePages(slot_bytes + pad_bytes + OffsetTableBytes(comm_.local.size));
  JAXCOMM_ASSIGN_OR_RETURN(const device::Window allocated, memory_->Allocate("signals", bytes));
  JAXCOMM_RETURN_IF_ERROR(memory_->Clear(allocated, bytes));
  device::Window& pad = comm_.signals.pad;
  slots.pad = pad = allocated;
  pad.base += slot_bytes;
  offset_table_ = {pad.base + pad_bytes, pad.stride};
  return OkStatus();
}

// Makes GIN on all ranks, or all ranks get an error. The memory of a communicator that can't be made is never freed.
Status Communicator::MakeGin() {
  const auto all_done = [this](const char* at, const Status& own) {
    const std::string nodes = "the group's GPUs are of several nodes of " + std::to_string(comm_.local.size) +
                              " ranks, and there is no GIN between them: ";
    const Status status = bootstrap_.AllDone(at, own);
    if (status.ok() || !bootstrap_.Failure().ok()) return status;  // a failed exchange is not about GIN
    return Status(status.code(), nodes + status.message() +
                                     "; pass algorithm=\"xla\" or \"xla_hierarchical\", or call kernels of your own "
                                     "over the ranks of a node");
  };
  const auto bytes = static_cast<size_t>(Gin::CountBytes(comm_.signals.num_channels, size()));
  uint64_t* counts = nullptr;
  Status own = Gin::Problem(nccl_, properties_);
  // Names of nodes (JAXCOMM_NODE_ID) may divide NCCL's teams.
  if (own.ok() && (!properties_.deviceApiSupport || properties_.nLsaTeams * comm_.local.size != size())) {
    own = UnavailableError("its nodes are not NCCL's teams of ranks that address each other's memory");
  }
  const GinVersion* const gin = Gin::Find(nccl_.version);
  if (own.ok()) own = CheckCuda("kernels", gin->load(bulk_copies_ ? kPlanStages : BulkStages{}));
  if (own.ok()) own = CheckCuda("kernels", gin->load_rows());
  if (own.ok()) own = CheckCuda("cudaMalloc", cudaMalloc(&counts, bytes));
  if (own.ok()) own = CheckCuda("cudaMemsetAsync", cudaMemsetAsync(counts, 0, bytes, bootstrap_.stream()));
  // When this returns, all counts are zero.
  JAXCOMM_RETURN_IF_ERROR(all_done("when it prepared GIN", own));
  const auto made = std::make_shared<StatusOr<std::unique_ptr<Gin>>>(UnavailableError("not made"));
  const auto make = [made, nccl = &nccl_, nccl_comm = bootstrap_.nccl_comm(), comm = comm_, counts] {
    *made = Gin::Make(*nccl, nccl_comm, comm, counts,
                      [&](const char* name, ncclResult_t result) { return CheckNccl(*nccl, nccl_comm, name, result); });
    return ncclSuccess;
  };
  JAXCOMM_RETURN_IF_ERROR(bootstrap_.Call("ncclDevCommCreate", make));
  JAXCOMM_RETURN_IF_ERROR(all_done("when it made GIN", made->status()));
  gin_ = *std::move(*made);
  return OkStatus();
}

Status Communicator::Begin(cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(stream_mutex_);
  if (last_ != nullptr && last_stream_ != stream && !IsCaptured(stream)) {
    return CheckCuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream, last_, 0));
  }
  return OkStatus();
}

Status Communicator::End(cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(stream_mutex_);
  if (IsCaptured(stream)) return OkStatus();
  if (last_ == nullptr) {
    JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaEventCreate", cudaEventCreateWithFlags(&last_, cudaEventDisableTiming)));
  }
  last_stream_ = stream;
  return CheckCuda("cudaEventRecord", cudaEventRecord(last_, stream));
}

void Communicator::WaitForStarted(int device, cudaStream_t stream) {
  for (Communicator* const communicator : AllCommunicators()) {
    if (!communicator->asynchronous_ || communicator->device_ != device) continue;
    (void)communicator->Begin(stream);  // the caller has an error already
  }
}

Status Communicator::Reserve(int64_t bytes, device::Window* arena, int64_t* arena_bytes) {
  std::lock_guard<std::mutex> lock(bootstrap_.mutex);
  if (bytes > arena_bytes_ || arena_bytes_ == 0) {
    ScopedDevice keep;
    JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(device_)));
    // At least twice the last size: all old arenas, which old programs and CUDA graphs still use, then take no more
    // memory than the newest.
    const int64_t whole = WholePages(std::max({bytes, 2 * arena_bytes_, kLeastArenaBytes}));
    JAXCOMM_ASSIGN_OR_RETURN(arena_, memory_->Allocate("arena", whole));
    arena_bytes_ = whole;
  }
  *arena = arena_;
  *arena_bytes = arena_bytes_;
  return OkStatus();
}

Status Communicator::ReserveFor(const std::string& owner, int64_t bytes, device::Comm* comm) {
  std::lock_guard<std::mutex> lock(bootstrap_.mutex);
  Arena& arena = arenas_[owner];
  if (bytes > arena.bytes) {
    ScopedDevice keep;
    const std::string what = "arena of " + owner;
    Arena made;
    made.bytes = WholePages(std::max(bytes, 2 * arena.bytes));
    JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(device_)));
    JAXCOMM_ASSIGN_OR_RETURN(made.window, memory_->Allocate(what.c_str(), made.bytes, &made.multicast));
    JAXCOMM_RETURN_IF_ERROR(memory_->Clear(made.window, made.bytes));
    arena = made;
  }
  comm->arena = arena.window;
  comm->arena_multicast = arena.multicast;
  comm->arena_bytes = arena.bytes;
  return OkStatus();
}

ncclWindow_t Communicator::Registered(const device::Window& arena) {
  if (arena.base == nullptr) return nullptr;
  std::lock_guard<std::mutex> lock(bootstrap_.mutex);
  return memory_->Registered(arena);
}

StatusOr<int64_t> Communicator::PlaceOf(ncclWindow_t window) const {
  JAXCOMM_ASSIGN_OR_RETURN(const device::Window addressed, memory_->Address(window, 0));
  const int64_t stride = addressed.stride;
  if (size() > 1 && stride != comm_.signals.pad.stride) {
    return UnavailableError("XLA's window is " + std::to_string(stride) + " bytes apart from rank to rank, jaxcomm's " +
                            std::to_string(comm_.signals.pad.stride));
  }
  return PlaceOf(addressed);
}

int64_t Communicator::PlaceOf(const device::Window& arena) const {
  return arena.At(rank()) - comm_.signals.pad.At(rank());
}

void Communicator::AddToRecorder(uint64_t call_id, const CallSpec& spec, DType dtype, int64_t input_count,
                                 int64_t output_count) {
  recorded_calls_.Add(call_id, spec, settings_.process, device_, rank(), dtype, input_count, output_count);
}

void Communicator::RecordProgress() {
  for (Communicator* const communicator : AllCommunicators()) {
    const int32_t peer = communicator->recorded_calls_.Look(communicator->report_->progress);
    const bool waits = peer >= 0 && peer < communicator->size();
    if (waits && !FailureOf({communicator->bootstrap_.processes()[peer]}).ok()) communicator->AbortIfFailed();
  }
}

void Communicator::NoteFailure(uint64_t process, const std::string& why) {
  if (!SetFailed(process, why)) return;
  bool matters = false;
  for (Communicator* const communicator : AllCommunicators()) matters = communicator->AbortIfFailed() || matters;
  if (matters) std::fprintf(stderr, "jaxcomm: %s\n", why.c_str());
}

void Communicator::NoteOwnFailure(const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(GetShared().mutex);
    if (GetShared().own_failure.ok()) GetShared().own_failure = UnavailableError(why);
  }
  NoteFailure(Incarnation(), "process " + std::to_string(Configured().process) + " failed: " + why);
}

Status Communicator::OwnFailure() {
  JAXCOMM_RETURN_IF_ERROR(FirstFailure());
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  return GetShared().own_failure;
}

bool Communicator::AbortIfFailed() {
  const Status failed = FailureOf(bootstrap_.processes());
  if (failed.ok()) return false;
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (abort_reason_.ok()) abort_reason_ = failed;
  __atomic_store_n(&report_->abort, 1, __ATOMIC_RELEASE);
  return true;
}

Status Communicator::Failure() {
  JAXCOMM_RETURN_IF_ERROR(KernelFailure());
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    JAXCOMM_RETURN_IF_ERROR(abort_reason_);
  }
  return bootstrap_.Failure();
}

Status Communicator::CheckUsable() {
  JAXCOMM_RETURN_IF_ERROR(FirstFailure());
  return Failure();
}

Status Communicator::KernelFailure(uint64_t* time_ns) {
  if (__atomic_load_n(&report_->state, __ATOMIC_ACQUIRE) != device::Report::kComplete) return OkStatus();
  if (time_ns != nullptr) *time_ns = report_->time_ns;
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failure_.ok()) {
    const std::string call = CallName::Of(report_->call_id);
    failure_ =
        DeadlineExceededError(report_->by_host ? call + ": rank " + std::to_string(report_->rank) + " aborted " +
                                                     PhaseText(report_->step) + ", where it waited for rank " +
                                                     std::to_string(report_->peer) + ": " + abort_reason_.message()
                                               : FailureText(*report_, call, settings_.timeout_s));
  }
  return failure_;
}

}  // namespace jaxcomm::cuda
