// The start of a call once all ranks of this process have arrived, its work, and its end.
#include <algorithm>
#include <thread>
#include <utility>

#include "common/hash.h"
#include "cpu/hand_over.h"
#include "cpu/inter_process_call.h"
#include "cpu/process_context.h"
#include "cpu/rendezvous.h"
#include "cpu/row_checks.h"
#include "cpu/worker_pool.h"

namespace jaxcomm {
namespace {

// How long the thread of the last participant polls for other processes. Small collectives of processes that arrive
// together take a few microseconds, less than waking another thread.
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kSpinBeforeYield = std::chrono::microseconds(2);

}  // namespace

// `participant` was the last to arrive.
void Rendezvous::Start(const std::shared_ptr<GroupCall>& group_call, const Participant& participant,
                       int64_t own_position) {
  const auto [run_id, iteration, group] = group_call->key;
  const uint64_t key = Mix(Mix(Mix(identity_, static_cast<uint64_t>(run_id)), static_cast<uint64_t>(iteration)),
                           static_cast<uint64_t>(group)) |
                       1;
  Record(*group_call);
  group_call->record.Started(key);
  const StatusOr<Slices> slices = CheckedSlices(spec_, participant, group_call->key.group);
  if (!slices.ok()) return Fail(*group_call, slices.status());
  group_call->slices = *slices;
  for (size_t i = 0; i < group_call->buffers.size(); ++i) {
    const Status checked =
        CheckRows(spec_, participant, group_call->buffers[i], group_call->slices, static_cast<int32_t>(i));
    if (!checked.ok()) return Fail(*group_call, checked);
  }
  if (local_count_[group] < spec_.group_size) return StartInterProcess(group_call, own_position, key);

  group_call->record.SetPhase(CallPhase::kRunning);
  const StatusOr<std::shared_ptr<const Program>> made = ProgramFor(participant);
  if (!made.ok()) return Fail(*group_call, WithPrefix(Prefix(), made.status()));
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

void Rendezvous::Fail(GroupCall& group_call, const Status& error) {
  group_call.record.End(false);
  RunFailures::Get().Fail(group_call.key.run_id, error);
  CompletionPool::Get().Push(group_call.Failed(error));
}

// Starts the call with the other processes.
void Rendezvous::StartInterProcess(const std::shared_ptr<GroupCall>& group_call, int64_t own_position, uint64_t key) {
  const auto [run_id, iteration, group] = group_call->key;
  const StatusOr<const InterProcess*> made = InterProcessFor(group_call->first, group);
  if (!made.ok()) return Fail(*group_call, WithPrefix(Prefix(), made.status()));
  const InterProcess* const inter_process = *made;
  InterProcessCall::Spec spec;
  spec.key = key;
  spec.record = group_call->record;
  spec.run = {run_id, devices_hash_ == 0 ? 0 : Mix(devices_hash_, static_cast<uint64_t>(group)) | 1};
  spec.names = inter_process->names;
  spec.what = inter_process->what + std::to_string(iteration + 1) + ")";
  spec.wait = group_call->wait;
  spec.slices = group_call->slices;
  spec.table_hash = group_call->first.table_hash;
  spec.asynchronous = spec_.asynchronous != 0;
  spec.numbered = spec_.numbered != 0;
  const auto finish = [self = shared_from_this(), group_call](int64_t position, const Status& status) {
    if (status.ok()) return self->Finish(*group_call, position);
    self->Fail(*group_call, status);
  };
  ProcessContext& process = ProcessContext::Get();
  const auto call =
      std::make_shared<InterProcessCall>(process.node(), &process.active_messages(), process.index(),
                                         inter_process->program, std::move(spec), group_call->buffers, finish);
  call->Enter();
  AtHandOver(HandOver::kEntered);
  using Clock = InterProcessCall::Clock;
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
  if (const Status failed = RunFailures::Get().Find(run_id); !failed.ok()) call->Fail(failed);
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
  Recorder::Get().SetAlgorithm(recorded_sites_[group], (*program)->algorithm);
  auto inter_process = std::make_shared<InterProcess>();
  inter_process->program = std::make_shared<const InterProcessProgram>(
      *program, std::move(process_of), std::move(node_of), single_copy, participant.input_count,
      participant.output_count, HashAttributes(spec_));
  inter_process->names = std::make_shared<const CallNames>(
      CallNames{Prefix(), {spec_.groups.begin() + begin, spec_.groups.begin() + end}});
  // Leaves space for the number of the iteration.
  std::string site = spec_.op + " at " + spec_.site;
  const std::string rest = " (" + participant.Sizes() + (spec_.algorithm.empty() ? "" : ", " + spec_.algorithm) +
                           "; call site " + std::to_string(number_ + 1) + ", iteration ";
  constexpr size_t kMaxBytes = sizeof(Slot::what) - sizeof("9223372036854775807)");
  site.resize(std::min(site.size(), kMaxBytes - rest.size()));
  inter_process->what = site + rest;
  std::lock_guard<std::mutex> lock(mutex_);
  return inter_process_.emplace(group, std::move(inter_process)).first->second.get();
}

void Rendezvous::Work(const std::shared_ptr<GroupCall>& group_call, int64_t own_position) {
  if (group_call->execution->Work()) Finish(*group_call, own_position);
}

// Called once per call, by the thread that ran its last step. own_position < 0: not the thread of a participant.
void Rendezvous::Finish(GroupCall& group_call, int64_t own_position) {
  group_call.record.End(true);
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
  if (program.ok() && !program_) {
    program_ = *program;
    for (const uint32_t site : recorded_sites_) Recorder::Get().SetAlgorithm(site, program_->algorithm);
  }
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

}  // namespace jaxcomm
