#include "joint_call.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "helpers.h"

namespace jaxcomm {
namespace {

// After a failure, for the rest of payloads that are on their way into buffers. Then their senders are cut off, so that
// the buffers are free. Enough for tens of megabytes over 1 Gbit/s.
constexpr auto kPatience = std::chrono::milliseconds(500);
// Beyond the deadline while running: whoever is waited for may itself wait for the one at fault, and is given time to
// say so. A few looks at the clock and the way of a message.
constexpr JointCall::Clock::duration kGrace = std::chrono::milliseconds(300);

}  // namespace

JointCall::JointCall(Node& node, Switchboard* switchboard, int32_t process, std::shared_ptr<const JointProgram> program,
                     Spec spec, std::vector<RankBuffers> buffers, Finish finish)
    : node_(node),
      switchboard_(switchboard),
      process_(process),
      program_(std::move(program)),
      spec_(std::move(spec)),
      buffers_(std::move(buffers)),
      finish_(std::move(finish)) {
  const std::vector<int32_t>& process_of = program_->process_of();
  const auto own = std::find(process_of.begin(), process_of.end(), process_) - process_of.begin();
  for (int32_t position = 0; position < program_->num_ranks(); ++position) {
    const int32_t process = process_of[position];
    num_local_ += process == process_;
    if (std::find(process_of.begin(), process_of.begin() + position, process) != process_of.begin() + position)
      continue;
    if (program_->node_of()[position] != program_->node_of()[own]) {
      distant_.push_back(process);
    } else if (process != process_) {
      Other other;
      other.peer = node_.Find(process);
      others_.push_back(other);
    }
  }
  has_left_.reset(new std::atomic<bool>[distant_.size()]());
}

void JointCall::Enter() {
  const StatusOr<Block> block = node_.Take(program_->block_bytes(process_));
  if (!block.ok()) return Fail(InvalidArgumentError(spec_.names->prefix + block.status().message()));
  block_ = *block;
  for (int32_t position = 0; position < program_->num_ranks(); ++position) {
    if (program_->process_of()[position] != process_) continue;
    const RankBuffers& own = buffers_[position];
    auto* addresses = reinterpret_cast<uint64_t*>(block_.data + program_->addresses(position));
    addresses[0] = reinterpret_cast<uint64_t>(own.input);
    addresses[1] = reinterpret_cast<uint64_t>(own.output);
    auto* signals = reinterpret_cast<std::atomic<uint32_t>*>(block_.data + program_->signals(position));
    for (int32_t from = 0; from < program_->num_ranks(); ++from) new (&signals[from]) std::atomic<uint32_t>(0);
    if (program_->windowed(Space::kInput)) {
      std::memcpy(block_.data + program_->window(Space::kInput, position), own.input,
                  static_cast<size_t>(program_->input_bytes()));
    }
  }
  std::string error;
  {
    std::lock_guard<std::mutex> lock(node_.board_mutex());
    Board& board = node_.board();
    if (board.Find(spec_.key) >= 0) {
      error = "two calls that this process can't tell apart are in flight";
    } else if ((slot_ = board.Reserve(spec_.key)) < 0) {
      error = "too many collectives are in flight";
    } else {
      Slot& slot = board.slots[slot_];
      slot.left.store(0);
      slot.failed.store(0);
      slot.over.store(0);
      slot.memory = block_.memory;
      slot.offset = block_.offset;
      slot.fingerprint = program_->fingerprint();
      // No further than its end: the rest of the slot need not be fetched from the core that has read it.
      const size_t length = std::min(spec_.names->what.size(), sizeof(slot.what) - 1);
      std::memcpy(slot.what, spec_.names->what.data(), length);
      slot.what[length] = 0;
      board.Publish(slot_, spec_.key);
    }
  }
  if (!error.empty()) {
    node_.Give(block_);
    return Fail(InvalidArgumentError(spec_.names->prefix + error));
  }
  for (Other& other : others_) other.peer->board().Ring();
  registered_ = !distant_.empty();
  if (registered_) switchboard_->Register(spec_.key, shared_from_this());
}

// With `claimed_` held.
bool JointCall::FindOthers() {
  bool all = true;
  for (Other& other : others_) {
    if (other.slot >= 0) continue;
    const Board& board = other.peer->board();
    const int slot = board.Find(spec_.key);
    if (slot < 0) {
      all = false;
      continue;
    }
    const Slot& theirs = board.slots[slot];
    other.slot = slot;  // from here on it has to be counted out
    if (theirs.fingerprint != program_->fingerprint()) {
      const std::string what(theirs.what, strnlen(theirs.what, sizeof(theirs.what)));
      return Agrees(other.peer->process(), theirs.fingerprint, what);
    }
    const StatusOr<char*> block = other.peer->BlockOf(theirs);
    if (!block.ok()) {
      Fail(Wrong(StatusCode::kDeadlineExceeded, "the memory of ranks " + RanksOf(other.peer->process()) +
                                                    " can't be mapped: " + block.status().message()));
      return false;
    }
    other.block = *block;
  }
  return all;
}

// With `claimed_` held: all have entered.
void JointCall::Begin() {
  std::vector<RankBuffers> buffers = buffers_;
  for (int32_t position = 0; position < program_->num_ranks(); ++position) {
    const int32_t process = program_->process_of()[position];
    RankBuffers& at = buffers[position];
    char* block = block_.data;
    at.local = process == process_;
    if (std::find(distant_.begin(), distant_.end(), process) != distant_.end()) {
      at.wire = this;
      continue;
    }
    if (!at.local) {
      const auto other =
          std::find_if(others_.begin(), others_.end(), [&](const Other& o) { return o.peer->process() == process; });
      block = other->block;
      at.board = &other->peer->board();
      const auto* addresses = reinterpret_cast<const uint64_t*>(block + program_->addresses(position));
      at.input = reinterpret_cast<const char*>(addresses[0]);
      at.output = reinterpret_cast<char*>(addresses[1]);
      at.input_pid = at.output_pid = other->peer->pid();
      if (program_->windowed(Space::kInput)) {
        at.input = block + program_->window(Space::kInput, position);
        at.input_pid = 0;
      }
    }
    if (program_->windowed(Space::kOutput)) {
      at.output = block + program_->window(Space::kOutput, position);
      at.output_pid = 0;
    }
    at.scratch = block + program_->window(Space::kScratch, position);
    at.signals = reinterpret_cast<std::atomic<uint32_t>*>(block + program_->signals(position));
  }
  execution_ = std::make_unique<Execution>(program_->program(), std::move(buffers));
}

// Work for several threads.
void JointCall::OfferHelp() {
  if (program_->program()->moved_bytes < kHelpBytes) return;
  Helpers::Get().Offer(num_local_ - 1, [self = shared_from_this()] {
    while (self->Advance() == AdvanceResult::kMoved) {
    }
  });
}

void JointCall::CountOut(Other& other) {
  if (other.slot < 0 || other.left) return;
  other.left = true;
  Board& board = other.peer->board();
  board.slots[other.slot].left.fetch_add(1);
  board.Ring();
}

const JointCall::Other* JointCall::Failed() const {
  for (const Other& other : others_) {
    if (other.slot >= 0 && other.peer->board().slots[other.slot].failed.load() != 0) return &other;
  }
  return nullptr;
}

void JointCall::FailLike(const Other& other) {
  const std::string why = other.peer->board().FindFailure(spec_.run).value_or("no reason known");
  Fail(Wrong(StatusCode::kDeadlineExceeded, "ranks " + RanksOf(other.peer->process()) + " gave up: " + why));
}

// Whether something happened.
bool JointCall::Step() {
  if (phase_.load() == Phase::kRunning) {
    const uint32_t before = execution_->progress();
    if (!execution_->Work()) {
      if (const int32_t pid = execution_->unreadable_pid()) {
        for (const Other& other : others_) {
          if (other.peer->pid() != pid) continue;
          // A process publishes why it aborts before it frees its memory.
          if (other.peer->board().FindFailure(spec_.run)) {
            FailLike(other);
          } else {
            Fail(Wrong(StatusCode::kDeadlineExceeded, "the memory of ranks " + RanksOf(other.peer->process()) +
                                                          " can't be read: their process has ended"));
          }
        }
      }
      return execution_->progress() != before;
    }
    // Whoever gives up may free its buffers at once: what was read from them counts only if it hasn't yet.
    if (const Other* other = Failed()) {
      FailLike(*other);
      return false;
    }
    for (Other& other : others_) CountOut(other);
    for (const int32_t process : distant_) {
      switchboard_->SayLeft(process, spec_.key, program_->fingerprint(), spec_.names->what);
    }
    phase_.store(Phase::kLeaving);
    return true;
  }

  if (claimed_.exchange(true)) return false;
  bool moved = false;
  if (phase_.load() == Phase::kEntering) {
    if (!FindOthers()) {
      // Not all are there, or they disagree.
    } else if (const Other* other = Failed()) {
      FailLike(*other);
    } else {
      Begin();
      phase_.store(Phase::kRunning);
      OfferHelp();
      moved = true;
    }
  } else if (phase_.load() == Phase::kLeaving && AllLeft()) {
    if (const Other* other = Failed()) {
      FailLike(*other);
    } else {
      moved = Close();
    }
  }
  claimed_.store(false);
  return moved;
}

bool JointCall::AllLeft() const {
  return node_.board().slots[slot_].left.load() == others_.size() && distant_left_.load() == distant_.size();
}

// Success, unless somebody has declared failure before.
bool JointCall::Close() {
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (!error_.ok() || (state_.load() & kDone) != 0) return false;
  if (program_->windowed(Space::kOutput)) {
    // Only now: peers may write to the window as long as they have not left.
    for (int32_t position = 0; position < program_->num_ranks(); ++position) {
      if (program_->process_of()[position] != process_) continue;
      const int64_t item_bytes = program_->program()->item_bytes;
      CopyElements({buffers_[position].output, program_->output_layout()}, 0,
                   {block_.data + program_->window(Space::kOutput, position), Layout()}, 0,
                   program_->output_bytes() / item_bytes, item_bytes, false);
    }
  }
  node_.board().Free(slot_);
  node_.Give(block_);
  state_.fetch_or(kDone);
  return true;
}

JointCall::AdvanceResult JointCall::Advance(int64_t own_position) {
  bool moved = false;
  if ((state_.fetch_add(1) & (kDone | kFailed)) == 0) moved = Step();
  if (Leave(own_position)) return AdvanceResult::kOver;
  return moved ? AdvanceResult::kMoved : AdvanceResult::kWaiting;
}

bool JointCall::Leave(int64_t own_position) {
  const uint32_t state = state_.fetch_sub(1) - 1;
  if ((state & kThreads) != 0 || (state & (kDone | kFailed)) == 0 || finished_.exchange(true)) return false;
  Status status;
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    status = error_;
  }
  if (!status.ok()) {
    for (Other& other : others_) CountOut(other);
    if (slot_ >= 0) node_.board().slots[slot_].over.store(1);
  }
  if (registered_) switchboard_->Unregister(spec_.key);
  let_go_.store(true);
  finish_(own_position, status);
  return true;
}

