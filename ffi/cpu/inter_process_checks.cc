// Checks of a call between processes while it waits: liveness, deadlines, calls that do not match. Also their messages.
#include <algorithm>
#include <utility>

#include "cpu/inter_process_call.h"
#include "cpu/row_checks.h"

namespace jaxcomm {
namespace {

// Time after a failure for the next of the payloads that are still on their way. Then their peers are dropped, so that
// the buffers are free. Enough for tens of megabytes over 1 Gbit/s.
constexpr auto kPatience = std::chrono::milliseconds(500);
// Added to the deadline while running. A process blocked on another waiter lets that one report the root cause first.
// Long enough for a few calls of Check() and a message.
constexpr InterProcessCall::Clock::duration kGrace = std::chrono::milliseconds(300);
// How often a waiting call is compared with the calls of other processes.
constexpr auto kCompareEvery = std::chrono::milliseconds(200);

}  // namespace

void InterProcessCall::FailLike(const Other& other) {
  const std::optional<std::string> why = other.peer->control_segment().FindFailure(spec_.run.run_id);
  OnAborted(other.peer->process(), why.value_or("no reason known"));
}

std::string InterProcessCall::Mismatch(int32_t process, const std::string& what) const {
  return "calls do not match: ranks " + RanksOf(process_) + " are in " + spec_.what + ", ranks " + RanksOf(process) +
         " are in " + what;
}

bool InterProcessCall::Agrees(int32_t process, const Fingerprint& fingerprint, const std::string& what) {
  if (fingerprint == fingerprint_) return true;
  std::string difference = what == spec_.what ? ", with different attributes or plans" : "";
  if (fingerprint.program == fingerprint_.program) difference = kDifferentTables;
  Fail(Wrong(StatusCode::kInvalidArgument, Mismatch(process, what) + difference));
  return false;
}

// A process of the group that is in another run and not in this one. None if a process is in several runs: some
// programs execute at the same time, and the process may enter this call later.
std::optional<InterProcessCall::OtherRun> InterProcessCall::FindOtherRun() const {
  ControlSegment& own = node_.control_segment();
  bool in_several_runs = false;
  own.VisitCalls([&](const ControlSegment::Call& call) { in_several_runs |= call.run_id != spec_.run.run_id; });
  if (in_several_runs) return std::nullopt;
  // This process has aborted the run, and the other process will do so.
  const auto is_over = [&](int64_t run_id) { return own.FindFailure(run_id).has_value(); };
  for (const Other& other : others_) {
    if (phase_.load() != Phase::kEntryBarrier) break;  // all processes of this node are in the call
    std::optional<OtherRun> found;
    std::optional<int64_t> their_run_id;
    bool skip = false;
    other.peer->control_segment().VisitCalls([&](const ControlSegment::Call& call) {
      skip |= call.run_id == spec_.run.run_id || call.run_id != their_run_id.value_or(call.run_id);
      their_run_id = call.run_id;
      // A process increments `exited` of a call that it has left.
      if (call.group != spec_.run.group || call.exited != 0) return;
      if (!found || call.key < found->key) found = {other.peer->process(), call.key, call.run_id, call.what};
    });
    if (found && !skip && !is_over(found->run_id)) return found;
  }
  for (size_t i = 0; i < distant_.size(); ++i) {
    // A process may have left this call and be in its next run, also while its payloads for this call still arrive. The
    // network announces them before the message about the next run.
    if (has_entered_[i].load() || has_received_[i].load() || has_exited_[i].load()) continue;
    const auto call = active_messages_->CallOfOtherRun(distant_[i], spec_.run);
    if (call && !is_over(call->run_id)) return OtherRun{distant_[i], call->key, call->run_id, call->what};
  }
  return std::nullopt;
}

// Fails this call and that of another process if that process has been in another run for JAXCOMM_WARN_S. Until then,
// a thread that dispatches its programs in another order, or late data, may still arrive. The time is counted in
// comparisons, so that time in which this process is stopped does not count.
void InterProcessCall::CompareRuns(Clock::time_point now) {
  next_comparison_ = now + kCompareEvery;
  const std::optional<OtherRun> found = FindOtherRun();
  if (!found || !other_run_ || found->process != other_run_->process || found->key != other_run_->key) {
    other_run_ = found;
    num_comparisons_ = 0;
    return;
  }
  if (spec_.numbered && found->run_id >> 32 == spec_.run.run_id >> 32) {
    // Processes make these calls in one order. The one with the lower number lacks a process, so only that one fails.
    if (found->run_id < spec_.run.run_id) return;
    return Fail(Wrong(StatusCode::kInvalidArgument, Mismatch(found->process, found->what) + ", a later call"));
  }
  if (++num_comparisons_ * std::chrono::duration<double>(kCompareEvery).count() < wait_.warn_s()) return;
  const Status error =
      Wrong(StatusCode::kInvalidArgument, Mismatch(found->process, found->what) + ", in another program or execution");
  if (std::find(distant_.begin(), distant_.end(), found->process) != distant_.end()) {
    active_messages_->SendAborted(found->process, found->key, error.message());
  } else {
    std::lock_guard<std::mutex> lock(node_.control_segment_mutex());
    node_.control_segment().AddFailure(found->run_id, error.message());
  }
  Fail(error);
}

Status InterProcessCall::Wrong(StatusCode code, const std::string& text) const {
  constexpr const char* kPhases[] = {"in the entry barrier", "while running", "in the exit barrier"};
  return {code, spec_.names->prefix + kPhases[static_cast<int>(phase_.load())] + ", " + text};
}

std::string InterProcessCall::RanksOf(int32_t process) const {
  std::string text;
  for (int32_t position = 0; position < program_->num_ranks(); ++position) {
    if (program_->process_of()[position] != process) continue;
    text += (text.empty() ? "[" : ", ") + std::to_string(spec_.names->ranks[position]);
  }
  return text + "] (process " + std::to_string(process) + ")";
}

std::string InterProcessCall::DescribeLate(const std::string& within) const {
  const Phase phase = phase_.load();
  if (phase == Phase::kRunning) {
    const auto [rank, peer] = execution_->WaitingPair();
    if (rank < 0) return "the collective did not finish" + within;
    const int32_t process = program_->process_of()[peer];
    const bool distant = std::find(distant_.begin(), distant_.end(), process) != distant_.end();
    const std::string elsewhere = distant ? active_messages_->OtherCallsOf(process) : "";
    return "rank " + std::to_string(spec_.names->ranks[rank]) + " in " + spec_.what + " got no signal from rank " +
           std::to_string(spec_.names->ranks[peer]) + " (process " + std::to_string(process) + ")" +
           (elsewhere.empty() ? "" : ", which is" + elsewhere + ",") + within;
  }
  std::string late;
  for (const Other& other : others_) {
    const ControlSegment& control_segment = other.peer->control_segment();
    const bool entered = control_segment.Find(spec_.key) >= 0;
    if (phase == Phase::kEntryBarrier && entered) continue;
    late += (late.empty() ? "ranks " : "; ranks ") + RanksOf(other.peer->process());
    if (phase == Phase::kExitBarrier) continue;
    std::string elsewhere;
    control_segment.VisitCalls([&](const ControlSegment::Call& call) {
      if (elsewhere.size() <= 600) elsewhere += (elsewhere.empty() ? " in " : " and in ") + call.what;
    });
    late += elsewhere.empty() ? " in no collective" : elsewhere;
  }
  for (size_t i = 0; i < distant_.size() && phase == Phase::kExitBarrier; ++i) {
    if (!has_exited_[i].load()) late += (late.empty() ? "ranks " : "; ranks ") + RanksOf(distant_[i]);
  }
  return "ranks " + RanksOf(process_) + " in " + spec_.what + " waited for " + late + ", which did not " +
         (phase == Phase::kEntryBarrier ? "enter" : "leave") + " the call" + within;
}

// Drops the processes that do not take what this one sends. If they have left the call, that is its error.
void InterProcessCall::EndSends() {
  if (failed()) {
    active_messages_->CancelPuts(*this);
    return;
  }
  state_.fetch_add(1);  // the call must not finish before its error is set
  std::string late;
  for (const int32_t process : active_messages_->CancelPuts(*this))
    late += (late.empty() ? "" : ", ") + RanksOf(process);
  if (!late.empty()) {
    std::lock_guard<std::mutex> lock(error_mutex_);
    error_ = Wrong(StatusCode::kDeadlineExceeded, "ranks " + late + " did not take their data" + wait_.WithinTimeout());
  }
  Leave(-1);
}

void InterProcessCall::Check(Clock::time_point now) {
  const uint32_t state = state_.load();
  const bool ends = (state & kFailed) != 0 || ((state & kDone) != 0 && wait_.Expired(now));
  if (const uint32_t pending = state & kThreads; ends && pending != 0 && active_messages_ != nullptr) {
    if (pending != pending_) cancel_puts_at_ = now + kPatience;  // a slow network still moves them
    pending_ = pending;
    if (now >= cancel_puts_at_) EndSends();
  }
  if ((state & (kDone | kFailed)) != 0) return;
  bool ended = false;
  for (const Other& other : others_) ended |= !other.peer->alive();
  // A process may end once it has left all its calls. So AllExited() is checked after alive().
  if (phase_.load() == Phase::kExitBarrier && AllExited()) return;
  for (const int32_t process : distant_) {
    if (const auto why = active_messages_->FailureOf(process, spec_.run.run_id)) return OnAborted(process, *why);
    if (!active_messages_->Reachable(process).ok()) return OnLost(process);
  }
  for (const Other& other : others_) {
    if (ended && !other.peer->alive()) {
      return Fail(Wrong(StatusCode::kDeadlineExceeded,
                        "the process of ranks " + RanksOf(other.peer->process()) + " has ended"));
    }
    if (other.peer->control_segment().FindFailure(spec_.run.run_id)) return FailLike(other);
  }
  if (spec_.run.group != 0 && now >= next_comparison_) {
    CompareRuns(now);
    if (failed()) return;
  }
  const auto grace = phase_.load() == Phase::kRunning ? kGrace : Clock::duration::zero();
  if (wait_.Expired(now, grace)) {
    const std::string late = DescribeLate(wait_.WithinTimeout());
    // A process whose wait expired at the same time may have left its call before it could be described.
    for (const Other& other : others_) {
      if (other.peer->control_segment().FindFailure(spec_.run.run_id)) return FailLike(other);
    }
    return Fail(Wrong(StatusCode::kDeadlineExceeded, late));
  }
  if (now >= next_record_ && phase_.load() == Phase::kRunning) {
    const auto [rank, peer] = execution_->WaitingPair();
    const auto& ranks = spec_.names->ranks;
    spec_.record.Waits(rank < 0 ? -1 : ranks[rank], peer < 0 ? -1 : ranks[peer]);
    next_record_ = now + kCompareEvery;
  }
  if (wait_.WarningDue(now)) {
    Recorder::Get().Trigger();
    wait_.Warn([&](const std::string& within) {
      return Wrong(StatusCode::kDeadlineExceeded, DescribeLate(within)).message();
    });
  }
  // Sent only when a call waits: another message would slow down small collectives.
  if (std::exchange(sent_entered_, true)) return;
  for (const int32_t process : distant_) {
    active_messages_->SendEntered(process, spec_.key, fingerprint_, spec_.run, spec_.what);
  }
}

}  // namespace jaxcomm
