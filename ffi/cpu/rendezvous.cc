#include "cpu/rendezvous.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

#include "common/hash.h"
#include "cpu/failed_runs.h"
#include "cpu/inter_process_call.h"
#include "cpu/pages.h"
#include "cpu/process_context.h"
#include "cpu/row_checks.h"
#include "cpu/worker_pool.h"

namespace jaxcomm {

struct Rendezvous::GroupCall {
  std::vector<RankBuffers> buffers;                      // by position
  std::vector<std::unique_ptr<Completion>> completions;  // by position; null: not arrived
  Participant first;
  int64_t num_arrived = 0;
  BoundedWait wait;
  Key key;
  std::unique_ptr<char[]> scratch;
  std::unique_ptr<Execution> execution;
  Slices slices;  // all_to_all_v, dispatch, combine
};

// Shared by all calls of a group that spans processes.
struct Rendezvous::InterProcess {
  std::shared_ptr<const InterProcessProgram> program;
  std::shared_ptr<const CallNames> names;
};

namespace {

std::atomic<double> timeout_s{WaitLimits{}.timeout_s}, warn_s{WaitLimits{}.warn_s};

BoundedWait Begin() { return {BoundedWait::Clock::now(), {timeout_s.load(), warn_s.load()}}; }

// How long the thread of the last participant polls for other processes. Small collectives of processes that arrive
// together take a few microseconds, less than waking another thread.
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kSpinBeforeYield = std::chrono::microseconds(2);

// Numbers call sites of a program that have equal names, lines and groups. XLA makes all call sites of a program on one
// thread.
struct Numbering {
  uint64_t program = 0;
  std::map<uint64_t, uint64_t> count;
};
thread_local Numbering numbering;
std::atomic<uint64_t> num_programs{0};

uint64_t HashOfGroups(const CallSpec& spec) {
  auto hash = static_cast<uint64_t>(spec.group_size);
  for (const int64_t rank : spec.groups) hash = Mix(hash, static_cast<uint64_t>(rank));
  for (const int32_t process : spec.processes) hash = Mix(hash, static_cast<uint64_t>(process));
  return hash;
}

// Groups on different devices of the same processes differ: nothing orders their programs. 0: the devices are unknown.
uint64_t HashOfDevices(const CallSpec& spec, uint64_t hash) {
  if (spec.devices.size() != spec.groups.size()) return 0;
  for (const int32_t device : spec.devices) hash = Mix(hash, static_cast<uint64_t>(device));
  return hash | 1;
}

// Equal in all processes for the same call site. The other attributes are part of the fingerprint: processes whose keys
// are equal get an error at once if these differ.
uint64_t IdentityOf(const CallSpec& spec, uint64_t hash_of_groups) {
  const uint64_t hash = Mix(Mix(hash_of_groups, spec.op), spec.site);
  if (numbering.program != num_programs.load()) numbering = {num_programs.load(), {}};
  return Mix(hash, numbering.count[hash]++);
}

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Rendezvous>> all_rendezvous;
  FailedRuns failed_runs;
};

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

std::string List(const std::vector<int64_t>& numbers) {
  constexpr size_t kShown = 16;
  std::string text = "[";
  for (size_t i = 0; i < std::min(numbers.size(), kShown); ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
  if (numbers.size() > kShown) text += ", ... (" + std::to_string(numbers.size()) + " in all)";
  return text + "]";
}

std::string Sizes(const Participant& participant) {
  return std::to_string(participant.input_count) + " -> " + std::to_string(participant.output_count) + " elements of " +
         Name(participant.dtype);
}

}  // namespace

int64_t Rendezvous::Iterations::Next(int64_t run_id) {
  for (Count& count : counts_) {
    if (count.run_id == run_id && count.next > 0) return count.next++;
  }
  counts_[oldest_] = {run_id, 1};
  oldest_ = (oldest_ + 1) % counts_.size();
  return 0;
}

void Rendezvous::SetLimits(const WaitLimits& limits) {
  timeout_s.store(limits.timeout_s);
  warn_s.store(limits.warn_s);
}

StatusOr<std::shared_ptr<Rendezvous>> Rendezvous::Make(CallSpec spec) {
  const auto num_slots = static_cast<int64_t>(spec.groups.size());
  if (spec.group_size <= 0 || num_slots % spec.group_size != 0) {
    return InvalidArgumentError(spec.op + ": " + std::to_string(num_slots) + " ranks cannot be split into groups of " +
                                std::to_string(spec.group_size));
  }
  if (spec.ranks_per_node <= 0 || spec.group_size % spec.ranks_per_node != 0) {
    return InvalidArgumentError(spec.op + ": groups of " + std::to_string(spec.group_size) +
                                " ranks cannot be split into nodes of " + std::to_string(spec.ranks_per_node));
  }
  std::shared_ptr<Rendezvous> rendezvous(new Rendezvous(std::move(spec)));
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (!rendezvous->slots_.emplace(rendezvous->spec_.groups[slot], slot).second) {
      return InvalidArgumentError(rendezvous->spec_.op + ": rank " + std::to_string(rendezvous->spec_.groups[slot]) +
                                  " occurs twice in the groups");
    }
  }
  rendezvous->iterations_.resize(num_slots);
  rendezvous->local_count_.assign(num_slots / rendezvous->spec_.group_size, rendezvous->spec_.group_size);
  if (!rendezvous->spec_.processes.empty()) JAXCOMM_RETURN_IF_ERROR(rendezvous->CountLocal());
  static const bool sweeping = [] {
    std::thread(SweepForever).detach();
    return true;
  }();
  (void)sweeping;
  std::lock_guard<std::mutex> lock(TheRegistry().mutex);
  TheRegistry().all_rendezvous.push_back(rendezvous);
  return rendezvous;
}

