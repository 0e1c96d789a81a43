#include "cpu/inter_process_call.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "cpu/worker_pool.h"

namespace jaxcomm {

InterProcessCall::InterProcessCall(Node& node, ActiveMessages* active_messages, int32_t process,
                                   std::shared_ptr<const InterProcessProgram> program, Spec spec,
                                   std::vector<RankBuffers> buffers, Finish finish)
    : node_(node),
      active_messages_(active_messages),
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
  has_entered_.reset(new std::atomic<bool>[distant_.size()]());
  has_received_.reset(new std::atomic<bool>[distant_.size()]());
  has_exited_.reset(new std::atomic<bool>[distant_.size()]());
}

void InterProcessCall::Enter() {
  const StatusOr<Block> block = node_.Allocate(program_->block_bytes(process_));
  if (!block.ok()) return Fail(InvalidArgumentError(spec_.names->prefix + block.status().message()));
  block_ = *block;
  for (int32_t position = 0; position < program_->num_ranks(); ++position) {
    if (program_->process_of()[position] != process_) continue;
    const RankBuffers& own = buffers_[position];
    const auto share = [&](uint64_t at, const void* data, int64_t bytes) {
      std::memcpy(block_.data + at, data, static_cast<size_t>(bytes));
    };
    const uint64_t addresses[] = {reinterpret_cast<uint64_t>(own.input), reinterpret_cast<uint64_t>(own.output)};
    share(program_->addresses(position), addresses, sizeof(addresses));
    auto* signals = reinterpret_cast<std::atomic<uint32_t>*>(block_.data + program_->signals(position));
    for (int32_t from = 0; from < program_->num_ranks(); ++from) new (&signals[from]) std::atomic<uint32_t>(0);
    if (program_->windowed(Space::kInput)) {
      share(program_->window(Space::kInput, position), own.input, program_->ReadBytes(position, spec_.slices));
    }
    if (program_->lists_bytes() > 0) share(program_->lists(position), own.index, program_->lists_bytes());
    if (program_->keeps_output()) {  // rows that no rank writes keep the values that the output starts with
      share(program_->window(Space::kOutput, position), own.output, program_->output_bytes());
    }
  }
  std::string error;
  {
    std::lock_guard<std::mutex> lock(node_.control_segment_mutex());
    ControlSegment& control_segment = node_.control_segment();
    if (control_segment.Find(spec_.key) >= 0) {
      error = "another call with the same key is in flight in this process";
    } else if ((slot_ = control_segment.Reserve(spec_.key)) < 0) {
      error = "too many collectives are in flight: no free slot in the control segment";
    } else {
      Slot& slot = control_segment.slots[slot_];
      slot.exited.store(0);
      slot.failed.store(0);
      slot.over.store(0);
      slot.memory = block_.memory;
      slot.offset = block_.offset;
      slot.fingerprint = fingerprint_;
      slot.run_id.store(spec_.run.run_id);
      slot.group.store(spec_.run.group);
      // Copies the text only: the rest of the slot stays in the cache of the core that last read it.
      const size_t length = std::min(spec_.what.size(), sizeof(slot.what) - 1);
      std::memcpy(slot.what, spec_.what.data(), length);
      slot.what[length] = 0;
      control_segment.Publish(slot_, spec_.key);
    }
  }
  if (!error.empty()) {
    node_.Release(block_);
    return Fail(InvalidArgumentError(spec_.names->prefix + error));
  }
  for (Other& other : others_) other.peer->control_segment().RingDoorbell();
  registered_ = !distant_.empty();
  if (registered_) active_messages_->Register(spec_.key, shared_from_this());
}

// Maps the blocks of all others that have entered. Returns whether all have. Called with `claimed_` held.
bool InterProcessCall::FindOthers() {
  bool all = true;
  for (Other& other : others_) {
    if (other.slot >= 0) continue;
    const ControlSegment& control_segment = other.peer->control_segment();
    const int slot = control_segment.Find(spec_.key);
    if (slot < 0) {
      all = false;
      continue;
    }
    const Slot& theirs = control_segment.slots[slot];
    other.slot = slot;  // from here on, its `exited` must be incremented
    if (theirs.fingerprint != fingerprint_) {
      return Agrees(other.peer->process(), theirs.fingerprint, theirs.What());
    }
    const StatusOr<char*> block = other.peer->BlockOf(theirs);
    if (!block.ok()) {
      Fail(Wrong(StatusCode::kDeadlineExceeded, "the memory of ranks " + RanksOf(other.peer->process()) +
                                                    " cannot be mapped: " + block.status().message()));
      return false;
    }
    other.block = *block;
  }
  return all;
}