void JointCall::Fail(const Status& error) {
  state_.fetch_add(1);
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (error_.ok() && (state_.load() & kDone) == 0) {
      error_ = error;
      if (phase_.load() != Phase::kEntering) execution_->Cancel();  // before, nobody works on it, nor ever will
      {
        std::lock_guard<std::mutex> board_lock(node_.board_mutex());
        node_.board().AddFailure(spec_.run, error.message());
      }
      if (slot_ >= 0) node_.board().slots[slot_].failed.store(1);
      for (const Other& other : others_) other.peer->board().Ring();
      for (const int32_t process : distant_) switchboard_->SayGivenUp(process, spec_.key, error.message());
      state_.fetch_or(kFailed);
    }
  }
  Leave(-1);
}

bool JointCall::Reclaim() {
  if (slot_ < 0) return true;
  if (!let_go_.load()) return false;
  // From here on nobody finds the slot. Whoever has found it before had put the call on its own board before that.
  node_.board().Retire(slot_);
  for (const Other& other : others_) {
    const Board& board = other.peer->board();
    const int theirs = board.Find(spec_.key);
    if (theirs >= 0 && board.slots[theirs].over.load() == 0 && other.peer->alive()) return false;
  }
  node_.board().Free(slot_);
  node_.Give(block_);
  return true;
}

