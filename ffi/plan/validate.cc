#include "plan/validate.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "plan/partition.h"
#include "plan/promise.h"
#include "plan/symbolic.h"

namespace jaxcomm {
namespace {

using Clock = std::vector<int32_t>;

// Names elements [begin, end) of the buffer of `place`, for messages.
std::string Interval(const Place& place, int64_t begin, int64_t end) {
  return std::string(kSpaceNames[static_cast<int>(place.space)]) + " [" + std::to_string(begin) + ", " +
         std::to_string(end) + ") of rank " + std::to_string(place.rank);
}

// Whether elements [offset, offset + count) of the place's buffer exist.
Status CheckBounds(const std::vector<Plan>& plans, const Request& request, const Place& place, int64_t count) {
  int64_t size = 0;
  switch (place.space) {
    case Space::kInput:
      size = InputCount(request, place.rank);
      break;
    case Space::kOutput:
      size = OutputCount(request, place.rank);
      break;
    case Space::kScratch:
      size = plans[static_cast<size_t>(place.rank)].scratch_count;
      break;
    default:
      return InvalidArgumentError("unknown space");
  }
  if (place.offset >= 0 && count <= size && place.offset <= size - count) return OkStatus();
  return InvalidArgumentError(Interval(place, place.offset, place.offset + count) + " exceeds the buffer of " +
                              std::to_string(size) + " elements");
}

// Whether `step` is valid in the plan of `rank`: its kind matches its places, ranks exist and are addressable, buffers
// are large enough, and dst does not overlap a source, except in a reduce onto one of its operands.
Status CheckStep(const std::vector<Plan>& plans, const Request& request, int32_t rank, const Step& step) {
  const Plan& plan = plans[static_cast<size_t>(rank)];
  const auto is_rank = [&](int32_t r) { return r >= 0 && r < request.geometry.num_ranks(); };
  const bool has_peer = step.kind == StepKind::kPut || step.kind == StepKind::kGet || step.kind == StepKind::kSignal ||
                        step.kind == StepKind::kWait;
  if (has_peer && (!is_rank(step.peer) || step.peer == rank))
    return InvalidArgumentError("the peer must be another rank of the group");
  if (step.kind == StepKind::kSignal || step.kind == StepKind::kWait) return OkStatus();
  if (step.count <= 0) return InvalidArgumentError("moves no elements");
  if (step.dst.rank != (step.kind == StepKind::kPut ? step.peer : rank))
    return InvalidArgumentError("dst is at the wrong rank");
  if (step.dst.space == Space::kInput) return InvalidArgumentError("writes to an input");
  JAXCOMM_RETURN_IF_ERROR(CheckBounds(plans, request, step.dst, step.count));
  if (step.kind == StepKind::kZero) return OkStatus();

  const bool reduces = step.kind == StepKind::kReduce;
  std::vector<Place> sources = {step.src};
  if (reduces) {
    const auto num_places = static_cast<int64_t>(plan.sources.size());
    if (step.num_sources < 1 || step.first_source < 0 || step.first_source > num_places - step.num_sources) {
      return InvalidArgumentError("the operands are not in the plan's list of sources");
    }
    sources.assign(plan.sources.begin() + step.first_source,
                   plan.sources.begin() + step.first_source + step.num_sources);
  }
  for (const Place& src : sources) {
    if (!is_rank(src.rank)) return InvalidArgumentError("src is at a rank outside of the group");
    if (!reduces && src.rank != (step.kind == StepKind::kGet ? step.peer : rank))
      return InvalidArgumentError("src is at the wrong rank");
    if (!CanRead(request.geometry, rank, src.rank)) return InvalidArgumentError("reads from another node");
    JAXCOMM_RETURN_IF_ERROR(CheckBounds(plans, request, src, step.count));
    const bool overlaps = src.rank == step.dst.rank && src.space == step.dst.space &&
                          src.offset < step.dst.offset + step.count && step.dst.offset < src.offset + step.count;
    if (overlaps && !(reduces && src.offset == step.dst.offset)) return InvalidArgumentError("dst overlaps a source");
  }
  return OkStatus();
}

// A part of the data that a step reads: elements [begin, end) of the step. Element k is content.value at k +
// content.shift.
struct ReadExtent {
  int64_t begin;
  int64_t end;
  Content content;
};

class Validator {
 public:
  Validator(const std::vector<Plan>& plans, const Request& request)
      : plans_(plans), request_(request), geometry_(request.geometry), values_(request.geometry.num_ranks()) {}

