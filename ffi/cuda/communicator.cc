#include "communicator.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <utility>

#include "../common/hash.h"
#include "deadline.h"
#include "keep_device.h"
#include "launch.h"
#include "locate.cuh"

namespace jaxcomm {
namespace cuda {
namespace {

// What ncclMemAlloc gives is of whole pages of this size on all GPUs so far; windows are of all of it.
constexpr int64_t kPageBytes = 2 << 20;
int64_t WholePages(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }
// Small enough for the memory that XLA leaves to others, large enough for most calls of a model.
constexpr int64_t kLeastArenaBytes = 32 << 20;

struct Shared {
  std::mutex mutex;
  double timeout_s = 30;
  int32_t max_channels = 32;
  uint64_t node_name = 0;
  std::vector<std::string> calls;  // by Comm::program
  std::vector<Communicator*> communicators;
};

Shared& GetShared() {
  static auto* shared = new Shared;
  return *shared;
}

bool CheckCuda(const char* name, cudaError_t status, std::string* error) {
  if (status == cudaSuccess) return true;
  cudaGetLastError();  // or the next call of somebody else would report it
  *error = std::string(name) + ": " + cudaGetErrorString(status);
  return false;
}

}  // namespace

void Communicator::Configure(double timeout_s, int32_t max_channels, const std::string& node_id) {
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  GetShared().timeout_s = timeout_s;
  GetShared().max_channels = max_channels;
  GetShared().node_name = node_id.empty() ? 0 : Mix(1, std::string_view(node_id));
}

int32_t Communicator::ConfiguredChannels() {
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  return GetShared().max_channels;
}

double Communicator::ConfiguredTimeout() {
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  return GetShared().timeout_s;
}

uint64_t Communicator::AddCall(const std::string& text) {
  std::lock_guard<std::mutex> lock(GetShared().mutex);
  GetShared().calls.push_back(text);
  return GetShared().calls.size() - 1;
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
      known = new Communicator(*nccl, nccl_comm);
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

std::vector<std::string> Communicator::Failures() {
  std::vector<Communicator*> communicators;
  {
    std::lock_guard<std::mutex> lock(GetShared().mutex);
    communicators = GetShared().communicators;
  }
  std::vector<std::string> failures;
  for (Communicator* const communicator : communicators) {
    if (std::string failure = communicator->Failure(); !failure.empty()) failures.push_back(std::move(failure));
  }
  return failures;
}

bool Communicator::Make(std::string* error) {
  int32_t max_channels;
  {
    std::lock_guard<std::mutex> lock(GetShared().mutex);
    timeout_s_ = GetShared().timeout_s;
    max_channels = GetShared().max_channels;
    node_name_ = GetShared().node_name;
  }
  comm_.timeout_ns = static_cast<uint64_t>(timeout_s_ * 1e9);
  comm_.signals.num_channels = max_channels + 1;
  if (!QueryProperties(error)) return false;
  KeepDevice keep;
  if (!CheckCuda("cudaSetDevice", cudaSetDevice(device_), error)) return false;
  int num_sms = 0;
  if (!CheckCuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device_),
                 error)) {
    return false;
  }
  if (max_channels > num_sms) {
    *error = "JAXCOMM_MAX_SMS is " + std::to_string(max_channels) + ", but GPU " + std::to_string(device_) + " has " +
             std::to_string(num_sms) + " SMs";
    return false;
  }
  if (!CheckCuda("kernels", LoadKernel(), error) || !CheckCuda("kernels", LoadFlaggedKernel(), error) ||
      !MakeExchange(error) || !Agree("JAXCOMM_MAX_SMS", static_cast<uint64_t>(max_channels), error) ||
      !FindNodes(error) || !MakeLocalMemory(error) || !MakeCounters(error)) {
    return false;
  }
  if (comm_.local.size == size()) return true;
  if (all_gin_) return MakeGin(error);
  ncclComm_t network = nullptr;
  // Kernels that wait for their node must leave room for NCCL's, or no rank comes any further.
  constexpr int32_t kSmsOfNccl = 34;
  if (max_channels + kSmsOfNccl > num_sms) {
    *error = "JAXCOMM_MAX_SMS is " + std::to_string(max_channels) + ", but between nodes " +
             std::to_string(kSmsOfNccl) + " of the " + std::to_string(num_sms) + " SMs of GPU " +
             std::to_string(device_) + " must be left to NCCL";
    return false;
  }
  // Everybody again: what goes between nodes must not meet what XLA sends on its communicator.
  if (!MakePart(0, size(), &network, error)) return false;
  messenger_ = Messenger::Make(nccl_, network, comm_, report_, timeout_s_, error);
  return messenger_ != nullptr;
}

bool Communicator::QueryProperties(std::string* error) {
  for (const char* name : {"ncclMemAlloc", "ncclMemFree", "ncclCommWindowRegister", "ncclCommQueryProperties",
                           "ncclGetLsaDevicePointer"}) {
    *error = nccl_.WhyNot(name);
    if (!error->empty()) return false;
  }
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  if (!Check("ncclCommQueryProperties", nccl_.CommQueryProperties(nccl_comm_, &properties), error)) return false;
  device_ = properties.cudaDev;
  multimem_ = properties.multimemSupport && nccl_.GetLsaMultimemDevicePointer != nullptr;
  has_windows_ = properties.deviceApiSupport;
  num_lsa_teams_ = properties.nLsaTeams;
  can_gin_ = Gin::Usable(nccl_, properties);
  comm_.world = {properties.rank, properties.nRanks, 0, 1};
  return true;
}

// NCCL knows which ranks address each other's memory: it makes teams of equal size of ranks that follow each other. But
// a communicator of several teams has windows only if the network allows GIN. If kernels can't use that, each node gets
// a communicator of its own.
bool Communicator::FindNodes(std::string* error) {
  std::vector<uint64_t> names;
  if (!Exchange(node_name_, &names, error)) return false;
  const int32_t team_size = size() / num_lsa_teams_;
  const auto node_of = [&](int32_t r) { return std::pair(names[r], r / team_size); };
  std::vector<int32_t> lengths;
  for (int32_t r = 0; r < size(); ++r) {
    if (r == 0 || node_of(r) != node_of(r - 1)) lengths.push_back(0);
    ++lengths.back();
  }
  // As on CPUs: where names make uneven nodes, every rank is one.
  const bool even = std::all_of(lengths.begin(), lengths.end(), [&](int32_t length) { return length == lengths[0]; });
  const int32_t ranks_per_node = even ? lengths[0] : 1;
  if (has_windows_ && num_lsa_teams_ > 1 && ranks_per_node == team_size) {
    if (!AllCan(can_gin_, &all_gin_, error)) return false;
    if (all_gin_) {
      comm_.local = {rank() % team_size, team_size, rank() / team_size * team_size, 1};
      node_comm_ = nccl_comm_;
      return true;
    }
  }
  bool connected = false;
  if (!SplitNodes(ranks_per_node, &connected, error)) return false;
  // GPUs of one host that can't address each other: all that they exchange goes the long way.
  if (!connected && ranks_per_node > 1 && !SplitNodes(1, &connected, error)) return false;
  if (connected) return true;
  *error =
      "GPUs of the group have no windows, not even on their own memory: NCCL_WIN_ENABLE or NCCL_CUMEM_ENABLE is 0, or "
      "the driver is too old (see python -m jaxcomm.info --communicator)";
  return false;
}

// `connected`: all nodes are, on all ranks.
bool Communicator::SplitNodes(int32_t ranks_per_node, bool* connected, std::string* error) {
  comm_.local = {rank() % ranks_per_node, ranks_per_node, rank() / ranks_per_node * ranks_per_node, 1};
  node_comm_ = nccl_comm_;
  bool own = has_windows_ && num_lsa_teams_ == 1;
  if (ranks_per_node < size()) {
    if (!MakePart(comm_.local.first, ranks_per_node, &node_comm_, error)) return false;
    ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
    if (!Check("ncclCommQueryProperties", nccl_.CommQueryProperties(node_comm_, &properties), error)) return false;
    own = properties.deviceApiSupport && properties.nLsaTeams == 1;
  }
  return AllCan(own, connected, error);
}

bool Communicator::AllCan(bool own, bool* all, std::string* error) {
  std::vector<uint64_t> answers;
  if (!Exchange(own ? 1 : 0, &answers, error)) return false;
  *all = std::find(answers.begin(), answers.end(), 0) == answers.end();
  return true;
}

// A communicator of the `count` ranks from `first` on, this one among them; other ranks make others at the same time.
// Not by ncclCommSplit: XLA's communicator shares what it has with those that are split from it, also the word that
// aborts it (splitShare). Blocking: all ranks have met just before.
bool Communicator::MakePart(int32_t first, int32_t count, ncclComm_t* part, std::string* error) {
  ncclUniqueId key = {};
  bool all_can =
      nccl_.WhyNot("ncclCommInitRankConfig").empty() && (rank() != first || nccl_.GetUniqueId(&key) == ncclSuccess);
  if (!AllCan(all_can, &all_can, error)) return false;
  if (!all_can) {
    *error = "ncclGetUniqueId or ncclCommInitRankConfig: failed, or missing, on a rank of the group";
    return false;
  }
  uint64_t words[sizeof key / sizeof(uint64_t)];
  std::memcpy(words, &key, sizeof words);
  for (uint64_t& word : words) {
    std::vector<uint64_t> of_ranks;
    if (!Exchange(word, &of_ranks, error)) return false;
    word = of_ranks[static_cast<size_t>(first)];
  }
  std::memcpy(&key, words, sizeof words);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  return Check("ncclCommInitRankConfig", nccl_.CommInitRankConfig(part, count, key, rank() - first, &config), error);
}

bool Communicator::MakeExchange(std::string* error) {
  const size_t words_bytes = static_cast<size_t>(size()) * sizeof(uint64_t);
  void* host = nullptr;
  if (!CheckCuda("cudaStreamCreate", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), error) ||
      !CheckCuda("cudaHostAlloc", cudaHostAlloc(&host, words_bytes, cudaHostAllocMapped), error) ||
      !CheckCuda("cudaMalloc", cudaMalloc(&exchanged_, words_bytes + sizeof(uint64_t)), error)) {
    return false;
  }
  exchanged_on_host_ = static_cast<uint64_t*>(host);
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
      !CheckCuda("cudaMemsetAsync", cudaMemsetAsync(counters, 0, 2 * counters_bytes + epochs_bytes, stream_), error)) {
    return false;
  }
  report_ = new (host) device::Report;
  comm_.report = static_cast<device::Report*>(report);
  comm_.signals.sent = reinterpret_cast<uint64_t*>(counters);
  comm_.signals.received = reinterpret_cast<uint64_t*>(counters + counters_bytes);
  comm_.slots.epochs = reinterpret_cast<uint64_t*>(counters + 2 * counters_bytes);
  return true;
}