// A process that brings something else says so in its next message, which an unwanted payload must not hold up. Nor may
// it be on its way here when that makes the call fail: then it would have to be waited for, or its sender cut off.
void* JointCall::PlaceOf(uint64_t fingerprint, int32_t rank, Space space, int64_t offset_bytes, int64_t bytes) {
  if (fingerprint != program_->fingerprint()) return nullptr;
  if (rank < 0 || rank >= program_->num_ranks() || program_->process_of()[rank] != process_) return nullptr;
  int64_t size = 0;
  if (space == Space::kOutput) size = program_->output_bytes();
  if (space == Space::kScratch) {
    size = program_->program()->plans[rank].scratch_count * program_->program()->item_bytes;
  }
  if (offset_bytes < 0 || bytes > size || offset_bytes > size - bytes) return nullptr;
  if ((state_.fetch_add(1) & (kDone | kFailed)) != 0) {
    Leave(-1);
    return nullptr;
  }
  const bool direct = space == Space::kOutput && !program_->windowed(space);
  return (direct ? buffers_[rank].output : block_.data + program_->window(space, rank)) + offset_bytes;
}

void JointCall::OnLanded() { Leave(-1); }

void JointCall::OnSignal(int32_t from, int32_t to) {
  const int32_t n = program_->num_ranks();
  if (from < 0 || from >= n || to < 0 || to >= n || program_->process_of()[to] != process_) return;
  if ((state_.fetch_add(1) & (kDone | kFailed)) == 0) {
    reinterpret_cast<std::atomic<uint32_t>*>(block_.data + program_->signals(to))[from].fetch_add(1);
  }
  Leave(-1);
  node_.board().Ring();
}