  Status Run() {
    JAXCOMM_RETURN_IF_ERROR(CheckSteps());
    JAXCOMM_RETURN_IF_ERROR(Schedule());
    const bool barrier = TraitsOf(request_.collective).output == BufferBlocks::kNone;
    return barrier ? CheckBarrier() : CheckOutputs();
  }

 private:
  // Signals from one rank to another.
  struct Channel {
    std::vector<Clock> sent;        // by signal: the vector clock of the sender
    std::vector<int32_t> received;  // by signal: the receiver's own time at its wait
  };

  static Status Fault(const std::string& text) { return InvalidArgumentError(text); }
  std::string StepName(int32_t rank, size_t step) const {
    const Step& s = plans_[Index(rank)].steps[step];
    return "rank " + std::to_string(rank) + ", step " + std::to_string(step) + " (" +
           kStepNames[static_cast<int>(s.kind)] + (s.peer >= 0 ? " " + std::to_string(s.peer) : "") + ")";
  }
  Status Fault(int32_t rank, size_t step, const std::string& text) const {
    return Fault(StepName(rank, step) + ": " + text);
  }
  static size_t Index(int32_t i) { return static_cast<size_t>(i); }
  Memory& At(const Place& place) { return memory_[Index(place.rank) * 3 + static_cast<size_t>(place.space)]; }

  // Checks that need no execution: kinds, places, bounds.
  Status CheckSteps() {
    const int32_t n = geometry_.num_ranks();
    if (!WellFormed(request_)) return Fault("sizes, root or permutation of the request are not valid");
    if (plans_.size() != Index(n)) {
      return Fault("got " + std::to_string(plans_.size()) + " plans for " + std::to_string(n) + " ranks");
    }
    for (int32_t rank = 0; rank < n; ++rank) {
      const Plan& plan = plans_[Index(rank)];
      if (plan.rank != rank || plan.num_ranks != n || plan.scratch_count < 0) {
        return Fault("plan " + std::to_string(rank) + " has wrong rank, num_ranks or scratch_count");
      }
      memory_.emplace_back(InputCount(request_, rank));
      memory_.emplace_back(OutputCount(request_, rank));
      memory_.emplace_back(plan.scratch_count);
    }
    for (int32_t rank = 0; rank < n; ++rank) {
      for (size_t i = 0; i < plans_[Index(rank)].steps.size(); ++i) {
        const Status status = CheckStep(plans_, request_, rank, plans_[Index(rank)].steps[i]);
        if (!status.ok()) return Fault(rank, i, status.message());
      }
    }
    return OkStatus();
  }

  // Runs every rank until it waits, in turns. One schedule stands for all (validate.h).
  Status Schedule() {
    const int32_t n = geometry_.num_ranks();
    clocks_.assign(Index(n), Clock(Index(n), 0));
    std::vector<size_t> next(Index(n), 0);
    for (int32_t rank = 0; rank < n; ++rank) clocks_[Index(rank)][Index(rank)] = 1;
    for (bool advanced = true; advanced;) {
      advanced = false;
      for (int32_t rank = 0; rank < n; ++rank) {
        const std::vector<Step>& steps = plans_[Index(rank)].steps;
        for (size_t& i = next[Index(rank)]; i < steps.size(); ++i, advanced = true) {
          if (steps[i].kind == StepKind::kWait && !Receive(rank, steps[i].peer)) break;
          JAXCOMM_RETURN_IF_ERROR(RunStep(rank, i));
        }
      }
    }
    for (int32_t rank = 0; rank < n; ++rank) {
      if (next[Index(rank)] < plans_[Index(rank)].steps.size()) {
        return Fault(rank, next[Index(rank)], "waits forever: " + ChainOfWaits(rank, next));
      }
    }
    for (const auto& [pair, channel] : channels_) {
      if (channel.received.size() < channel.sent.size()) {
        return Fault("rank " + std::to_string(pair.second) + " never waits for a signal of rank " +
                     std::to_string(pair.first));
      }
    }
    return OkStatus();
  }