// Signals, slots and mail have memory of their own, which stays where it is when the arena grows.
bool Communicator::MakeCounters(std::string* error) {
  device::Slots& slots = comm_.slots;
  slots.num_channels = std::min(max_channels(), kFlaggedChannels);
  slots.num_units = kFlaggedUnits;
  const int64_t num_ranks = comm_.local.size;
  const int64_t slot_bytes = 2 * num_ranks * slots.num_channels * slots.num_units * int64_t{sizeof(uint64_t[2])};
  const int64_t pad_bytes = num_ranks * comm_.signals.num_channels * int64_t{sizeof(uint64_t)};
  const int64_t bytes = WholePages(slot_bytes + pad_bytes + MailBytes(comm_.local.size));
  device::Window& pad = comm_.signals.pad;
  if (!Allocate("signals", bytes, &pad, error) || !Clear("signals", pad, bytes, error)) return false;
  slots.pad = pad;
  pad.base += slot_bytes;
  mail_ = {pad.base + pad_bytes, pad.stride};
  return true;
}

// When this returns, the window is zero at all ranks, and no kernel that uses it can have been launched before.
bool Communicator::Clear(const char* what, const device::Window& window, int64_t bytes, std::string* error) {
  return CheckCuda("cudaMemsetAsync",
                   cudaMemsetAsync(window.At(comm_.local.rank), 0, static_cast<size_t>(bytes), stream_), error) &&
         Agree(what, static_cast<uint64_t>(bytes), error);
}