// Counts the ranks of this process by group. Fails if another process of its groups is not connected.
Status Rendezvous::CountLocal() {
  ProcessContext& process = ProcessContext::Get();
  if (process.index() < 0) {
    return InvalidArgumentError(spec_.op + ": this process is not connected to the others; call jaxcomm.register()");
  }
  if (spec_.processes.size() != spec_.groups.size()) {
    return InvalidArgumentError(spec_.op + ": attribute processes has " + std::to_string(spec_.processes.size()) +
                                " entries, expected " + std::to_string(spec_.groups.size()) + ", one per rank");
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
  const uint64_t hash_of_groups = HashOfGroups(spec_);
  identity_ = IdentityOf(spec_, hash_of_groups);
  devices_hash_ = HashOfDevices(spec_, hash_of_groups);
  return OkStatus();
}

void Rendezvous::EndProgram() { num_programs.fetch_add(1); }

void Rendezvous::Arrive(Participant participant, std::unique_ptr<Completion> done) {
  AdviseHugePages(participant.output, participant.output_count * ItemBytes(participant.dtype));
  participant.table_hash = HashOfTable(participant);
  const StatusOr<std::shared_ptr<GroupCall>> joined = Join(participant, done);
  if (!joined.ok()) {
    FailRun(participant.run_id, joined.status());
    done->Fail(joined.status());
    return;
  }
  const std::shared_ptr<GroupCall>& group_call = *joined;
  if (!group_call) return;  // not the last to arrive
  if (spec_.asynchronous != 0) {
    return WorkerPool::Get().SubmitOnce(
        [self = shared_from_this(), group_call, participant] { self->Start(group_call, participant, -1); });
  }
  Start(group_call, participant, slots_.at(participant.rank) % spec_.group_size);
}

// All ranks of this process have arrived; `participant` was the last. own_position < 0: not its thread.
void Rendezvous::Start(const std::shared_ptr<GroupCall>& group_call, const Participant& participant,
                       int64_t own_position) {
  const StatusOr<Slices> slices = CheckedSlices(spec_, participant, std::get<2>(group_call->key));
  if (!slices.ok()) {  // every rank finds the same fault, and no row has moved
    FailRun(participant.run_id, slices.status());
    return FailCall(*group_call, slices.status());
  }
  group_call->slices = *slices;
  Status checked;
  for (size_t i = 0; checked.ok() && i < group_call->buffers.size(); ++i) {
    checked = CheckRows(spec_, participant, group_call->buffers[i], group_call->slices, static_cast<int32_t>(i));
  }
  if (SpansProcesses(std::get<2>(group_call->key))) return StartInterProcess(group_call, own_position, checked);
  if (!checked.ok()) {
    FailRun(participant.run_id, checked);
    return FailCall(*group_call, checked);
  }

  const StatusOr<std::shared_ptr<const Program>> made = ProgramFor(participant);
  if (!made.ok()) return FailCall(*group_call, WithPrefix(Prefix(), made.status()));
  const std::shared_ptr<const Program>& program = *made;
  int64_t scratch_bytes = 0;
  for (size_t i = 0; i < program->plans.size(); ++i) scratch_bytes += program->scratch_bytes(i);
  if (scratch_bytes > 0) {
    group_call->scratch = TakeScratch(static_cast<size_t>(scratch_bytes));
    char* next = group_call->scratch.get();
    for (size_t i = 0; i < group_call->buffers.size(); ++i) {
      group_call->buffers[i].scratch = next;
      next += program->scratch_bytes(i);
    }
  }
  group_call->execution = std::make_unique<Execution>(program, group_call->buffers, group_call->slices);
  if (program->moved_bytes >= kMinParallelBytes) {
    WorkerPool::Get().Submit(spec_.group_size - 1,
                             [self = shared_from_this(), group_call] { self->Work(group_call, -1); });
  }
  Work(group_call, own_position);
}

void Rendezvous::FailCall(GroupCall& group_call, const Status& error) {
  std::vector<CompletionPool::Item> items;
  for (auto& completion : group_call.completions) {
    if (completion) items.push_back({std::move(completion), nullptr, error});
  }
  CompletionPool::Get().Push(std::move(items));
}

// All ranks of this process have arrived. Starts the call with the other processes, and fails it if `checked` is an
// error.
void Rendezvous::StartInterProcess(const std::shared_ptr<GroupCall>& group_call, int64_t own_position,
                                   const Status& checked) {
  const auto [run_id, iteration, group] = group_call->key;
  const StatusOr<const InterProcess*> made = InterProcessFor(group_call->first, group);
  if (!made.ok()) {
    const Status error = WithPrefix(Prefix(), made.status());
    FailRun(run_id, error);
    return FailCall(*group_call, error);
  }
  const InterProcess* const inter_process = *made;
  InterProcessCall::Spec spec;
  spec.key = Mix(Mix(Mix(identity_, static_cast<uint64_t>(run_id)), static_cast<uint64_t>(iteration)),
                 static_cast<uint64_t>(group)) |
             1;
  spec.run = {run_id, devices_hash_ == 0 ? 0 : Mix(devices_hash_, static_cast<uint64_t>(group)) | 1};
  spec.names = inter_process->names;
  spec.wait = group_call->wait;
  spec.slices = group_call->slices;
  spec.table_hash = group_call->first.table_hash;
  spec.asynchronous = spec_.asynchronous != 0;
  const auto finish = [self = shared_from_this(), group_call](int64_t position, const Status& status) {
    if (status.ok()) return self->Finish(*group_call, position);
    FailRun(std::get<0>(group_call->key), status);
    self->FailCall(*group_call, status);
  };
  ProcessContext& process = ProcessContext::Get();
  const auto call =
      std::make_shared<InterProcessCall>(process.node(), &process.active_messages(), process.index(),
                                         inter_process->program, std::move(spec), group_call->buffers, finish);
  call->Enter();
  if (!checked.ok()) call->Fail(checked);  // after Enter(), so that the other processes get the error
  const auto spin = own_position < 0 ? Clock::duration::zero() : kSpin;
  const Clock::time_point start = Clock::now();
  for (Clock::time_point now = start; now - start < spin; now = Clock::now()) {
    if (call->over() || call->Advance(own_position) == InterProcessCall::AdvanceResult::kOver) {
      if (call->failed()) process.progress_thread().Add(call);  // reclaims its slot and block
      return;
    }
    if (now - start > kSpinBeforeYield) std::this_thread::yield();
  }
  process.progress_thread().Add(call);
  if (const Status failed = TheRegistry().failed_runs.Find(run_id); !failed.ok()) call->Fail(failed);
}

// The result lives as long as the rendezvous.
StatusOr<const Rendezvous::InterProcess*> Rendezvous::InterProcessFor(const Participant& participant, int64_t group) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = inter_process_.find(group);
    if (found != inter_process_.end()) return found->second.get();
  }
  const int64_t begin = group * spec_.group_size, end = begin + spec_.group_size;
  std::vector<int32_t> process_of(spec_.processes.begin() + begin, spec_.processes.begin() + end);
  bool single_copy = false;
  std::vector<int32_t> node_of;
  const NodeResources resources = ProcessContext::Get().ResourcesOf(process_of, &single_copy, &node_of);
  const auto program =
      MakeProgram(spec_, cost_params_, resources, participant.dtype, participant.input_count, participant.output_count);
  if (!program.ok()) return program.status();
  auto inter_process = std::make_shared<InterProcess>();
  inter_process->program = std::make_shared<const InterProcessProgram>(
      *program, std::move(process_of), std::move(node_of), single_copy, participant.input_count,
      participant.output_count, HashAttributes(spec_));
  const std::string algorithm = spec_.algorithm.empty() ? "" : ", " + spec_.algorithm;
  std::string what = spec_.op + " at " + spec_.site + " (" + Sizes(participant) + algorithm + ")";
  what.resize(std::min(what.size(), sizeof(Slot::what) - 1));
  inter_process->names = std::make_shared<const CallNames>(
      CallNames{Prefix(), what, {spec_.groups.begin() + begin, spec_.groups.begin() + end}});
  std::lock_guard<std::mutex> lock(mutex_);
  return inter_process_.emplace(group, std::move(inter_process)).first->second.get();
}