  bool Receive(int32_t rank, int32_t peer) {
    Channel& channel = channels_[{peer, rank}];
    if (channel.received.size() == channel.sent.size()) return false;
    Clock& clock = clocks_[Index(rank)];
    const Clock& seen = channel.sent[channel.received.size()];
    for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], seen[i]);
    channel.received.push_back(clock[Index(rank)]);
    return true;
  }

  Status RunStep(int32_t rank, size_t index) {
    const Plan& plan = plans_[Index(rank)];
    const Step& step = plan.steps[index];
    std::vector<ReadExtent> reads;
    switch (step.kind) {
      case StepKind::kWait:
        return OkStatus();
      case StepKind::kSignal: {
        Clock& clock = clocks_[Index(rank)];
        channels_[{rank, step.peer}].sent.push_back(clock);
        ++clock[Index(rank)];  // the signal does not cover later steps
        return OkStatus();
      }
      case StepKind::kZero:
        reads = {{0, step.count, {values_.Zero(), 0}}};
        break;
      case StepKind::kReduce: {
        JAXCOMM_RETURN_IF_ERROR(Read(rank, index, plan.sources[Index(step.first_source)], &reads));
        std::vector<std::vector<ReadExtent>> operands = {std::move(reads)};
        for (int32_t i = 1; i < step.num_sources; ++i) {
          operands.emplace_back();
          JAXCOMM_RETURN_IF_ERROR(Read(rank, index, plan.sources[Index(step.first_source + i)], &operands.back()));
        }
        JAXCOMM_RETURN_IF_ERROR(Sum(rank, index, operands, &reads));
        break;
      }
      default:
        JAXCOMM_RETURN_IF_ERROR(Read(rank, index, step.src, &reads));
    }
    return Write(rank, index, reads);
  }

  // Whether `moment` happened before the current step of `rank`.
  bool HappenedBefore(int32_t rank, const Moment& moment) const {
    return moment.rank < 0 || moment.rank == rank || clocks_[Index(rank)][Index(moment.rank)] >= moment.time;
  }

  // Whether the last write to an extent of `owner` is visible to `rank`.
  bool Arrived(int32_t rank, int32_t owner, const Extent& extent) const {
    if (extent.signals_before < 0 || extent.writer.rank == rank) return HappenedBefore(rank, extent.writer);
    const auto channel = channels_.find({extent.writer.rank, owner});
    const auto signal = static_cast<size_t>(extent.signals_before);
    if (channel == channels_.end() || channel->second.received.size() <= signal) return false;
    return HappenedBefore(rank, {owner, channel->second.received[signal]});
  }

  Status Read(int32_t rank, size_t index, const Place& src, std::vector<ReadExtent>* reads) {
    const int64_t count = plans_[Index(rank)].steps[index].count;
    if (src.space == Space::kInput) {  // final before the first step, never written
      *reads = {{0, count, {values_.Leaf(src.rank), src.offset}}};
      return OkStatus();
    }
    std::string fault;
    reads->clear();
    At(src).ForEach(src.offset, src.offset + count, [&](int64_t begin, Extent& extent) {
      if (extent.content.value < 0) {
        fault = "reads " + Interval(src, begin, extent.end) + ", which no rank has written";
      } else if (!Arrived(rank, src.rank, extent)) {
        fault = "reads " + Interval(src, begin, extent.end) + ", which rank " + std::to_string(extent.writer.rank) +
                " may not have written yet";
      }
      const auto known = std::find_if(extent.readers.begin(), extent.readers.end(),
                                      [&](const Moment& reader) { return reader.rank == rank; });
      const Moment now = {rank, clocks_[Index(rank)][Index(rank)]};
      if (known == extent.readers.end()) {
        extent.readers.push_back(now);
      } else {
        *known = now;
      }
      Content content = extent.content;
      if (content.value != values_.Zero()) content.shift += src.offset;
      Append({begin - src.offset, extent.end - src.offset, content}, reads);
    });
    return fault.empty() ? OkStatus() : Fault(rank, index, fault);
  }