bool Communicator::IsSameOnAllRanks(const char* what, uint64_t own, std::string* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  KeepDevice keep;
  return CheckCuda("cudaSetDevice", cudaSetDevice(device_), error) && Agree(what, own, error);
}

bool Communicator::MakeGin(std::string* error) {
  const auto bytes = static_cast<size_t>(Gin::CountBytes(comm_.signals.num_channels, size()));
  uint64_t* counts = nullptr;
  if (!CheckCuda("kernels", LoadGinKernel(), error) || !CheckCuda("cudaMalloc", cudaMalloc(&counts, bytes), error) ||
      !CheckCuda("cudaMemsetAsync", cudaMemsetAsync(counts, 0, bytes, stream_), error)) {
    return false;
  }
  const auto check = [this](const char* name, ncclResult_t result, std::string* problem) {
    return Check(name, result, problem);
  };
  gin_ = Gin::Make(nccl_, nccl_comm_, comm_, counts, check, error);
  // After this, all counts are zero.
  return gin_ != nullptr && Agree("counts of GIN", bytes, error);
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
    KeepDevice keep;
    if (!CheckCuda("cudaSetDevice", cudaSetDevice(device_), error)) return false;
    // Twice as much as the last: what old programs and CUDA graphs still use is never more than what the newest has.
    const int64_t whole = WholePages(std::max({bytes, 2 * arena_bytes_, kLeastArenaBytes}));
    device::Window window;
    if (!Allocate("arena", whole, &window, error)) return false;
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
    KeepDevice keep;
    const std::string what = "arena of " + owner;
    Arena made;
    made.bytes = WholePages(std::max(bytes, 2 * arena.bytes));
    if (!CheckCuda("cudaSetDevice", cudaSetDevice(device_), error) ||
        !Allocate(what.c_str(), made.bytes, &made.window, error, &made.multicast) ||
        !Clear(what.c_str(), made.window, made.bytes, error)) {
      return false;
    }
    arena = made;
  }
  comm->arena = arena.window;
  comm->arena_multicast = arena.multicast;
  comm->arena_bytes = arena.bytes;
  return true;
}

