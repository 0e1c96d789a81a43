#include "meeting.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <thread>
#include <utility>

#include "../common/hash.h"
#include "helpers.h"
#include "joint_call.h"
#include "this_process.h"

namespace jaxcomm {

struct Meeting::Round {
  std::vector<RankBuffers> buffers;                      // by position
  std::vector<std::unique_ptr<Completion>> completions;  // by position; null: not arrived
  Arrival first;
  int64_t num_arrived = 0;
  BoundedWait wait;
  Key key;
  std::unique_ptr<char[]> scratch;
  std::unique_ptr<Execution> execution;
};

// What all calls of a group with ranks of other processes share.
struct Meeting::Joint {
  std::shared_ptr<const JointProgram> program;
  std::shared_ptr<const CallNames> names;
};

namespace {

std::atomic<double> timeout_s{WaitLimits{}.timeout_s}, warn_s{WaitLimits{}.warn_s};

BoundedWait Begin() { return {BoundedWait::Clock::now(), {timeout_s.load(), warn_s.load()}}; }

constexpr int64_t kHugePageBytes = 2 << 20;

// How long the thread of the last arrival waits for other processes by itself. Small collectives between processes that
// arrive together take a few microseconds; waking another thread would take longer than that.
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kSpinBeforeYield = std::chrono::microseconds(2);

// Numbers the call sites of a program that have equal attributes. XLA makes all call sites of a program on one thread.
struct Numbering {
  uint64_t program = 0;
  std::map<uint64_t, uint64_t> count;
};
thread_local Numbering numbering;
std::atomic<uint64_t> num_programs{0};

// The same in all processes for the same call site.
uint64_t IdentityOf(const CallSpec& spec) {
  const uint64_t hash = HashAttributes(spec);
  if (numbering.program != num_programs.load()) numbering = {num_programs.load(), {}};
  return Mix(hash, numbering.count[hash]++);
}

// Runs that have failed: devices that come late to another call of such a run are told at once.
class FailedRuns {
 public:
  void Add(int64_t run, const Status& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : runs_) {
      if (entry.first == run) return;  // the first error is the cause
    }
    runs_.emplace_back(run, error);
    if (runs_.size() > 16) runs_.pop_front();
    any_.store(true, std::memory_order_release);
  }
  // Success if the run has not failed.
  Status Find(int64_t run) {
    if (!any_.load(std::memory_order_acquire)) return OkStatus();
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [failed, why] : runs_) {
      if (failed == run) return why;
    }
    return OkStatus();
  }

 private:
  std::mutex mutex_;
  std::deque<std::pair<int64_t, Status>> runs_;
  std::atomic<bool> any_{false};
};

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Meeting>> meetings;
  FailedRuns failed_runs;
};

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

// Fresh output pages cost more than the data at large sizes; with 2 MiB pages there are 512 times fewer faults.
void AdviseHugePages(char* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  if (bytes < 2 * kHugePageBytes) return;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePageBytes * kHugePageBytes;
  // Only advice: where the kernel declines, pages stay small.
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

std::string List(const std::vector<int64_t>& numbers) {
  constexpr size_t kShown = 16;
  std::string text = "[";
  for (size_t i = 0; i < std::min(numbers.size(), kShown); ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
  if (numbers.size() > kShown) text += ", ... (" + std::to_string(numbers.size()) + " in all)";
  return text + "]";
}

std::string Sizes(const Arrival& arrival) {
  return std::to_string(arrival.input_count) + " -> " + std::to_string(arrival.output_count) + " elements of " +
         Name(arrival.dtype);
}

}  // namespace

int64_t Meeting::Iterations::Next(int64_t run) {
  for (Count& count : counts_) {
    if (count.run == run && count.next > 0) return count.next++;
  }
  counts_[oldest_] = {run, 1};
  oldest_ = (oldest_ + 1) % counts_.size();
  return 0;
}

void Meeting::SetLimits(const WaitLimits& limits) {
  timeout_s.store(limits.timeout_s);
  warn_s.store(limits.warn_s);
}

StatusOr<std::shared_ptr<Meeting>> Meeting::Make(CallSpec spec) {
  const auto num_slots = static_cast<int64_t>(spec.groups.size());
  if (spec.group_size <= 0 || num_slots % spec.group_size != 0) {
    return InvalidArgumentError(spec.op + ": " + std::to_string(num_slots) + " ranks are no groups of " +
                                std::to_string(spec.group_size));
  }
  if (spec.ranks_per_node <= 0 || spec.group_size % spec.ranks_per_node != 0) {
    return InvalidArgumentError(spec.op + ": groups of " + std::to_string(spec.group_size) + " are no nodes of " +
                                std::to_string(spec.ranks_per_node));
  }
  std::shared_ptr<Meeting> meeting(new Meeting(std::move(spec)));
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (!meeting->slots_.emplace(meeting->spec_.groups[slot], slot).second) {
      return InvalidArgumentError(meeting->spec_.op + ": rank " + std::to_string(meeting->spec_.groups[slot]) +
                                  " is in two groups");
    }
  }
  meeting->iterations_.resize(num_slots);
  meeting->local_count_.assign(num_slots / meeting->spec_.group_size, meeting->spec_.group_size);
  if (!meeting->spec_.processes.empty()) JAXCOMM_RETURN_IF_ERROR(meeting->CountLocal());
  static const bool sweeping = [] {
    std::thread(SweepForever).detach();
    return true;
  }();
  (void)sweeping;
  std::lock_guard<std::mutex> lock(TheRegistry().mutex);
  TheRegistry().meetings.push_back(meeting);
  return meeting;
}

