#include "executor.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxcomm {
namespace {

// XLA's threads flush subnormals to zero, others don't. Steps run on either kind: make them agree.
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

// Elements of a reduction whose sources are copied together first, because their runs are short.
constexpr int64_t kGatherTile = 1024;
constexpr int64_t kShortRunBytes = 256;

}  // namespace

std::shared_ptr<const Program> Program::Make(std::vector<Plan> plans, Layout input, Layout output, int64_t item_bytes,
                                             ReduceFn reduce) {
  auto program = std::make_shared<Program>();
  for (const Plan& plan : plans) {
    for (const Step& step : plan.steps) {
      program->moved_bytes += step.count * item_bytes * std::max(1, step.num_sources);
    }
  }
  // Measured on AMD EPYC (2 cores, 2026-11): past a few caches' worth of output, streamed stores save the read of every
  // line that is about to be overwritten; below, they push results out of caches that the next op would hit.
  constexpr int64_t kStreamBytes = 32 << 20;
  program->stream = program->moved_bytes >= kStreamBytes;
  program->plans = std::move(plans);
  program->input = input;
  program->output = output;
  program->item_bytes = item_bytes;
  program->reduce = reduce;
  return program;
}

Execution::Execution(std::shared_ptr<const Program> program, std::vector<RankBuffers> buffers)
    : program_(std::move(program)),
      buffers_(std::move(buffers)),
      num_ranks_(static_cast<int32_t>(buffers_.size())),
      ranks_(buffers_.size()),
      signals_(buffers_.size() * buffers_.size()),
      waits_(buffers_.size() * buffers_.size()),
      unfinished_(num_ranks_) {}

bool Execution::Work() {
  const IeeeArithmetic arithmetic;
  const int32_t first = static_cast<int32_t>(next_helper_.fetch_add(1) % static_cast<uint32_t>(num_ranks_));
  for (;;) {
    // A rank may be skipped here because its holder has just looked at it in vain. Whoever made that look vain no more
    // has raised progress_ before, so one of the two sees the change and looks again.
    const uint32_t seen = progress_.load();
    bool advanced = false;
    for (int32_t i = 0; i < num_ranks_; ++i) {
      const Progress progress = RunRank((first + i) % num_ranks_);
      if (progress == Progress::kFinishedLast) return true;
      advanced |= progress == Progress::kSome;
    }
    if (!advanced && progress_.load() == seen) return false;
  }
}

Execution::Progress Execution::RunRank(int32_t rank) {
  Rank& state = ranks_[rank];
  if (state.finished.load(std::memory_order_relaxed) || state.busy.exchange(true)) return Progress::kNone;
  const Plan& plan = program_->plans[rank];
  const size_t begin = state.next_step;
  bool blocked = false;
  while (state.next_step < plan.steps.size()) {
    const Step& step = plan.steps[state.next_step];
    if (step.kind == StepKind::kWait) {
      uint32_t& count = waits_[static_cast<size_t>(rank) * num_ranks_ + step.peer];
      const auto& signal = signals_[static_cast<size_t>(step.peer) * num_ranks_ + rank];
      // Acquires what the peer wrote. Sequentially consistent, for the argument about progress_ in Work().
      if (signal.load() <= count) {
        blocked = true;
        break;
      }
      ++count;
    } else {
      RunStep(plan, step);
    }
    ++state.next_step;
  }
  const bool advanced = state.next_step > begin;
  if (!blocked) {
    // Marked under `busy`, so nobody finishes a rank twice.
    if (state.finished.exchange(true)) {
      state.busy.store(false);
      return Progress::kNone;
    }
    progress_.fetch_add(1);
    state.busy.store(false);
    return unfinished_.fetch_sub(1) == 1 ? Progress::kFinishedLast : Progress::kSome;
  }
  if (advanced) progress_.fetch_add(1);
  state.busy.store(false);
  return advanced ? Progress::kSome : Progress::kNone;
}

View Execution::ViewOf(const Place& place) const {
  const RankBuffers& buffers = buffers_[place.rank];
  switch (place.space) {
    case Space::kInput:
      return {const_cast<char*>(buffers.input), program_->input};
    case Space::kOutput:
      return {buffers.output, program_->output};
    case Space::kScratch:
      break;
  }
  return {buffers.scratch, Layout{}};
}

void Execution::RunStep(const Plan& plan, const Step& step) {
  switch (step.kind) {
    case StepKind::kCopy:
    case StepKind::kPut:
    case StepKind::kGet:
      CopyElements(ViewOf(step.dst), step.dst.offset, ViewOf(step.src), step.src.offset, step.count,
                   program_->item_bytes, program_->stream && step.dst.space == Space::kOutput);
      return;
    case StepKind::kReduce:
      return RunReduce(plan, step);
    case StepKind::kZero:
      return ZeroElements(ViewOf(step.dst), step.dst.offset, step.count, program_->item_bytes);
    case StepKind::kSignal:
      signals_[static_cast<size_t>(plan.rank) * num_ranks_ + step.peer].fetch_add(1);
      return;
    case StepKind::kWait:
      return;
  }
}

void Execution::RunReduce(const Plan& plan, const Step& step) {
  const int64_t item_bytes = program_->item_bytes;
  const int num_sources = step.num_sources;
  const Place* sources = &plan.sources[step.first_source];
  std::vector<Cursor> cursors;
  cursors.reserve(num_sources);
  int64_t shortest = std::numeric_limits<int64_t>::max();
  for (int s = 0; s < num_sources; ++s) {
    cursors.emplace_back(ViewOf(sources[s]), sources[s].offset, item_bytes);
    shortest = std::min(shortest, cursors.back().run_bytes());
  }
  Cursor to(ViewOf(step.dst), step.dst.offset, item_bytes);
  shortest = std::min(shortest, to.run_bytes());
  std::vector<const void*> pointers(num_sources);

  if (shortest >= kShortRunBytes) {
    for (int64_t bytes = step.count * item_bytes; bytes > 0;) {
      int64_t piece = std::min(bytes, to.left_bytes());
      for (const Cursor& cursor : cursors) piece = std::min(piece, cursor.left_bytes());
      for (int s = 0; s < num_sources; ++s) {
        pointers[s] = cursors[s].at();
        cursors[s].Advance(piece);
      }
      program_->reduce(to.at(), pointers.data(), num_sources, piece / item_bytes);
      to.Advance(piece);
      bytes -= piece;
    }
    return;
  }

  const int64_t tile = std::min(kGatherTile, step.count);
  std::vector<std::max_align_t> storage(
      (static_cast<size_t>(num_sources * tile * item_bytes) + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
  char* gathered = reinterpret_cast<char*>(storage.data());
  for (int64_t done = 0; done < step.count; done += tile) {
    const int64_t size = std::min(tile, step.count - done);
    for (int s = 0; s < num_sources; ++s) {
      char* own = gathered + s * tile * item_bytes;
      CopyElements({own, Layout{}}, 0, ViewOf(sources[s]), sources[s].offset + done, size, item_bytes, false);
      pointers[s] = own;
    }
    program_->reduce(gathered, pointers.data(), num_sources, size);  // source 0 is read before it is overwritten
    CopyElements(ViewOf(step.dst), step.dst.offset + done, {gathered, Layout{}}, 0, size, item_bytes, false);
  }
}

}  // namespace jaxcomm