// Records the arrival and takes `done`, unless it fails. Returns the call if all local participants have arrived,
// otherwise null.
StatusOr<std::shared_ptr<Rendezvous::GroupCall>> Rendezvous::Join(const Participant& participant,
                                                                  std::unique_ptr<Completion>& done) {
  const auto found = slots_.find(participant.rank);
  if (found == slots_.end()) {
    return InvalidArgumentError(Prefix() + "rank " + std::to_string(participant.rank) + " is not in any group");
  }
  const int64_t slot = found->second;
  const int64_t position = slot % spec_.group_size;
  std::lock_guard<std::mutex> lock(mutex_);
  JAXCOMM_RETURN_IF_ERROR(TheRegistry().failed_runs.Find(participant.run_id));
  const Key key(participant.run_id, iterations_[slot].Next(participant.run_id), slot / spec_.group_size);
  std::shared_ptr<GroupCall>& entry = open_[key];
  if (!entry) {
    entry = std::make_shared<GroupCall>();
    entry->key = key;
    entry->buffers.resize(spec_.group_size);
    entry->completions.resize(spec_.group_size);
    entry->first = participant;
    entry->wait = Begin();
  }
  const Participant& first = entry->first;
  if (first.dtype != participant.dtype || first.input_count != participant.input_count ||
      first.output_count != participant.output_count || first.table_count != participant.table_count) {
    return InvalidArgumentError(Prefix() + "buffers do not match: rank " + std::to_string(participant.rank) + " has " +
                                Sizes(participant) + ", rank " + std::to_string(first.rank) + " has " + Sizes(first));
  }
  if (first.table_hash != participant.table_hash) {
    return InvalidArgumentError(Prefix() + "calls do not match: ranks " + std::to_string(first.rank) + " and " +
                                std::to_string(participant.rank) + " are in it" + kDifferentTables);
  }
  RankBuffers& buffers = entry->buffers[position];
  buffers.input = participant.input;
  buffers.output = participant.output;
  buffers.index = participant.index;
  buffers.expert = participant.expert;
  buffers.weights = participant.weights;
  entry->completions[position] = std::move(done);
  if (++entry->num_arrived < local_count_[slot / spec_.group_size]) return std::shared_ptr<GroupCall>();
  std::shared_ptr<GroupCall> group_call = std::move(entry);
  open_.erase(key);
  return group_call;
}