// Which ranks are of this process; whether it knows the others of its groups.
Status Meeting::CountLocal() {
  ThisProcess& process = ThisProcess::Get();
  if (process.index() < 0) {
    return InvalidArgumentError(spec_.op +
                                ": this process has not been connected to the others; call jaxcomm.register()");
  }
  if (spec_.processes.size() != spec_.groups.size()) {
    return InvalidArgumentError(spec_.op + ": " + std::to_string(spec_.processes.size()) + " processes for " +
                                std::to_string(spec_.groups.size()) + " ranks");
  }
  for (size_t group = 0; group < local_count_.size(); ++group) {
    const auto begin = spec_.processes.begin() + static_cast<int64_t>(group) * spec_.group_size;
    const auto end = begin + spec_.group_size;
    local_count_[group] = std::count(begin, end, process.index());
    if (local_count_[group] == 0) continue;
    for (auto other = begin; other != end; ++other) {
      if (process.connected(*other)) continue;
      return InvalidArgumentError(spec_.op + ": process " + std::to_string(*other) +
                                  " is not connected; call jaxcomm.register()");
    }
  }
  identity_ = IdentityOf(spec_);
  return OkStatus();
}

void Meeting::EndProgram() { num_programs.fetch_add(1); }

void Meeting::Arrive(const Arrival& arrival, std::unique_ptr<Completion> done) {
  AdviseHugePages(arrival.output, arrival.output_count * ItemBytes(arrival.dtype));
  const StatusOr<std::shared_ptr<Round>> joined = Join(arrival, done);
  if (!joined.ok()) {
    FailRun(arrival.run, joined.status());
    done->Fail(joined.status());
    return;
  }
  const std::shared_ptr<Round>& round = *joined;
  if (!round) return;  // not the last
  const int64_t own_position = slots_.at(arrival.rank) % spec_.group_size;
  if (Spans(std::get<2>(round->key))) return SetOut(round, own_position);

  const StatusOr<std::shared_ptr<const Program>> made = ProgramFor(arrival);
  if (!made.ok()) return FailRound(*round, WithPrefix(Prefix(), made.status()));
  const std::shared_ptr<const Program>& program = *made;
  int64_t scratch_bytes = 0;
  for (const Plan& plan : program->plans) scratch_bytes += plan.scratch_count * program->item_bytes;
  if (scratch_bytes > 0) {
    round->scratch = TakeScratch(static_cast<size_t>(scratch_bytes));
    char* next = round->scratch.get();
    for (size_t i = 0; i < round->buffers.size(); ++i) {
      round->buffers[i].scratch = next;
      next += program->plans[i].scratch_count * program->item_bytes;
    }
  }
  round->execution = std::make_unique<Execution>(program, round->buffers);
  if (program->moved_bytes >= kHelpBytes) {
    Helpers::Get().Offer(spec_.group_size - 1, [self = shared_from_this(), round] { self->Work(round, -1); });
  }
  Work(round, own_position);
}

void Meeting::FailRound(Round& round, const Status& error) {
  std::vector<Completer::Item> items;
  for (auto& completion : round.completions) {
    if (completion) items.push_back({std::move(completion), nullptr, error});
  }
  Completer::Get().Push(std::move(items));
}

