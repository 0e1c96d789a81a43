#include "recorder/recorder.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <new>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#include "common/dtype.h"
#include "common/hash.h"

namespace jaxcomm {
namespace {

constexpr auto kAliveEvery = std::chrono::milliseconds(100);
// How many open calls a new one may skip in the ring.
constexpr int kMaxSkipped = 64;

uint64_t Nanoseconds(Recorder::Clock::time_point time) {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
}

uint64_t UnixNow() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

template <size_t size>
void Copy(char (&to)[size], const std::string& text) {
  const size_t length = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), length);
  to[length] = 0;
}

// Field 22 of /proc/self/stat.
int64_t StartTicks() {
  std::ifstream file("/proc/self/stat");
  std::string text;
  std::getline(file, text);
  const size_t end = text.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream fields(text.substr(end + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  return std::atoll(field.c_str());
}

// Numbers in their order: 0 1 2 3 8 as "0-3,8".
std::string Ranges(const std::vector<int64_t>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    text += (text.empty() ? "" : ",") + std::to_string(numbers[i]);
    if (end - i > 1) text += "-" + std::to_string(numbers[end - 1]);
    i = end;
  }
  return text;
}

// Numbers in their order: 0 0 1 as "0*2,1*1".
std::string Repetitions(const std::vector<int32_t>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[i]) ++end;
    text += (text.empty() ? "" : ",") + std::to_string(numbers[i]) + "*" + std::to_string(end - i);
    i = end;
  }
  return text;
}

