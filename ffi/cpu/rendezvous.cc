#include "cpu/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

#include "common/hash.h"
#include "cpu/hand_over.h"
#include "cpu/pages.h"
#include "cpu/process_context.h"
#include "cpu/row_checks.h"
#include "cpu/worker_pool.h"

namespace jaxcomm {
namespace {

std::atomic<double> timeout_s{WaitLimits{}.timeout_s}, warn_s{WaitLimits{}.warn_s};

WaitLimits Limits(const CallSpec& spec) {
  if (spec.timeout_ms == 0) return {timeout_s.load(), warn_s.load()};
  return {static_cast<double>(spec.timeout_ms) / 1e3, warn_s.load(), WaitLimits::kTimeoutArgument};
}

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

uint64_t HashOfProcesses(const CallSpec& spec) {
  uint64_t hash = 0;
  for (const int32_t process : std::set<int32_t>(spec.processes.begin(), spec.processes.end())) {
    hash = Mix(hash, static_cast<uint64_t>(process));
  }
  return hash;
}

// Groups on different devices of the same processes differ: nothing orders their programs. 0: the devices are unknown.
uint64_t HashOfDevices(const CallSpec& spec, uint64_t hash) {
  if (spec.devices.size() != spec.groups.size()) return 0;
  for (const int32_t device : spec.devices) hash = Mix(hash, static_cast<uint64_t>(device));
  return hash | 1;
}

// Equal in all processes for the same call site. The other attributes are part of the fingerprint: processes whose keys
// are equal get an error at once if these differ. Numbered calls are counted for each set of processes, so two with one
// number must be equal, groups included. Sets the call site's number among equal ones.
uint64_t IdentityOf(const CallSpec& spec, uint64_t hash_of_groups, uint64_t* number) {
  const uint64_t hash_of_ranks = spec.numbered != 0 ? HashOfProcesses(spec) : hash_of_groups;
  const uint64_t hash = Mix(Mix(hash_of_ranks, spec.op), spec.site);
  if (numbering.program != num_programs.load()) numbering = {num_programs.load(), {}};
  *number = numbering.count[hash]++;
  return Mix(hash, *number);
}

std::string List(const std::vector<int64_t>& numbers) {
  constexpr size_t kShown = 16;
  std::string text = "[";
  for (size_t i = 0; i < std::min(numbers.size(), kShown); ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
  if (numbers.size() > kShown) text += ", ... (" + std::to_string(numbers.size()) + " in all)";
  return text + "]";
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

int64_t Rendezvous::RunOf(uint32_t number) const {
  const uint64_t sequence = HashOfProcesses(spec_) >> 32 | 1;
  return static_cast<int64_t>(sequence << 32 | number);
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
  rendezvous->AddToRecorder();
  RunFailures::Get().Watch(rendezvous);
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
  identity_ = IdentityOf(spec_, hash_of_groups, &number_);
  devices_hash_ = HashOfDevices(spec_, hash_of_groups);
  return OkStatus();
}

// A group is known to the recorder by the processes and devices of its ranks.
void Rendezvous::AddToRecorder() {
  const int64_t size = spec_.group_size;
  recorded_sites_.assign(local_count_.size(), Recorder::kNoSite);
  arrived_bits_.resize(spec_.groups.size());
  const uint64_t identity = identity_ != 0 ? identity_ : Mix(Mix(0, spec_.op), spec_.site);
  for (int64_t group = 0; group * size < static_cast<int64_t>(spec_.groups.size()); ++group) {
    if (local_count_[group] == 0) continue;
    uint64_t hash = static_cast<uint64_t>(size);
    int64_t num_local = 0;
    std::vector<int64_t> ranks;
    std::vector<int32_t> processes;
    for (int64_t slot = group * size; slot < (group + 1) * size; ++slot) {
      const int32_t own = std::max(ProcessContext::Get().index(), 0);
      ranks.push_back(spec_.groups[slot]);
      processes.push_back(spec_.processes.empty() ? own : spec_.processes[slot]);
      if (processes.back() == own) arrived_bits_[slot] = CallRecord::ArrivedBit(num_local++);
      const bool known = spec_.devices.size() == spec_.groups.size();
      hash = Mix(hash, static_cast<uint64_t>(known ? spec_.devices[slot] : spec_.groups[slot]));
    }
    recorded_sites_[group] =
        Recorder::Get().AddSite(spec_.op + " at " + spec_.site, spec_.algorithm, identity, hash, ranks, processes);
  }
}

void Rendezvous::Record(GroupCall& group_call) {
  if (!group_call.record.begun()) {
    const Participant& first = group_call.first;
    group_call.record = Recorder::Get().Begin(recorded_sites_[group_call.key.group], group_call.key.run_id,
                                              group_call.key.iteration, static_cast<uint32_t>(first.dtype),
                                              first.input_count, first.output_count, group_call.wait.began());
  }
  group_call.record.Arrived(group_call.arrived);
}

void Rendezvous::EndProgram() { num_programs.fetch_add(1); }

void Rendezvous::Arrive(Participant participant, std::unique_ptr<Completion> done) {
  AdviseHugePages(participant.output, participant.output_count * ItemBytes(participant.dtype));
  participant.table_hash = HashOfTable(participant);
  const StatusOr<std::shared_ptr<GroupCall>> joined = Join(participant, done);
  if (!joined.ok()) {
    RunFailures::Get().Fail(participant.run_id, joined.status());
    return done->Fail(joined.status());
  }
  const std::shared_ptr<GroupCall>& group_call = *joined;
  if (!group_call) return;  // not the last to arrive
  AtHandOver(HandOver::kMatched);
  if (spec_.asynchronous != 0) {
    Record(*group_call);  // here, for a number in the order of the calls: workers may start them in another one
    return WorkerPool::Get().SubmitOnce(
        [self = shared_from_this(), group_call, participant] { self->Start(group_call, participant, -1); });
  }
  Start(group_call, participant, slots_.at(participant.rank) % spec_.group_size);
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
  JAXCOMM_RETURN_IF_ERROR(RunFailures::Get().Find(participant.run_id));
  const int64_t iteration =
      participant.iteration >= 0 ? participant.iteration : iterations_[slot].Next(participant.run_id);
  const Key key = {participant.run_id, iteration, slot / spec_.group_size};
  std::shared_ptr<GroupCall>& entry = open_[key];
  if (!entry) {
    entry = std::make_shared<GroupCall>();
    entry->key = key;
    entry->buffers.resize(spec_.group_size);
    entry->completions.resize(spec_.group_size);
    entry->first = participant;
    entry->wait = {BoundedWait::Clock::now(), Limits(spec_)};
  }
  const Participant& first = entry->first;
  if (first.dtype != participant.dtype || first.input_count != participant.input_count ||
      first.output_count != participant.output_count) {
    return InvalidArgumentError(Prefix() + "buffers do not match: rank " + std::to_string(participant.rank) + " has " +
                                participant.Sizes() + ", rank " + std::to_string(first.rank) + " has " + first.Sizes());
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
  entry->arrived |= arrived_bits_[slot];
  if (++entry->num_arrived < local_count_[slot / spec_.group_size]) return std::shared_ptr<GroupCall>();
  std::shared_ptr<GroupCall> group_call = std::move(entry);
  open_.erase(key);
  return group_call;
}

std::string Rendezvous::DescribeLate(const GroupCall& group_call, const std::string& within) const {
  std::vector<int64_t> missing, arrived;
  for (int64_t position = 0; position < spec_.group_size; ++position) {
    const int64_t slot = group_call.key.group * spec_.group_size + position;
    const int64_t rank = spec_.groups[slot];
    if (!spec_.processes.empty() && spec_.processes[slot] != ProcessContext::Get().index()) continue;
    (group_call.completions[position] ? arrived : missing).push_back(rank);
  }
  return Prefix() + "ranks " + List(missing) + " did not arrive" + within + " of the first of ranks " + List(arrived);
}

std::vector<CompletionPool::Item> Rendezvous::GroupCall::Failed(const Status& error) {
  std::vector<CompletionPool::Item> items;
  for (auto& completion : completions) {
    if (completion) items.push_back({std::move(completion), nullptr, error});
  }
  return items;
}

void Rendezvous::FailCalls(int64_t run_id, const Status& error) {
  std::vector<std::shared_ptr<GroupCall>> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = open_.begin(); it != open_.end();) {
      if (it->first.run_id != run_id) {
        ++it;
        continue;
      }
      failed.push_back(std::move(it->second));
      it = open_.erase(it);
    }
  }
  for (const auto& group_call : failed) {
    Record(*group_call);
    group_call->record.End(false);
    CompletionPool::Get().Push(group_call->Failed(error));
  }
}

std::vector<std::pair<int64_t, Status>> Rendezvous::CheckWaits(std::chrono::steady_clock::time_point now) {
  std::vector<std::pair<int64_t, Status>> expired;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [key, group_call] : open_) {
    Record(*group_call);
    BoundedWait& wait = group_call->wait;
    const auto late = [&call = *group_call, this](const std::string& within) { return DescribeLate(call, within); };
    if (wait.Expired(now)) {
      expired.emplace_back(key.run_id, DeadlineExceededError(late(wait.WithinTimeout())));
    } else if (wait.WarningDue(now)) {
      wait.Warn(late);
      Recorder::Get().Trigger();
    }
  }
  return expired;
}

}  // namespace jaxcomm