  static void Append(const ReadExtent& read, std::vector<ReadExtent>* reads) {
    if (!reads->empty()) {
      ReadExtent& last = reads->back();
      if (last.content.value == read.content.value && last.content.shift == read.content.shift) {
        last.end = read.end;
        return;
      }
    }
    reads->push_back(read);
  }

  Status Sum(int32_t rank, size_t index, const std::vector<std::vector<ReadExtent>>& operands,
             std::vector<ReadExtent>* sums) {
    const int64_t count = plans_[Index(rank)].steps[index].count;
    std::vector<size_t> at(operands.size(), 0);
    std::vector<int32_t> values(operands.size());
    sums->clear();
    for (int64_t begin = 0; begin < count;) {
      int64_t end = count;
      const int64_t shift = operands[0][at[0]].content.shift;
      for (size_t i = 0; i < operands.size(); ++i) {
        const ReadExtent& read = operands[i][at[i]];
        if (read.content.shift != shift) return Fault(rank, index, "adds elements of different offsets");
        values[i] = read.content.value;
        end = std::min(end, read.end);
      }
      const int32_t value = values_.Sum(values);
      if (value < 0) return Fault(rank, index, "adds the same rank's input twice, or zeros");
      Append({begin, end, {value, shift}}, sums);
      for (size_t i = 0; i < operands.size(); ++i) at[i] += operands[i][at[i]].end == end;
      begin = end;
    }
    return OkStatus();
  }

  Status Write(int32_t rank, size_t index, const std::vector<ReadExtent>& reads) {
    const Step& step = plans_[Index(rank)].steps[index];
    const Place& dst = step.dst;
    Memory& memory = At(dst);
    std::string fault;
    memory.ForEach(dst.offset, dst.offset + step.count, [&](int64_t begin, const Extent& extent) {
      const std::string what = Interval(dst, begin, extent.end);
      if (!Arrived(rank, dst.rank, extent)) {
        fault = "writes " + what + ", which rank " + std::to_string(extent.writer.rank) + " may write later";
      }
      for (const Moment& reader : extent.readers) {
        if (HappenedBefore(rank, reader)) continue;
        fault = "writes " + what + ", which rank " + std::to_string(reader.rank) + " may not have read yet";
      }
    });
    if (!fault.empty()) return Fault(rank, index, fault);
    Extent extent;
    extent.writer = {rank, clocks_[Index(rank)][Index(rank)]};
    extent.step = index;
    if (!CanRead(geometry_, rank, dst.rank)) {
      extent.signals_before = static_cast<int64_t>(channels_[{rank, dst.rank}].sent.size());
    }
    for (const ReadExtent& read : reads) {
      extent.end = dst.offset + read.end;
      extent.content = read.content;
      if (extent.content.value != values_.Zero()) extent.content.shift -= dst.offset;
      memory.Replace(dst.offset + read.begin, extent);
    }
    return OkStatus();
  }

  Status CheckBarrier() {
    for (size_t rank = 0; rank < clocks_.size(); ++rank) {
      for (size_t peer = 0; peer < clocks_.size(); ++peer) {
        if (clocks_[rank][peer] < 1) {
          return Fault("rank " + std::to_string(rank) + " may end before rank " + std::to_string(peer) + " has begun");
        }
      }
    }
    return OkStatus();
  }

  // Why a rank does not go on: each rank waits for the next one. The last one has ended, or the chain closes.
  std::string ChainOfWaits(int32_t rank, const std::vector<size_t>& next) const {
    std::string chain = "rank " + std::to_string(rank);
    std::vector<bool> seen(plans_.size(), false);
    while (!seen[Index(rank)] && next[Index(rank)] < plans_[Index(rank)].steps.size()) {
      seen[Index(rank)] = true;
      rank = plans_[Index(rank)].steps[next[Index(rank)]].peer;
      chain += " waits for rank " + std::to_string(rank);
      if (!seen[Index(rank)]) chain += ", which";
    }
    return seen[Index(rank)] ? chain : chain + " has ended";
  }

