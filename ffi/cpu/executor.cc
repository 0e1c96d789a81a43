#include "cpu/executor.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include "cpu/row_lists.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxcomm {
namespace {

// XLA's threads flush subnormals to zero, other threads do not. Steps run on both kinds and must agree.
class IeeeArithmetic {
#if defined(__x86_64__)
 public:
  IeeeArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~IeeeArithmetic() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // to nearest, no flushing, no traps
  unsigned saved_;
#endif
};

// Sources with fragments shorter than kShortFragmentBytes are copied to contiguous memory first, this many elements at
// a time.
constexpr int64_t kGatherTile = 1024;
constexpr int64_t kShortFragmentBytes = 256;
// The same for sources in other processes: one system call per tile, and all tiles stay in the cache.
constexpr int64_t kRemoteTileBytes = 128 << 10;
// Larger parts of an input go to the network without a copy. After a failure, a call waits for them, and drops a peer
// that does not take them: too much for parts that are copied in microseconds.
constexpr int64_t kCopiedBytes = 64 << 10;

}  // namespace

std::shared_ptr<Program> Program::Make(std::vector<Plan> plans, BlockLayout input, BlockLayout output,
                                       int64_t item_bytes, ReduceFn reduce, int32_t type) {
  auto program = std::make_shared<Program>();
  for (const Plan& plan : plans) {
    for (const Step& step : plan.steps) {
      program->moved_bytes += step.count * item_bytes * std::max(1, step.num_sources);
    }
  }
  program->stream = program->moved_bytes >= kStreamBytes;
  program->plans = std::move(plans);
  program->input = input;
  program->output = output;
  program->item_bytes = item_bytes;
  program->type = type;
  program->reduce = reduce;
  return program;
}

std::shared_ptr<Program> Program::MakeOfLists(std::vector<Plan> plans, int64_t input_count, int64_t output_count,
                                              int64_t row_count, int64_t item_bytes, int32_t type) {
  const auto num_ranks = static_cast<int64_t>(plans.size());
  auto program = std::make_shared<Program>(*Make(std::move(plans), {1, input_count, input_count},
                                                 {1, output_count, output_count}, item_bytes, nullptr, type));
  program->row_count = row_count;
  program->moved_bytes = num_ranks * std::min(input_count, output_count) * item_bytes;  // at most, unless lists overlap
  program->stream = program->moved_bytes >= kStreamBytes;
  return program;
}

Execution::Execution(std::shared_ptr<const Program> program, std::vector<RankBuffers> buffers, Slices slices)
    : program_(std::move(program)),
      buffers_(std::move(buffers)),
      slices_(slices),
      num_ranks_(static_cast<int32_t>(buffers_.size())),
      ranks_(buffers_.size()),
      signals_(buffers_.size()),
      waits_(buffers_.size() * buffers_.size()) {
  size_t num_private = 0;
  for (int32_t rank = 0; rank < num_ranks_; ++rank) {
    if (buffers_[rank].local) local_.push_back(rank);
    if (buffers_[rank].signals == nullptr) num_private += buffers_.size();
  }
  private_signals_ = std::vector<std::atomic<uint32_t>>(num_private);
  std::atomic<uint32_t>* next_private = private_signals_.data();
  for (int32_t rank = 0; rank < num_ranks_; ++rank) {
    signals_[rank] = buffers_[rank].signals;
    if (signals_[rank] != nullptr) continue;
    signals_[rank] = next_private;
    next_private += num_ranks_;
  }
  unfinished_.store(static_cast<int32_t>(local_.size()));
}

bool Execution::Work() {
  const IeeeArithmetic arithmetic;
  const size_t first = next_start_.fetch_add(1) % local_.size();
  for (;;) {
    // This thread skips a rank while another thread holds it. That thread may find the rank blocked just before a
    // signal unblocks it. The signalling thread increments num_advances_ afterwards, so one of the threads sees the
    // change and tries again.
    const uint32_t seen = num_advances_.load();
    bool advanced = false;
    for (size_t i = 0; i < local_.size(); ++i) {
      const Advance advance = RunRank(local_[(first + i) % local_.size()]);
      if (advance == Advance::kFinishedLast) return true;
      advanced |= advance == Advance::kSome;
    }
    if (!advanced && num_advances_.load() == seen) return false;
  }
}