bool JointCall::Agrees(int32_t process, uint64_t fingerprint, const std::string& what) {
  if (fingerprint == program_->fingerprint()) return true;
  Fail(Wrong(StatusCode::kInvalidArgument, "ranks " + RanksOf(process_) + " bring " + spec_.names->what + ", ranks " +
                                               RanksOf(process) + " bring " + what));
  return false;
}

void JointCall::OnEntered(int32_t process, uint64_t fingerprint, const std::string& what) {
  Agrees(process, fingerprint, what);
}

void JointCall::OnLeft(int32_t process, uint64_t fingerprint, const std::string& what) {
  if (!Agrees(process, fingerprint, what)) return;
  const auto sender = std::find(distant_.begin(), distant_.end(), process);
  if (sender == distant_.end()) return;
  has_left_[sender - distant_.begin()].store(true);
  distant_left_.fetch_add(1);
  node_.board().Ring();
}

void JointCall::OnGivenUp(int32_t process, const std::string& why) {
  Fail(Wrong(StatusCode::kDeadlineExceeded, "ranks " + RanksOf(process) + " gave up: " + why));
}

void JointCall::OnLost(int32_t process) {
  if (std::find(distant_.begin(), distant_.end(), process) == distant_.end()) return;
  if (phase_.load() == Phase::kLeaving && AllLeft()) return;
  Fail(Wrong(StatusCode::kDeadlineExceeded, "the process of ranks " + RanksOf(process) +
                                                " can't be reached: " + switchboard_->Reachable(process).message()));
}

void JointCall::Put(const Place& to, std::unique_ptr<char[]> data, int64_t count) {
  const int64_t item_bytes = program_->program()->item_bytes;
  switchboard_->Put(program_->process_of()[to.rank], spec_.key, program_->fingerprint(), to, to.offset * item_bytes,
                    std::move(data), count * item_bytes);
}

void JointCall::Signal(int32_t from, int32_t to) {
  switchboard_->Signal(program_->process_of()[to], spec_.key, from, to);
}

Status JointCall::Wrong(StatusCode code, const std::string& text) const {
  constexpr const char* kPhases[] = {"entering", "running", "leaving"};
  return {code, spec_.names->prefix + "while " + kPhases[static_cast<int>(phase_.load())] + ", " + text};
}