// A rank that has no memory says so, or the others would wait for it without end when they register theirs.
bool Communicator::Allocate(const char* what, int64_t bytes, device::Window* window, std::string* error,
                            device::Multicast* multicast) {
  void* memory = nullptr;
  std::string problem;
  if (!Check("ncclMemAlloc", nccl_.MemAlloc(&memory, static_cast<size_t>(bytes)), &problem)) memory = nullptr;
  std::vector<uint64_t> all;
  if (!Exchange(memory != nullptr ? static_cast<uint64_t>(bytes) : 0, &all, error)) return false;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == static_cast<uint64_t>(bytes)) continue;
    *error = "rank " + std::to_string(r) + " of the group " +
             (all[r] == 0 ? "has no " + std::to_string(bytes) + " bytes of GPU memory left for the " + what +
                                "; leave it some, for instance with XLA_PYTHON_CLIENT_MEM_FRACTION"
                          : "wants " + std::to_string(all[r]) + " bytes for the " + what + ", this one " +
                                std::to_string(bytes) + ": their programs differ");
    if (!problem.empty()) *error += " (" + problem + ")";
    if (memory != nullptr) nccl_.MemFree(memory);
    return false;
  }
  ncclWindow_t registered = nullptr;
  if (Check("ncclCommWindowRegister",
            nccl_.CommWindowRegister(node_comm_, memory, static_cast<size_t>(bytes), &registered,
                                     NCCL_WIN_COLL_SYMMETRIC),
            error) &&
      registered == nullptr) {
    *error = "NCCL gave no window for the " + std::string(what) +
             ": the group's GPUs can't address each other's memory (see python -m jaxcomm.info --communicator)";
  }
  if (registered == nullptr) {
    nccl_.MemFree(memory);
    return false;
  }
  if (!Address(registered, 0, window, error)) return false;
  registered_[window->base] = registered;
  return multicast == nullptr || FindMulticast(registered, multicast, error);
}

bool Communicator::Address(ncclWindow_t registered, int64_t offset, device::Window* window, std::string* error) const {
  std::vector<char*> addresses;
  for (int32_t r = 0; r < comm_.local.size; ++r) {
    void* address = nullptr;
    if (!Check("ncclGetLsaDevicePointer",
               nccl_.GetLsaDevicePointer(registered, static_cast<size_t>(offset), r, &address), error)) {
      return false;
    }
    addresses.push_back(static_cast<char*>(address));
  }
  return MakeWindow(addresses, window, error);
}

ncclWindow_t Communicator::Registered(const device::Window& arena) {
  std::lock_guard<std::mutex> lock(mutex_);
  return registered_.at(arena.base);
}

// Null unless all ranks have an address.
bool Communicator::FindMulticast(ncclWindow_t registered, device::Multicast* multicast, std::string* error) {
  if (!multimem_) return true;
  void* address = nullptr;
  std::string problem;
  if (!Check("ncclGetLsaMultimemDevicePointer", nccl_.GetLsaMultimemDevicePointer(registered, 0, &address), &problem)) {
    address = nullptr;
  }
  std::vector<uint64_t> all;
  if (!Exchange(address != nullptr ? 1 : 0, &all, error)) return false;
  if (std::count(all.begin(), all.end(), 1) == size()) multicast->base = static_cast<char*>(address);
  return true;
}