void Add(Number64& number, uint64_t value) {
  number.store(number.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

}  // namespace

void CallRecord::Started(uint64_t key) const {
  if (!Valid()) return;
  Store(call_->key, key);
  Store(call_->started_ns, Recorder::Get().NowNs(Load(call_->arrived_ns)));
  SetPhase(CallPhase::kEntryBarrier);
}

void CallRecord::Running() const {
  if (!Valid()) return;
  Store(call_->running_ns, Recorder::Get().NowNs(Load(call_->started_ns)));
  SetPhase(CallPhase::kRunning);
}

void CallRecord::Waits(int64_t rank, int64_t peer) const {
  if (!Valid()) return;
  call_->waiting_rank.store(static_cast<uint32_t>(rank + 1), std::memory_order_relaxed);
  call_->waiting_peer.store(static_cast<uint32_t>(peer + 1), std::memory_order_relaxed);
}

void CallRecord::End(bool ok, bool counts) const {
  if (!Valid()) return;
  Recorder& recorder = Recorder::Get();
  const uint64_t now = recorder.NowNs(std::max(Load(call_->started_ns), Load(call_->running_ns)));
  Store(call_->ended_ns, now);
  if (counts) recorder.Count(*call_, now, ok);
  // Last: from now on, another call may take the row.
  call_->phase.store(static_cast<uint32_t>(ok ? CallPhase::kDone : CallPhase::kFailed), std::memory_order_release);
}

namespace {

Recorder*& Instance() {
  static auto* recorder = new Recorder;
  return recorder;
}

}  // namespace

Recorder& Recorder::Get() { return *Instance(); }

void Recorder::Use(Recorder* recorder) { Instance() = recorder; }

Status Recorder::Start(const std::string& path, int64_t num_calls, const RecorderOwner& owner) {
  if (started()) return InvalidArgumentError("the recorder has started already");
  const auto failed = [&](const char* what, int error) {
    return UnavailableError("the flight recorder cannot " + std::string(what) + " " + path + ": " +
                            std::strerror(error) + "; nothing is recorded. JAXCOMM_RECORDER names its folder");
  };
  const RecorderOffsets at(num_calls);
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return failed("create", errno);
  // Reserves the space: a store to a page that the disk has no space for would end the process.
  if (const int error = posix_fallocate(fd, 0, at.file_bytes); error != 0) {
    close(fd);
    unlink(path.c_str());
    return failed("allocate", error);
  }
  void* mapped =
      mmap(nullptr, static_cast<size_t>(at.file_bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  const int error = errno;
  close(fd);
  if (mapped == MAP_FAILED) {
    unlink(path.c_str());
    return failed("map", error);
  }
  auto* header = new (mapped) RecorderHeader;
  header->header_bytes = sizeof(RecorderHeader);
  Copy(header->layout, Layout(num_calls));
  header->pid = getpid();
  header->process_start_ticks = StartTicks();
  header->process = owner.process;
  header->num_processes = owner.num_processes;
  header->started_ns = FastClock::SystemNs();
  header->started_unix_ns = UnixNow();
  gethostname(header->host, sizeof(header->host) - 1);
  Copy(header->kernel, owner.kernel);
  Copy(header->version_text, owner.version);
  Copy(header->node, owner.node);
  Copy(header->job, owner.job);
  header->alive_ns.store(header->started_ns);
  header->alive_unix_ns.store(header->started_unix_ns);
  auto* const calls = reinterpret_cast<RecordedCall*>(static_cast<char*>(mapped) + at.calls);
  for (int64_t i = 0; i < num_calls; ++i) calls[i].phase.store(static_cast<uint32_t>(CallPhase::kDone));  // free
  num_calls_ = num_calls;
  at_ = at;
  path_ = path;
  file_.store(static_cast<char*>(mapped), std::memory_order_release);
  std::thread([this] { LiveForever(); }).detach();
  return OkStatus();
}

void Recorder::LiveForever() {
  for (;; std::this_thread::sleep_for(kAliveEvery)) {
    header().alive_unix_ns.store(UnixNow(), std::memory_order_relaxed);
    header().alive_ns.store(FastClock::SystemNs(), std::memory_order_relaxed);
    clock_.Compare();
    if (trigger_wanted_.exchange(false)) {
      const std::string trigger = path_.substr(0, path_.rfind('/')) + "/trigger";
      const int fd = open(trigger.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
      if (fd >= 0) {
        futimens(fd, nullptr);
        close(fd);
      }
    }
    if (dump_wanted_.exchange(false)) {
      const Status dumped = Dump(path_ + ".dump");
      if (!dumped.ok()) std::fprintf(stderr, "warning: jaxcomm: %s\n", dumped.message().c_str());
    }
  }
}

// With mutex_ held. False: no space is left.
bool Recorder::AddText(const std::string& text, Number64& at, Number64& bytes) {
  const uint64_t used = header().text_bytes.load(std::memory_order_relaxed);
  if (used + text.size() > kMaxTextBytes) return false;
  std::memcpy(Table<char>(at_.texts) + used, text.data(), text.size());
  at.store(used, std::memory_order_relaxed);
  bytes.store(text.size(), std::memory_order_relaxed);
  header().text_bytes.store(used + text.size(), std::memory_order_release);
  return true;
}

// With mutex_ held. The index of the group, or -1 if the table is full.
int64_t Recorder::GroupOf(uint64_t hash, const std::vector<int64_t>& ranks, const std::vector<int32_t>& processes) {
  if (const auto found = groups_.find(hash); found != groups_.end()) return found->second;
  const auto index = static_cast<int64_t>(groups_.size());
  if (index == kMaxRecordedGroups) return -1;
  RecordedGroup& group = Table<RecordedGroup>(at_.groups)[index];
  if (!AddText(Ranges(ranks), group.ranks, group.ranks_bytes) ||
      !AddText(Repetitions(processes), group.processes, group.processes_bytes)) {
    return -1;
  }
  group.hash.store(hash, std::memory_order_relaxed);
  groups_.emplace(hash, index);
  header().num_groups.store(groups_.size(), std::memory_order_release);
  return index;
}

uint32_t Recorder::AddSite(const std::string& site, const std::string& algorithm, uint64_t identity,
                           uint64_t group_hash, const std::vector<int64_t>& ranks,
                           const std::vector<int32_t>& processes) {
  if (!started()) return kNoSite;
  const uint64_t hash = Mix(Mix(Mix(Mix(identity, group_hash), site), algorithm), ranks.size());
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = sites_.find(hash); found != sites_.end()) return found->second;
  const uint64_t index = header().num_sites.load(std::memory_order_relaxed);
  if (index == kMaxRecordedSites) return kNoSite;
  const int64_t group = GroupOf(group_hash, ranks, processes);
  RecordedSite& row = Table<RecordedSite>(at_.sites)[index];
  if (group < 0 || !AddText(site, row.text, row.text_bytes) ||
      !AddText(algorithm, row.algorithm, row.algorithm_bytes)) {
    return kNoSite;
  }
  row.identity.store(identity, std::memory_order_relaxed);
  row.group.store(static_cast<uint64_t>(group), std::memory_order_relaxed);
  sites_.emplace(hash, static_cast<uint32_t>(index));
  header().num_sites.store(index + 1, std::memory_order_release);
  return static_cast<uint32_t>(index);
}

void Recorder::SetAlgorithm(uint32_t site, const std::string& algorithm) {
  if (site == kNoSite) return;
  std::lock_guard<std::mutex> lock(mutex_);
  RecordedSite& row = Table<RecordedSite>(at_.sites)[site];
  const std::string_view known(Table<char>(at_.texts) + row.algorithm.load(), row.algorithm_bytes.load());
  if (known != algorithm) AddText(algorithm, row.algorithm, row.algorithm_bytes);
}

CallRecord Recorder::Begin(uint32_t site, int64_t run_id, int64_t iteration, uint32_t dtype, int64_t input_count,
                           int64_t output_count, Clock::time_point arrived, uint64_t sequence) {
  if (site == kNoSite || paused_.load(std::memory_order_relaxed)) return {};
  RecordedCall* call = nullptr;
  uint64_t number = 0;
  for (int skipped = 0; skipped <= kMaxSkipped; ++skipped) {
    number = header().num_calls.fetch_add(1, std::memory_order_relaxed) + 1;
    call = Table<RecordedCall>(at_.calls) + (number - 1) % static_cast<uint64_t>(num_calls_);
    // Takes the row, unless its call is open: one of two threads, if one was interrupted while the other went round.
    uint32_t phase = call->phase.load(std::memory_order_relaxed);
    if (phase < static_cast<uint32_t>(CallPhase::kDone)) continue;
    if (call->phase.compare_exchange_strong(phase, static_cast<uint32_t>(CallPhase::kArriving),
                                            std::memory_order_acquire)) {
      break;
    }
  }
  const auto store = [](Number64& field, uint64_t value) { field.store(value, std::memory_order_relaxed); };
  const RecordedSite& row = Table<RecordedSite>(at_.sites)[site];
  Number64& latest = Table<RecordedGroup>(at_.groups)[row.group.load(std::memory_order_relaxed)].next_sequence;
  store(call->number, 0);  // readers skip the row
  store(call->key, 0);
  store(call->run_id, static_cast<uint64_t>(run_id));
  store(call->iteration, static_cast<uint64_t>(iteration));
  if (sequence != 0) {
    store(latest, sequence);
  } else {
    sequence = latest.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  store(call->sequence, sequence);
  store(call->input_count, static_cast<uint64_t>(input_count));
  store(call->output_count, static_cast<uint64_t>(output_count));
  store(call->arrived_ns, Nanoseconds(arrived));
  store(call->started_ns, 0);
  store(call->running_ns, 0);
  store(call->ended_ns, 0);
  store(call->arrived_mask, 0);
  call->site.store(site, std::memory_order_relaxed);
  call->dtype.store(dtype, std::memory_order_relaxed);
  call->phase.store(static_cast<uint32_t>(CallPhase::kArriving), std::memory_order_relaxed);
  call->waiting_rank.store(0, std::memory_order_relaxed);
  call->waiting_peer.store(0, std::memory_order_relaxed);
  call->number.store(number, std::memory_order_release);
  return {call, number};
}

// Not atomic additions: calls of one site and group end one after the other (CallRecord::End).
void Recorder::Count(const RecordedCall& call, uint64_t now, bool ok) {
  RecordedSite& site = Table<RecordedSite>(at_.sites)[call.site.load(std::memory_order_relaxed)];
  const uint64_t arrived = call.arrived_ns.load(std::memory_order_relaxed);
  const uint64_t started = call.started_ns.load(std::memory_order_relaxed);
  const uint64_t running = call.running_ns.load(std::memory_order_relaxed);
  Add(ok ? site.calls : site.failed, 1);
  if (!ok) return;
  const auto dtype = static_cast<DType>(call.dtype.load(std::memory_order_relaxed));
  Add(site.bytes, call.input_count.load(std::memory_order_relaxed) * static_cast<uint64_t>(ItemBytes(dtype)));
  Add(site.time_ns, now - arrived);
  Add(site.waiting_ns, std::max(started, running) - arrived);
}

void Recorder::AddError(int64_t run_id, const std::string& text) {
  if (!started()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t number = header().num_errors.load(std::memory_order_relaxed);
    RecordedError& error = Table<RecordedError>(at_.errors)[number % kNumRecordedErrors];
    Copy(error.text, text);
    error.at_ns.store(FastClock::SystemNs(), std::memory_order_relaxed);
    error.run_id.store(static_cast<uint64_t>(run_id), std::memory_order_relaxed);
    header().num_errors.store(number + 1, std::memory_order_release);
  }
  dump_wanted_.store(true);
}

void Recorder::Trigger() { trigger_wanted_.store(true); }

// A copy of the file. Other threads may be recording calls.
std::vector<uint64_t> Recorder::Words() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<uint64_t> words(static_cast<size_t>(at_.file_bytes) / sizeof(uint64_t));
  const auto* from = Table<const Number64>(0);
  for (size_t i = 0; i < words.size(); ++i) words[i] = from[i].load(std::memory_order_relaxed);
  return words;
}

Status Recorder::Dump(const std::string& path) const {
  if (!started()) return UnavailableError("the flight recorder is off: JAXCOMM_RECORDER names its folder");
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const std::string part = path + ".part";
  const auto failed = [&](const char* what) {
    const std::string why = std::strerror(errno);
    unlink(part.c_str());
    return UnavailableError("the dump of the flight recorder cannot be " + std::string(what) + " (" + path +
                            "): " + why);
  };
  const int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return failed("created");
  const std::vector<uint64_t> words = Words();
  for (int64_t done = 0; done < at_.file_bytes;) {
    const ssize_t n =
        write(fd, reinterpret_cast<const char*>(words.data()) + done, static_cast<size_t>(at_.file_bytes - done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int error = errno;
      close(fd);
      errno = error;
      return failed("written");
    }
    done += n;
  }
  if (close(fd) != 0 || rename(part.c_str(), path.c_str()) != 0) return failed("written");
  return OkStatus();
}

void Recorder::SetEnding(const std::string& ending) {
  if (started()) Copy(header().ending, ending);
}

}  // namespace jaxcomm