Execution::Advance Execution::RunRank(int32_t rank) {
  Rank& state = ranks_[rank];
  if (state.finished.load(std::memory_order_relaxed) || state.busy.exchange(true)) return Advance::kNone;
  const Plan& plan = program_->plans[rank];
  const size_t begin = state.next_step;
  bool blocked = false;
  while (!blocked && state.next_step < plan.steps.size()) {
    const Step& step = plan.steps[state.next_step];
    size_t num_run = 1;
    if (cancelled_.load(std::memory_order_relaxed)) {
      blocked = true;
    } else if (step.kind == StepKind::kWait) {
      uint32_t& count = waits_[static_cast<size_t>(rank) * num_ranks_ + step.peer];
      // Acquires the peer's writes. Sequentially consistent because of num_advances_, see Work().
      blocked = signals_[rank][step.peer].load() <= count;
      if (!blocked) ++count;
    } else if (program_->tokens.choices > 0 && step.count > 0) {
      const int32_t pid = RowLists(*program_, buffers_, slices_).Run(plan, state.next_step, &num_run);
      blocked = !Read(pid == 0, pid);
    } else {
      blocked = !RunStep(plan, step);
    }
    if (!blocked) state.next_step += num_run;
  }
  const bool advanced = state.next_step > begin;
  if (!blocked) {
    // Set while `busy` is held, so no rank finishes twice.
    if (state.finished.exchange(true)) {
      state.busy.store(false);
      return Advance::kNone;
    }
    num_advances_.fetch_add(1);
    state.busy.store(false);
    return unfinished_.fetch_sub(1) == 1 ? Advance::kFinishedLast : Advance::kSome;
  }
  if (advanced) num_advances_.fetch_add(1);
  state.busy.store(false);
  return advanced ? Advance::kSome : Advance::kNone;
}

View Execution::ViewOf(const Place& place) const {
  const RankBuffers& buffers = buffers_[place.rank];
  const Boxes* boxes = program_->boxes.get();
  switch (place.space) {
    case Space::kInput:
      return {const_cast<char*>(buffers.input), program_->input, buffers.input_pid,
              boxes != nullptr ? &boxes->inputs[place.rank] : nullptr};
    case Space::kOutput:
      return {buffers.output, program_->output, buffers.output_pid,
              boxes != nullptr && !program_->output_in_order ? &boxes->outputs[place.rank] : nullptr};
    case Space::kScratch:
      break;
  }
  return {buffers.scratch, BlockLayout{}, 0, nullptr};
}

bool Execution::Read(bool readable, int32_t pid) {
  if (!readable) {
    unreadable_pid_.store(pid);
    cancelled_.store(true);
  }
  return readable;
}

bool Execution::RunStep(const Plan& plan, const Step& step) {
  switch (step.kind) {
    case StepKind::kCopy:
    case StepKind::kPut:
    case StepKind::kGet:
      return program_->of_lists() ? MoveLists(step) : Move(step.dst, step.src, step.count);
    case StepKind::kReduce:
      return RunReduce(plan, step);
    case StepKind::kZero:
      ZeroElements(ViewOf(step.dst), step.dst.offset, step.count, program_->item_bytes);
      return true;
    case StepKind::kSignal:
      if (RemoteTransport* remote = buffers_[step.peer].remote) {
        remote->Signal(plan.rank, step.peer);
        return true;
      }
      signals_[step.peer][plan.rank].fetch_add(1);
      if (buffers_[step.peer].control_segment != nullptr) buffers_[step.peer].control_segment->RingDoorbell();
      return true;
    case StepKind::kWait:
      return true;
  }
  return true;
}

// dst = src, for `count` elements. False: the memory of unreadable_pid_ could not be read.
bool Execution::Move(const Place& dst, const Place& src, int64_t count) {
  const View from = ViewOf(src);
  if (RemoteTransport* remote = buffers_[dst.rank].remote) {
    const int64_t bytes = count * program_->item_bytes;
    if (src.space == Space::kInput && bytes > kCopiedBytes) {
      const Cursor at(from, src.offset, program_->item_bytes);
      if (at.left_bytes() >= bytes) return remote->PutInput(dst, at.at(), count), true;
    }
    // A copy, because later steps may overwrite data that the network has not sent yet.
    std::unique_ptr<char[]> data(new char[bytes]);
    CopyElements({data.get(), BlockLayout{}}, 0, from, src.offset, count, program_->item_bytes, false);
    remote->Put(dst, std::move(data), count);
    return true;
  }
  return Read(CopyElements(ViewOf(dst), dst.offset, from, src.offset, count, program_->item_bytes,
                           program_->stream && dst.space == Space::kOutput),
              from.pid);
}