// What NCCL says of peers is right only if their buffers lie as far from the begin of their windows as this rank's: it
// is looked at for the distance between ranks, nothing else.
bool Communicator::Locate(ncclWindow_t window, int64_t offset, int64_t* location, std::string* error) const {
  device::Window addressed;
  if (!Address(window, offset, &addressed, error)) return false;
  if (size() > 1 && addressed.stride != comm_.signals.pad.stride) {
    *error = "XLA's window is " + std::to_string(addressed.stride) + " bytes apart from rank to rank, jaxcomm's " +
             std::to_string(comm_.signals.pad.stride);
    return false;
  }
  *location = Locate(addressed, 0);
  return true;
}

int64_t Communicator::Locate(const device::Window& arena, int64_t offset) const {
  return arena.At(rank(), offset) - comm_.signals.pad.At(rank());
}

// By NCCL rather than by signals of our own, which this is there to set up.
bool Communicator::Exchange(uint64_t own, std::vector<uint64_t>* all, std::string* error) {
  const size_t bytes = static_cast<size_t>(size()) * sizeof own;
  if (!CheckCuda("cudaMemcpyAsync", cudaMemcpyAsync(exchanged_, &own, sizeof own, cudaMemcpyHostToDevice, stream_),
                 error) ||
      !Check("ncclAllGather", nccl_.AllGather(exchanged_, exchanged_ + 1, 1, ncclUint64, nccl_comm_, stream_), error) ||
      !CheckCuda("cudaMemcpyAsync",
                 cudaMemcpyAsync(exchanged_on_host_, exchanged_ + 1, bytes, cudaMemcpyDeviceToHost, stream_), error) ||
      !WaitForStream(error)) {
    return false;
  }
  all->assign(exchanged_on_host_, exchanged_on_host_ + size());
  return true;
}

bool Communicator::Agree(const char* what, uint64_t own, std::string* error) {
  std::vector<uint64_t> all;
  if (!Exchange(own, &all, error)) return false;
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == own) continue;
    *error = std::string(what) + " must be the same on all ranks, but is " + std::to_string(all[r]) + " on rank " +
             std::to_string(r) + " and " + std::to_string(own) + " on rank " + std::to_string(rank());
    return false;
  }
  return true;
}

bool Communicator::WaitForStream(std::string* error) {
  const Deadline deadline(timeout_s_);
  for (;;) {
    const cudaError_t status = cudaStreamQuery(stream_);
    if (status != cudaErrorNotReady) return CheckCuda("cudaStreamQuery", status, error);
    if (!deadline.Wait()) {
      *error = "the other ranks of the group of " + std::to_string(size()) + " did not come within " +
               TimeoutText(timeout_s_);
      return false;
    }
  }
}

// XLA may have made the communicator non-blocking: then a call is over when NCCL says so.
bool Communicator::Check(const char* name, ncclResult_t result, std::string* error) const {
  const Deadline deadline(timeout_s_);
  while (result == ncclInProgress) {
    if (const ncclResult_t asked = nccl_.CommGetAsyncError(nccl_comm_, &result); asked != ncclSuccess) result = asked;
    if (result == ncclInProgress && !deadline.Wait()) {
      *error = std::string(name) + " was not over within " + TimeoutText(timeout_s_);
      return false;
    }
  }
  if (result == ncclSuccess) return true;
  cudaGetLastError();  // as in CheckCuda
  *error = std::string(name) + ": " + nccl_.GetErrorString(result);
  if (nccl_.GetLastError) {
    if (const char* more = nccl_.GetLastError(nccl_comm_); more && *more) *error += std::string(" (") + more + ")";
  }
  return false;
}

std::string Communicator::Failure() {
  const bool reported = __atomic_load_n(&report_->state, __ATOMIC_ACQUIRE) == device::Report::kComplete;
  uint64_t call = 0;
  std::string of_messages;
  if (messenger_ && !reported) of_messages = messenger_->Failure(&call);
  if (!reported && of_messages.empty()) return "";
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty()) {
    if (reported) call = report_->program;
    std::string name = "a call";
    {
      std::lock_guard<std::mutex> shared_lock(GetShared().mutex);
      const std::vector<std::string>& calls = GetShared().calls;
      if (call < calls.size()) name = calls[call];
    }
    failure_ = reported ? FailureText(*report_, name, timeout_s_) : name + ": " + of_messages;
  }
  return failure_;
}

}  // namespace cuda
}  // namespace jaxcomm