// All ranks of this process have arrived; now for the others.
void Meeting::SetOut(const std::shared_ptr<Round>& round, int64_t own_position) {
  const auto [run, iteration, group] = round->key;
  const StatusOr<const Joint*> made = JointFor(round->first, group);
  if (!made.ok()) {
    const Status error = WithPrefix(Prefix(), made.status());
    FailRun(run, error);
    return FailRound(*round, error);
  }
  const Joint* const joint = *made;
  JointCall::Spec spec;
  spec.key = Mix(Mix(Mix(identity_, static_cast<uint64_t>(run)), static_cast<uint64_t>(iteration)),
                 static_cast<uint64_t>(group)) |
             1;
  spec.run = run;
  spec.names = joint->names;
  spec.wait = round->wait;
  const auto finish = [self = shared_from_this(), round](int64_t position, const Status& status) {
    if (status.ok()) return self->Finish(*round, position);
    FailRun(std::get<0>(round->key), status);
    self->FailRound(*round, status);
  };
  ThisProcess& process = ThisProcess::Get();
  const auto call = std::make_shared<JointCall>(process.node(), &process.switchboard(), process.index(), joint->program,
                                                std::move(spec), round->buffers, finish);
  call->Enter();
  const Clock::time_point start = Clock::now();
  for (Clock::time_point now = start; now - start < kSpin; now = Clock::now()) {
    if (call->over() || call->Advance(own_position) == JointCall::AdvanceResult::kOver) {
      if (call->failed()) process.progress().Add(call);  // what it used has yet to be reclaimed
      return;
    }
    if (now - start > kSpinBeforeYield) std::this_thread::yield();
  }
  process.progress().Add(call);
  if (const Status failed = TheRegistry().failed_runs.Find(run); !failed.ok()) call->Fail(failed);
}

// Lives as long as the meeting.
StatusOr<const Meeting::Joint*> Meeting::JointFor(const Arrival& arrival, int64_t group) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = joints_.find(group);
    if (found != joints_.end()) return found->second.get();
  }
  const int64_t begin = group * spec_.group_size, end = begin + spec_.group_size;
  std::vector<int32_t> process_of(spec_.processes.begin() + begin, spec_.processes.begin() + end);
  bool single_copy = false;
  std::vector<int32_t> node_of;
  const Host host = ThisProcess::Get().HostOf(process_of, &single_copy, &node_of);
  const auto program = MakeProgram(spec_, figures_, host, arrival.dtype, arrival.input_count, arrival.output_count);
  if (!program.ok()) return program.status();
  auto joint = std::make_shared<Joint>();
  joint->program = std::make_shared<const JointProgram>(*program, std::move(process_of), std::move(node_of),
                                                        single_copy, arrival.input_count, arrival.output_count);
  const std::string what = spec_.op + " at " + spec_.site + " (" + Sizes(arrival) + ")";
  joint->names = std::make_shared<const CallNames>(
      CallNames{Prefix(), what, {spec_.groups.begin() + begin, spec_.groups.begin() + end}});
  std::lock_guard<std::mutex> lock(mutex_);
  return joints_.emplace(group, std::move(joint)).first->second.get();
}

// Books the arrival and takes `done`, unless it fails. Returns the round if it is complete now, else null.
StatusOr<std::shared_ptr<Meeting::Round>> Meeting::Join(const Arrival& arrival, std::unique_ptr<Completion>& done) {
  const auto found = slots_.find(arrival.rank);
  if (found == slots_.end()) {
    return InvalidArgumentError(Prefix() + "rank " + std::to_string(arrival.rank) + " is in no group");
  }
  const int64_t slot = found->second;
  const int64_t position = slot % spec_.group_size;
  std::lock_guard<std::mutex> lock(mutex_);
  JAXCOMM_RETURN_IF_ERROR(TheRegistry().failed_runs.Find(arrival.run));
  const Key key(arrival.run, iterations_[slot].Next(arrival.run), slot / spec_.group_size);
  std::shared_ptr<Round>& entry = open_[key];
  if (!entry) {
    entry = std::make_shared<Round>();
    entry->key = key;
    entry->buffers.resize(spec_.group_size);
    entry->completions.resize(spec_.group_size);
    entry->first = arrival;
    entry->wait = Begin();
  }
  const Arrival& first = entry->first;
  if (first.dtype != arrival.dtype || first.input_count != arrival.input_count ||
      first.output_count != arrival.output_count) {
    return InvalidArgumentError(Prefix() + "rank " + std::to_string(arrival.rank) + " brings " + Sizes(arrival) +
                                ", rank " + std::to_string(first.rank) + " " + Sizes(first));
  }
  entry->buffers[position] = {arrival.input, arrival.output, nullptr};
  entry->completions[position] = std::move(done);
  if (++entry->num_arrived < local_count_[slot / spec_.group_size]) return std::shared_ptr<Round>();
  std::shared_ptr<Round> round = std::move(entry);
  open_.erase(key);
  return round;
}

void Meeting::Work(const std::shared_ptr<Round>& round, int64_t own_position) {
  if (round->execution->Work()) Finish(*round, own_position);
}