// Moves the slices of the lists that the step names by their ranks: list j of an input goes to rank j.
bool Execution::MoveLists(const Step& step) {
  const int64_t row = program_->row_count;
  for (int64_t i = 0; i < slices_.per_pair() && row > 0; ++i) {
    Slice slice = slices_.At(step.src.rank, step.dst.rank, i);
    if (slice.size == 0) continue;
    // A sequence of slices that are contiguous at both ends is one message.
    for (; i + 1 < slices_.per_pair(); ++i) {
      const Slice next = slices_.At(step.src.rank, step.dst.rank, i + 1);
      if (next.size > 0 && (next.input_offset != slice.input_offset + slice.size ||
                            next.output_offset != slice.output_offset + slice.size)) {
        break;
      }
      slice.size += next.size;
    }
    const Place from = {step.src.rank, Space::kInput, slice.input_offset * row};
    if (!Move({step.dst.rank, Space::kOutput, slice.output_offset * row}, from, slice.size * row)) return false;
  }
  return true;
}

std::pair<int32_t, int32_t> Execution::WaitingPair() {
  constexpr int kTries = 100;  // threads that wait hold a rank for short times
  for (int i = 0; i < kTries; ++i, std::this_thread::yield()) {
    for (int32_t rank : local_) {
      Rank& state = ranks_[rank];
      if (state.busy.exchange(true)) continue;
      const std::vector<Step>& steps = program_->plans[rank].steps;
      const bool waits = state.next_step < steps.size() && steps[state.next_step].kind == StepKind::kWait;
      const int32_t peer = waits ? steps[state.next_step].peer : -1;
      const bool late = waits && signals_[rank][peer].load() <= waits_[static_cast<size_t>(rank) * num_ranks_ + peer];
      state.busy.store(false);
      if (late) return {rank, peer};
    }
  }
  return {-1, -1};
}

bool Execution::RunReduce(const Plan& plan, const Step& step) {
  const int64_t item_bytes = program_->item_bytes;
  const int num_sources = step.num_sources;
  const Place* sources = &plan.sources[step.first_source];
  std::vector<Cursor> cursors;
  cursors.reserve(num_sources);
  int64_t shortest = std::numeric_limits<int64_t>::max();
  bool remote = false;
  for (int s = 0; s < num_sources; ++s) {
    const View view = ViewOf(sources[s]);
    remote |= view.pid != 0;
    cursors.emplace_back(view, sources[s].offset, item_bytes);
    shortest = std::min(shortest, cursors.back().fragment_bytes());
  }
  const View dst = ViewOf(step.dst);
  Cursor to(dst, step.dst.offset, item_bytes);
  shortest = std::min(shortest, to.fragment_bytes());
  std::vector<const void*> pointers(num_sources);

  if (shortest >= kShortFragmentBytes && !remote) {
    for (int64_t bytes = step.count * item_bytes; bytes > 0;) {
      int64_t part_bytes = std::min(bytes, to.left_bytes());
      for (const Cursor& cursor : cursors) part_bytes = std::min(part_bytes, cursor.left_bytes());
      for (int s = 0; s < num_sources; ++s) {
        pointers[s] = cursors[s].at();
        cursors[s].Advance(part_bytes);
      }
      program_->reduce(to.at(), pointers.data(), num_sources, part_bytes / item_bytes);
      to.Advance(part_bytes);
      bytes -= part_bytes;
    }
    return true;
  }

  // Tile by tile: sources that are remote or not contiguous are copied first. The last tile holds the result.
  const int64_t tile = std::min(remote ? kRemoteTileBytes / item_bytes : kGatherTile, step.count);
  const std::unique_ptr<char[]> storage(new char[(num_sources + 1) * tile * item_bytes]);
  char* const gathered = storage.get();
  for (int64_t done = 0; done < step.count; done += tile) {
    const int64_t size = std::min(tile, step.count - done);
    for (int s = 0; s < num_sources; ++s) {
      const View src = ViewOf(sources[s]);
      if (src.pid == 0 && src.layout.contiguous()) {
        pointers[s] = src.base + (sources[s].offset + done) * item_bytes;
        continue;
      }
      char* own = gathered + s * tile * item_bytes;
      if (!Read(CopyElements({own, BlockLayout{}}, 0, src, sources[s].offset + done, size, item_bytes, false),
                src.pid)) {
        return false;
      }
      pointers[s] = own;
    }
    const bool in_place = dst.layout.contiguous();
    char* result =
        in_place ? dst.base + (step.dst.offset + done) * item_bytes : gathered + num_sources * tile * item_bytes;
    program_->reduce(result, pointers.data(), num_sources, size);
    if (!in_place) CopyElements(dst, step.dst.offset + done, {result, BlockLayout{}}, 0, size, item_bytes, false);
  }
  return true;
}

}  // namespace jaxcomm