std::string JointCall::RanksOf(int32_t process) const {
  std::string text;
  for (int32_t position = 0; position < program_->num_ranks(); ++position) {
    if (program_->process_of()[position] != process) continue;
    text += (text.empty() ? "[" : ", ") + std::to_string(spec_.names->ranks[position]);
  }
  return text + "] (process " + std::to_string(process) + ")";
}

std::string JointCall::DescribeLate(const std::string& within) const {
  const Phase phase = phase_.load();
  if (phase == Phase::kRunning) {
    const auto [rank, peer] = execution_->WaitingPair();
    if (rank < 0) return "the collective did not end" + within;
    const int32_t process = program_->process_of()[peer];
    const bool distant = std::find(distant_.begin(), distant_.end(), process) != distant_.end();
    const std::string elsewhere = distant ? switchboard_->Elsewhere(process) : "";
    return "rank " + std::to_string(spec_.names->ranks[rank]) + " in " + spec_.names->what +
           " got no signal from rank " + std::to_string(spec_.names->ranks[peer]) + " (process " +
           std::to_string(process) + ")" + (elsewhere.empty() ? "" : ", which is" + elsewhere + ",") + within;
  }
  std::string late;
  for (const Other& other : others_) {
    const Board& board = other.peer->board();
    const bool entered = board.Find(spec_.key) >= 0;
    if (phase == Phase::kEntering && entered) continue;
    late += (late.empty() ? "ranks " : "; ranks ") + RanksOf(other.peer->process());
    if (phase == Phase::kLeaving) continue;
    std::string elsewhere;
    for (int slot = 0; slot < Board::kNumSlots; ++slot) {
      if (board.keys[slot].load() == 0 || board.slots[slot].failed.load() != 0) continue;
      const char* what = board.slots[slot].what;
      elsewhere +=
          (elsewhere.empty() ? " in " : " and in ") + std::string(what, strnlen(what, sizeof(board.slots[slot].what)));
      if (elsewhere.size() > 600) break;
    }
    late += elsewhere.empty() ? " in no collective" : elsewhere;
  }
  for (size_t i = 0; i < distant_.size() && phase == Phase::kLeaving; ++i) {
    if (!has_left_[i].load()) late += (late.empty() ? "ranks " : "; ranks ") + RanksOf(distant_[i]);
  }
  return "ranks " + RanksOf(process_) + " in " + spec_.names->what + " were not " +
         (phase == Phase::kEntering ? "joined" : "left") + within + " by " + late;
}

void JointCall::Check(Clock::time_point now) {
  const uint32_t state = state_.load();
  if ((state & kFailed) != 0 && (state & kThreads) != 0) {
    if (give_up_at_ == Clock::time_point{}) give_up_at_ = now + kPatience;
    if (now >= give_up_at_ && switchboard_ != nullptr) switchboard_->Abandon(*this);
  }
  if ((state & (kDone | kFailed)) != 0) return;
  bool ended = false;
  for (const Other& other : others_) ended |= !other.peer->alive();
  // Whoever has left all its calls may end. It counted itself out before, so this look comes after that.
  if (phase_.load() == Phase::kLeaving && AllLeft()) return;
  for (const int32_t process : distant_) {
    if (!switchboard_->Reachable(process).ok()) return OnLost(process);
  }
  for (const Other& other : others_) {
    if (ended && !other.peer->alive()) {
      return Fail(Wrong(StatusCode::kDeadlineExceeded,
                        "the process of ranks " + RanksOf(other.peer->process()) + " has ended"));
    }
    if (other.peer->board().FindFailure(spec_.run)) return FailLike(other);
  }
  const auto grace = phase_.load() == Phase::kRunning ? kGrace : Clock::duration::zero();
  if (wait_.Expired(now, grace)) return Fail(Wrong(StatusCode::kDeadlineExceeded, DescribeLate(wait_.WithinTimeout())));
  if (wait_.WarningDue(now)) {
    wait_.Warn([&](const std::string& within) {
      return Wrong(StatusCode::kDeadlineExceeded, DescribeLate(within)).message();
    });
  }
  // Only those who wait are told: a message more would slow down small collectives.
  if (std::exchange(said_entered_, true)) return;
  for (const int32_t process : distant_) {
    switchboard_->SayEntered(process, spec_.key, program_->fingerprint(), spec_.names->what);
  }
}

}  // namespace jaxcomm