  static std::string Listed(const std::vector<int32_t>& ranks) {
    std::string text;
    for (const int32_t rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    return text;
  }
  // Names what elements [begin, end) of an output hold.
  std::string Holding(const Content& content, int64_t begin, int64_t end) const {
    if (content.value == values_.Zero()) return "zeros";
    const std::vector<int32_t> ranks = values_.RanksOf(content.value);
    const Place first = {ranks[0], Space::kInput, 0};
    const std::string input = Interval(first, begin + content.shift, end + content.shift);
    return ranks.size() == 1 ? input : "the sum of " + input + " over ranks " + Listed(ranks);
  }
  // Names what a promise wants in these elements.
  static std::string Wanted(const Promise& promise, int64_t begin, int64_t end) {
    if (promise.kind == PromiseKind::kZeros) return "zeros";
    const Place& first = promise.sources[0];
    const int64_t shift = first.offset - promise.begin;
    const std::string input = Interval(first, begin + shift, end + shift);
    if (promise.sources.size() == 1) return input;
    if (promise.kind == PromiseKind::kCopy) return input + " or a replica";
    std::vector<int32_t> ranks;
    for (const Place& source : promise.sources) ranks.push_back(source.rank);
    return "the sum of " + input + " over ranks " + Listed(ranks);
  }
  bool IsRight(const Content& content, const Promise& promise) const {
    const auto is_at = [&](const Place& source) { return content.shift == source.offset - promise.begin; };
    switch (promise.kind) {
      case PromiseKind::kZeros:
        return content.value == values_.Zero();
      case PromiseKind::kCopy:
        return std::any_of(promise.sources.begin(), promise.sources.end(), [&](const Place& source) {
          return content.value == values_.Leaf(source.rank) && is_at(source);
        });
      case PromiseKind::kSum:
        break;
    }
    const std::vector<int32_t> ranks = values_.RanksOf(content.value);
    return std::equal(ranks.begin(), ranks.end(), promise.sources.begin(), promise.sources.end(),
                      [&](int32_t rank, const Place& source) { return rank == source.rank && is_at(source); });
  }

  Status CheckOutputs() {
    const std::vector<Promise> of_first = PromisesOf(request_, 0);
    std::vector<ReadExtent> first;  // sums of rank 0
    for (int32_t rank = 0; rank < geometry_.num_ranks(); ++rank) {
      std::vector<ReadExtent> sums;  // that rank 0 has too
      const std::vector<Promise> promises = PromisesOf(request_, rank);
      for (size_t i = 0; i < promises.size(); ++i) {
        const Promise& promise = promises[i];
        const bool shared = promise.kind == PromiseKind::kSum && i < of_first.size() &&
                            promise.sources[0].offset == of_first[i].sources[0].offset;
        std::string fault;
        const Place output = {rank, Space::kOutput, 0};
        At(output).ForEach(promise.begin, promise.end, [&](int64_t begin, const Extent& extent) {
          const bool written = extent.content.value >= 0;
          if (fault.empty() && !(written && IsRight(extent.content, promise))) {
            fault = Interval(output, begin, extent.end);
            fault += written ? " ends with the wrong contents: " + Holding(extent.content, begin, extent.end) + " by " +
                                   StepName(extent.writer.rank, extent.step) + ", expected " +
                                   Wanted(promise, begin, extent.end)
                             : " is never written";
          }
          if (shared) Append({begin, extent.end, extent.content}, &sums);
        });
        if (!fault.empty()) return Fault(fault);
      }
      if (rank == 0) first = sums;
      const auto same = [](const ReadExtent& a, const ReadExtent& b) {
        return a.begin == b.begin && a.end == b.end && a.content.value == b.content.value;
      };
      if (!sums.empty() && !std::equal(sums.begin(), sums.end(), first.begin(), first.end(), same)) {
        return Fault("ranks 0 and " + std::to_string(rank) + " add in different orders");
      }
    }
    return OkStatus();
  }

  const std::vector<Plan>& plans_;
  const Request& request_;
  const Geometry& geometry_;
  Values values_;
  std::vector<Memory> memory_;  // input, output and scratch of rank 0, of rank 1, ...
  std::vector<Clock> clocks_;
  std::map<std::pair<int32_t, int32_t>, Channel> channels_;
};

}  // namespace

Status Validate(const std::vector<Plan>& plans, const Request& request) { return Validator(plans, request).Run(); }

}  // namespace jaxcomm