// Makes the execution once all have entered. Called with `claimed_` held.
void InterProcessCall::Begin() {
  std::vector<RankBuffers> buffers = buffers_;
  for (int32_t position = 0; position < program_->num_ranks(); ++position) {
    const int32_t process = program_->process_of()[position];
    RankBuffers& at = buffers[position];
    char* block = block_.data;
    at.local = process == process_;
    if (std::find(distant_.begin(), distant_.end(), process) != distant_.end()) {
      at.remote = this;
      continue;
    }
    if (!at.local) {
      const auto other =
          std::find_if(others_.begin(), others_.end(), [&](const Other& o) { return o.peer->process() == process; });
      block = other->block;
      at.control_segment = &other->peer->control_segment();
      const auto* addresses = reinterpret_cast<const uint64_t*>(block + program_->addresses(position));
      at.input = reinterpret_cast<const char*>(addresses[0]);
      at.output = reinterpret_cast<char*>(addresses[1]);
      at.input_pid = at.output_pid = other->peer->pid();
      if (program_->lists_bytes() > 0) at.index = reinterpret_cast<const int32_t*>(block + program_->lists(position));
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
  execution_ = std::make_unique<Execution>(program_->program(), std::move(buffers), spec_.slices);
}

// Large calls run on several threads.
void InterProcessCall::SubmitToWorkers() {
  if (program_->program()->moved_bytes < kMinParallelBytes) return;
  WorkerPool::Get().Submit(num_local_ - 1 + spec_.asynchronous, [self = shared_from_this()] {
    while (self->Advance() == AdvanceResult::kMoved) {
    }
  });
}

void InterProcessCall::LeaveSlot(Other& other) {
  if (other.slot < 0 || other.exited) return;
  other.exited = true;
  ControlSegment& control_segment = other.peer->control_segment();
  control_segment.slots[other.slot].exited.fetch_add(1);
  control_segment.RingDoorbell();
}

const InterProcessCall::Other* InterProcessCall::Failed() const {
  for (const Other& other : others_) {
    if (other.slot >= 0 && other.peer->control_segment().slots[other.slot].failed.load() != 0) return &other;
  }
  return nullptr;
}

// Returns whether the call has advanced.
bool InterProcessCall::Step() {
  if (phase_.load() == Phase::kRunning) {
    const uint32_t before = execution_->num_advances();
    if (!execution_->Work()) {
      if (const int32_t pid = execution_->unreadable_pid()) {
        for (const Other& other : others_) {
          if (other.peer->pid() != pid) continue;
          // A process publishes its error before it frees its memory.
          if (other.peer->control_segment().FindFailure(spec_.run.run_id)) {
            FailLike(other);
          } else {
            Fail(Wrong(StatusCode::kDeadlineExceeded, "the memory of ranks " + RanksOf(other.peer->process()) +
                                                          " cannot be read: their process has ended"));
          }
        }
      }
      return execution_->num_advances() != before;
    }
    // A process that aborts may free its buffers at once. The data read from them is valid only if it has not aborted.
    if (const Other* other = Failed()) {
      FailLike(*other);
      return false;
    }
    for (Other& other : others_) LeaveSlot(other);
    for (const int32_t process : distant_) {
      active_messages_->SendExited(process, spec_.key, fingerprint_, spec_.what);
    }
    phase_.store(Phase::kExitBarrier);
    spec_.record.SetPhase(CallPhase::kExitBarrier);
    return true;
  }

  if (claimed_.exchange(true)) return false;
  bool moved = false;
  if (phase_.load() == Phase::kEntryBarrier) {
    if (!FindOthers()) {
      // Not all have entered, or their calls differ.
    } else if (const Other* other = Failed()) {
      FailLike(*other);
    } else {
      Begin();
      phase_.store(Phase::kRunning);
      spec_.record.Running();
      SubmitToWorkers();
      moved = true;
    }
  } else if (phase_.load() == Phase::kExitBarrier && AllExited()) {
    if (const Other* other = Failed()) {
      FailLike(*other);
    } else {
      moved = Close();
    }
  }
  claimed_.store(false);
  return moved;
}

bool InterProcessCall::AllExited() const {
  return node_.control_segment().slots[slot_].exited.load() == others_.size() &&
         num_distant_exited_.load() == distant_.size();
}

// Ends the call with success, unless it has failed before.
bool InterProcessCall::Close() {
  std::lock_guard<std::mutex> lock(error_mutex_);
  if (!error_.ok() || (state_.load() & kDone) != 0) return false;
  if (program_->windowed(Space::kOutput)) {
    // Not earlier: peers may write to the window until they have left the call.
    for (int32_t position = 0; position < program_->num_ranks(); ++position) {
      if (program_->process_of()[position] != process_) continue;
      CopyElements(program_->output(position, buffers_[position].output), 0,
                   {block_.data + program_->window(Space::kOutput, position), BlockLayout(), 0, nullptr}, 0,
                   program_->output_count(position), program_->program()->item_bytes, false);
    }
  }
  node_.control_segment().Free(slot_);
  node_.Release(block_);
  state_.fetch_or(kDone);
  return true;
}

InterProcessCall::AdvanceResult InterProcessCall::Advance(int64_t own_position) {
  bool moved = false;
  if ((state_.fetch_add(1) & (kDone | kFailed)) == 0) moved = Step();
  if (Leave(own_position)) return AdvanceResult::kOver;
  return moved ? AdvanceResult::kMoved : AdvanceResult::kWaiting;
}

bool InterProcessCall::Leave(int64_t own_position) {
  const uint32_t state = state_.fetch_sub(1) - 1;
  if ((state & kThreads) != 0 || (state & (kDone | kFailed)) == 0 || finished_.exchange(true)) return false;
  Status status;
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    status = error_;
  }
  if ((state & kFailed) != 0) {
    for (Other& other : others_) LeaveSlot(other);
    if (slot_ >= 0) node_.control_segment().slots[slot_].over.store(1);
  }
  if (registered_) active_messages_->Unregister(spec_.key);
  released_.store(true);
  finish_(own_position, status);
  return true;
}

void InterProcessCall::Fail(const Status& error) {
  state_.fetch_add(1);
  {
    std::lock_guard<std::mutex> lock(error_mutex_);
    if (error_.ok() && (state_.load() & kDone) == 0) {
      error_ = error;
      if (phase_.load() != Phase::kEntryBarrier) execution_->Cancel();  // in the entry barrier, it never starts
      {
        std::lock_guard<std::mutex> lock_of_segment(node_.control_segment_mutex());
        node_.control_segment().AddFailure(spec_.run.run_id, error.message());
      }
      if (slot_ >= 0) node_.control_segment().slots[slot_].failed.store(1);
      for (const Other& other : others_) other.peer->control_segment().RingDoorbell();
      for (const int32_t process : distant_) active_messages_->SendAborted(process, spec_.key, error.message());
      state_.fetch_or(kFailed);
    }
  }
  Leave(-1);
}

bool InterProcessCall::Reclaim() {
  if (slot_ < 0) return true;
  if (!released_.load()) return false;
  // From here on, no process finds the slot. A process that found it earlier had published the call in its own control
  // segment before that.
  node_.control_segment().Retire(slot_);
  for (const Other& other : others_) {
    const ControlSegment& control_segment = other.peer->control_segment();
    const int theirs = control_segment.Find(spec_.key);
    if (theirs >= 0 && control_segment.slots[theirs].over.load() == 0 && other.peer->alive()) return false;
  }
  node_.control_segment().Free(slot_);
  node_.Release(block_);
  return true;
}

// Payloads of a process with another fingerprint are dropped. Its next message reports the mismatch, and a payload must
// not delay that message. Nor may a payload be arriving when the mismatch makes the call fail: the call would have to
// wait for it or drop its sender.
void* InterProcessCall::DestinationOf(int32_t process, const Fingerprint& fingerprint, int32_t rank, Space space,
                                      int64_t offset_bytes, int64_t bytes) {
  if (fingerprint != fingerprint_) return nullptr;
  const auto sender = std::find(distant_.begin(), distant_.end(), process);
  if (sender != distant_.end()) has_received_[sender - distant_.begin()].store(true);
  if (rank < 0 || rank >= program_->num_ranks() || program_->process_of()[rank] != process_) return nullptr;
  int64_t size = 0;
  if (space == Space::kOutput) size = program_->output_bytes();
  if (space == Space::kScratch) size = program_->program()->scratch_bytes(static_cast<size_t>(rank));
  if (offset_bytes < 0 || bytes > size || offset_bytes > size - bytes) return nullptr;
  if ((state_.fetch_add(1) & (kDone | kFailed)) != 0) {
    Leave(-1);
    return nullptr;
  }
  const bool direct = space == Space::kOutput && !program_->windowed(space);
  return (direct ? buffers_[rank].output : block_.data + program_->window(space, rank)) + offset_bytes;
}

void InterProcessCall::OnPutDone() { Leave(-1); }

void InterProcessCall::OnSignal(int32_t from, int32_t to) {
  const int32_t n = program_->num_ranks();
  if (from < 0 || from >= n || to < 0 || to >= n || program_->process_of()[to] != process_) return;
  if ((state_.fetch_add(1) & (kDone | kFailed)) == 0) {
    reinterpret_cast<std::atomic<uint32_t>*>(block_.data + program_->signals(to))[from].fetch_add(1);
  }
  Leave(-1);
  node_.control_segment().RingDoorbell();
}

void InterProcessCall::OnEntered(int32_t process, const Fingerprint& fingerprint, const std::string& what) {
  if (!Agrees(process, fingerprint, what)) return;
  const auto sender = std::find(distant_.begin(), distant_.end(), process);
  if (sender != distant_.end()) has_entered_[sender - distant_.begin()].store(true);
}

void InterProcessCall::OnExited(int32_t process, const Fingerprint& fingerprint, const std::string& what) {
  if (!Agrees(process, fingerprint, what)) return;
  const auto sender = std::find(distant_.begin(), distant_.end(), process);
  if (sender == distant_.end()) return;
  has_exited_[sender - distant_.begin()].store(true);
  num_distant_exited_.fetch_add(1);
  node_.control_segment().RingDoorbell();
}

void InterProcessCall::OnAborted(int32_t process, const std::string& why) {
  std::string text = "ranks " + RanksOf(process) + " aborted";
  // A process whose time limit has passed may have waited for this one, which waits for a third one: the cause.
  const bool waiting = phase_.load() == Phase::kRunning && BoundedWait::IsTimeout(why);
  const auto [rank, peer] = waiting ? execution_->WaitingPair() : std::pair(-1, -1);
  if (rank >= 0 && program_->process_of()[peer] != process) {
    text += "; at that time, rank " + std::to_string(spec_.names->ranks[rank]) + " waited for rank " +
            std::to_string(spec_.names->ranks[peer]) + " (process " + std::to_string(program_->process_of()[peer]) +
            ")";
  }
  Fail(Wrong(StatusCode::kDeadlineExceeded, text + ": " + why));
}

void InterProcessCall::OnLost(int32_t process) {
  if (std::find(distant_.begin(), distant_.end(), process) == distant_.end()) return;
  if (phase_.load() == Phase::kExitBarrier && AllExited()) return;
  Fail(Wrong(StatusCode::kDeadlineExceeded, "the process of ranks " + RanksOf(process) + " cannot be reached: " +
                                                active_messages_->Reachable(process).message()));
}

void InterProcessCall::Put(const Place& to, std::unique_ptr<char[]> data, int64_t count) {
  const int64_t item_bytes = program_->program()->item_bytes;
  active_messages_->Put(program_->process_of()[to.rank], spec_.key, fingerprint_, to, to.offset * item_bytes,
                        std::move(data), count * item_bytes);
}

void InterProcessCall::PutInput(const Place& to, const char* input, int64_t count) {
  const int64_t item_bytes = program_->program()->item_bytes;
  state_.fetch_add(1);  // until OnPutDone()
  active_messages_->PutInput(program_->process_of()[to.rank], spec_.key, fingerprint_, to, to.offset * item_bytes,
                             input, count * item_bytes, shared_from_this());
}

void InterProcessCall::Signal(int32_t from, int32_t to) {
  active_messages_->Signal(program_->process_of()[to], spec_.key, from, to);
}

}  // namespace jaxcomm