void Rendezvous::Work(const std::shared_ptr<GroupCall>& group_call, int64_t own_position) {
  if (group_call->execution->Work()) Finish(*group_call, own_position);
}

// Called once per call, by the thread that ran its last step. own_position < 0: not the thread of a participant.
void Rendezvous::Finish(GroupCall& group_call, int64_t own_position) {
  if (group_call.scratch) {
    std::lock_guard<std::mutex> lock(mutex_);
    scratch_.push_back(std::move(group_call.scratch));
  }
  std::vector<CompletionPool::Item> items;
  items.reserve(group_call.completions.size());
  std::unique_ptr<Completion> own;
  for (size_t i = 0; i < group_call.completions.size(); ++i) {
    if (static_cast<int64_t>(i) == own_position) {
      own = std::move(group_call.completions[i]);
    } else if (group_call.completions[i]) {
      items.push_back({std::move(group_call.completions[i]), pace_, OkStatus()});
    }
  }
  if (own) own->Succeed();
  CompletionPool::Get().Push(std::move(items));
}

StatusOr<std::shared_ptr<const Program>> Rendezvous::ProgramFor(const Participant& participant) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (program_) return program_;  // shapes are static: one program per call site
  }
  StatusOr<std::shared_ptr<const Program>> program = MakeProgram(
      spec_, cost_params_, NodeResources(), participant.dtype, participant.input_count, participant.output_count);
  std::lock_guard<std::mutex> lock(mutex_);
  if (program.ok() && !program_) program_ = *program;
  return program;
}