// Called once per round, by the thread that ran its last step. own_position < 0: not a thread of an arrival.
void Meeting::Finish(Round& round, int64_t own_position) {
  if (round.scratch) {
    std::lock_guard<std::mutex> lock(mutex_);
    scratch_.push_back(std::move(round.scratch));
  }
  std::vector<Completer::Item> items;
  items.reserve(round.completions.size());
  std::unique_ptr<Completion> own;
  for (size_t i = 0; i < round.completions.size(); ++i) {
    if (static_cast<int64_t>(i) == own_position) {
      own = std::move(round.completions[i]);
    } else if (round.completions[i]) {
      items.push_back({std::move(round.completions[i]), pace_, OkStatus()});
    }
  }
  if (own) own->Succeed();
  Completer::Get().Push(std::move(items));
}

StatusOr<std::shared_ptr<const Program>> Meeting::ProgramFor(const Arrival& arrival) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (program_) return program_;  // shapes are static: one program per call site
  }
  StatusOr<std::shared_ptr<const Program>> program =
      MakeProgram(spec_, figures_, Host(), arrival.dtype, arrival.input_count, arrival.output_count);
  std::lock_guard<std::mutex> lock(mutex_);
  if (program.ok() && !program_) program_ = *program;
  return program;
}

std::unique_ptr<char[]> Meeting::TakeScratch(size_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!scratch_.empty()) {
      std::unique_ptr<char[]> scratch = std::move(scratch_.back());
      scratch_.pop_back();
      return scratch;
    }
  }
  return std::unique_ptr<char[]>(new char[bytes]);  // all rounds of a call site need the same size
}

std::string Meeting::DescribeLate(const Round& round, const Key& key, const std::string& within) const {
  std::vector<int64_t> missing, arrived;
  for (int64_t position = 0; position < spec_.group_size; ++position) {
    const int64_t slot = std::get<2>(key) * spec_.group_size + position;
    const int64_t rank = spec_.groups[slot];
    if (!spec_.processes.empty() && spec_.processes[slot] != ThisProcess::Get().index()) continue;
    (round.completions[position] ? arrived : missing).push_back(rank);
  }
  return Prefix() + "ranks " + List(missing) + " did not arrive" + within + " of the first of ranks " + List(arrived);
}

void Meeting::FailRounds(int64_t run, const Status& error) {
  std::vector<Completer::Item> items;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = open_.begin(); it != open_.end();) {
      if (std::get<0>(it->first) != run) {
        ++it;
        continue;
      }
      for (auto& completion : it->second->completions) {
        if (completion) items.push_back({std::move(completion), nullptr, error});
      }
      it = open_.erase(it);
    }
  }
  Completer::Get().Push(std::move(items));
}

void Meeting::FailRun(int64_t run, const Status& error) {
  // First the mark, then the sweep: a device that arrives in between finds one or the other.
  TheRegistry().failed_runs.Add(run, error);
  ThisProcess& process = ThisProcess::Get();
  if (process.index() >= 0) {
    process.PublishFailure(run, error.message());
    process.progress().FailRun(run, error);
  }
  std::vector<std::weak_ptr<Meeting>> meetings;
  {
    std::lock_guard<std::mutex> lock(TheRegistry().mutex);
    meetings = TheRegistry().meetings;
  }
  for (const auto& weak : meetings) {
    if (const auto meeting = weak.lock()) meeting->FailRounds(run, error);
  }
}

void Meeting::FailExpired(Clock::time_point now) {
  std::vector<std::pair<int64_t, Status>> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, round] : open_) {
      if (round->wait.Expired(now)) {
        failed.emplace_back(std::get<0>(key),
                            DeadlineExceededError(DescribeLate(*round, key, round->wait.WithinTimeout())));
      } else if (round->wait.WarningDue(now)) {
        round->wait.Warn([&](const std::string& within) { return DescribeLate(*round, key, within); });
      }
    }
  }
  for (const auto& [run, error] : failed) FailRun(run, error);
}

void Meeting::SweepForever() {
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::vector<std::shared_ptr<Meeting>> alive;
    {
      std::lock_guard<std::mutex> lock(TheRegistry().mutex);
      auto& meetings = TheRegistry().meetings;
      meetings.erase(std::remove_if(meetings.begin(), meetings.end(), [](const auto& weak) { return weak.expired(); }),
                     meetings.end());
      for (const auto& weak : meetings) {
        if (auto meeting = weak.lock()) alive.push_back(std::move(meeting));
      }
    }
    const Clock::time_point now = Clock::now();
    for (const auto& meeting : alive) meeting->FailExpired(now);
  }
}

}  // namespace jaxcomm