std::unique_ptr<char[]> Rendezvous::TakeScratch(size_t bytes) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!scratch_.empty()) {
      std::unique_ptr<char[]> scratch = std::move(scratch_.back());
      scratch_.pop_back();
      return scratch;
    }
  }
  return std::unique_ptr<char[]>(new char[bytes]);  // all calls of a call site need the same size
}

std::string Rendezvous::DescribeLate(const GroupCall& group_call, const Key& key, const std::string& within) const {
  std::vector<int64_t> missing, arrived;
  for (int64_t position = 0; position < spec_.group_size; ++position) {
    const int64_t slot = std::get<2>(key) * spec_.group_size + position;
    const int64_t rank = spec_.groups[slot];
    if (!spec_.processes.empty() && spec_.processes[slot] != ProcessContext::Get().index()) continue;
    (group_call.completions[position] ? arrived : missing).push_back(rank);
  }
  return Prefix() + "ranks " + List(missing) + " did not arrive" + within + " of the first of ranks " + List(arrived);
}

void Rendezvous::FailCalls(int64_t run_id, const Status& error) {
  std::vector<CompletionPool::Item> items;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = open_.begin(); it != open_.end();) {
      if (std::get<0>(it->first) != run_id) {
        ++it;
        continue;
      }
      for (auto& completion : it->second->completions) {
        if (completion) items.push_back({std::move(completion), nullptr, error});
      }
      it = open_.erase(it);
    }
  }
  CompletionPool::Get().Push(std::move(items));
}

void Rendezvous::FailRun(int64_t run_id, const Status& error) {
  // Records the failure before it fails open calls. So a device that arrives in between gets the error from one of
  // both.
  TheRegistry().failed_runs.Add(run_id, error);
  ProcessContext& process = ProcessContext::Get();
  if (process.index() >= 0) {
    process.PublishFailure(run_id, error.message());
    process.progress_thread().FailRun(run_id, error);
  }
  std::vector<std::weak_ptr<Rendezvous>> all_rendezvous;
  {
    std::lock_guard<std::mutex> lock(TheRegistry().mutex);
    all_rendezvous = TheRegistry().all_rendezvous;
  }
  for (const auto& weak : all_rendezvous) {
    if (const auto rendezvous = weak.lock()) rendezvous->FailCalls(run_id, error);
  }
}

void Rendezvous::FailExpired(Clock::time_point now) {
  std::vector<std::pair<int64_t, Status>> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, group_call] : open_) {
      if (group_call->wait.Expired(now)) {
        failed.emplace_back(std::get<0>(key),
                            DeadlineExceededError(DescribeLate(*group_call, key, group_call->wait.WithinTimeout())));
      } else if (group_call->wait.WarningDue(now)) {
        group_call->wait.Warn([&](const std::string& within) { return DescribeLate(*group_call, key, within); });
      }
    }
  }
  for (const auto& [run_id, error] : failed) FailRun(run_id, error);
}

void Rendezvous::SweepForever() {
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::vector<std::shared_ptr<Rendezvous>> alive;
    {
      std::lock_guard<std::mutex> lock(TheRegistry().mutex);
      auto& all_rendezvous = TheRegistry().all_rendezvous;
      all_rendezvous.erase(
          std::remove_if(all_rendezvous.begin(), all_rendezvous.end(), [](const auto& weak) { return weak.expired(); }),
          all_rendezvous.end());
      for (const auto& weak : all_rendezvous) {
        if (auto rendezvous = weak.lock()) alive.push_back(std::move(rendezvous));
      }
    }
    const Clock::time_point now = Clock::now();
    for (const auto& rendezvous : alive) rendezvous->FailExpired(now);
  }
}

}  // namespace jaxcomm
