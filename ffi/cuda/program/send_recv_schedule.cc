#include "cuda/program/send_recv_schedule.h"

#include <algorithm>
#include <array>
#include <deque>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

#include "cuda/program/steps.h"

namespace jaxcomm {
namespace cuda {
namespace {

// Part of a message: the data of one put.
struct PackedSegment {
  Place dst;
  int64_t count;
  int64_t offset;  // in the channel's part of the message
};

using Link = std::array<int32_t, 3>;  // round, receiver, sender

// A step that remains in a plan.
struct KeptStep {
  int32_t origin = 0;   // position in the plan before the split
  int32_t level = 0;    // see send_recv_schedule.h
  int32_t awaited = 0;  // this rank waits for its rounds before this one
  Link link = {};       // packing steps: the message
  int64_t offset = -1;  // packing steps: offset in the channel's part of the message
};

// The plans of one channel without the steps between nodes.
struct SplitChannel {
  std::vector<Plan> plans;
  std::vector<std::vector<KeptStep>> kept;              // by rank, for each step
  std::vector<KeptStep> exit_barrier;                   // by rank: at the end of the plan
  std::vector<std::map<int32_t, int32_t>> ends;         // by rank and round: number of steps that the round waits for
  std::map<Link, std::vector<PackedSegment>> segments;  // of each message; empty for a signal without data
};

// Runs the plans in an arbitrary schedule, because the round of a message does not depend on the schedule.
class PlanSplitter {
 public:
  PlanSplitter(std::vector<Plan> plans, const Geometry& geometry, int64_t round_count, int32_t num_slots)
      : plans_(std::move(plans)),
        geometry_(geometry),
        round_count_(std::max<int64_t>(round_count, 1)),
        num_slots_(num_slots),
        ranks_(plans_.size()) {}

  SplitChannel Split() && {
    split_.kept.resize(plans_.size());
    split_.ends.resize(plans_.size());
    for (const Plan& plan : plans_) {
      Plan kept = plan;
      kept.steps.clear();
      split_.plans.push_back(std::move(kept));
    }
    for (bool moved = true; moved;) {
      moved = false;
      for (const Plan& plan : plans_) {
        while (ranks_[plan.rank].next < plan.steps.size() && Run(plan)) moved = true;
      }
    }
    for (const Plan& plan : plans_) {
      KeptStep exit = {kExitBarrier, 0, ranks_[plan.rank].awaited, {}, -1};
      const int32_t first = geometry_.node(plan.rank) * geometry_.ranks_per_node;
      for (int32_t r = first; r < first + geometry_.ranks_per_node; ++r) {
        exit.level = std::max(exit.level, ranks_[r].level);  // every rank of the node waits for all others
      }
      split_.exit_barrier.push_back(exit);
    }
    return std::move(split_);
  }

 private:
  struct Rank {
    size_t next = 0;
    int32_t level = 0;
    int32_t awaited = 0;
    int32_t round = 0;   // in which the rank sends
    int64_t filled = 0;  // elements in the current round
    int64_t packed = 0;  // elements in all rounds
  };

  // Runs the next step. False: the rank has to wait for another.
  bool Run(const Plan& plan) {
    Rank& rank = ranks_[plan.rank];
    const Step& step = plan.steps[rank.next];
    const bool inter_node = step.peer >= 0 && geometry_.node(step.peer) != geometry_.node(plan.rank);
    if (step.kind == StepKind::kWait) {
      std::deque<int32_t>& signals = signals_[{step.peer, plan.rank}];
      if (signals.empty()) return false;
      rank.level = std::max(rank.level, signals.front());
      if (inter_node) rank.awaited = std::max(rank.awaited, signals.front());
      signals.pop_front();
      if (!inter_node) Keep(plan.rank, step);
    } else if (step.kind == StepKind::kSignal) {
      if (inter_node) {
        BeginRound(rank, rank.level);
        split_.segments[{rank.round, step.peer, plan.rank}];
        split_.ends[plan.rank][rank.round] = NumKept(plan.rank);
      } else {
        Keep(plan.rank, step);
      }
      signals_[{plan.rank, step.peer}].push_back(inter_node ? rank.round + 1 : rank.level);
    } else if (step.kind == StepKind::kPut && inter_node) {
      Pack(plan, step);
    } else {
      Keep(plan.rank, step);
    }
    ++rank.next;
    return true;
  }

  static void BeginRound(Rank& rank, int32_t round) {
    if (round <= rank.round) return;
    rank.round = round;
    rank.filled = 0;
  }

  void Pack(const Plan& plan, const Step& step) {
    Rank& rank = ranks_[plan.rank];
    BeginRound(rank, std::max(rank.level, rank.round + (rank.filled >= round_count_ ? 1 : 0)));
    rank.filled += step.count;
    // The slot's previous round must have been sent. That round precedes this one, so the wait keeps the order of
    // levels.
    rank.awaited = std::max(rank.awaited, rank.round - num_slots_ + 1);
    rank.level = std::max(rank.level, rank.awaited);
    const Link link = {rank.round, step.peer, plan.rank};
    std::vector<PackedSegment>& segments = split_.segments[link];
    const int64_t offset = segments.empty() ? 0 : segments.back().offset + segments.back().count;
    segments.push_back({step.dst, step.count, offset});
    Step pack = step;
    pack.kind = StepKind::kCopy;
    pack.peer = -1;
    // A temporary place that no other step uses. Slots are assigned once the messages of all channels are known.
    pack.dst = {plan.rank, Space::kScratch, plan.scratch_count + rank.packed};
    rank.packed += step.count;
    Keep(plan.rank, pack);
    split_.kept[plan.rank].back().link = link;
    split_.kept[plan.rank].back().offset = offset;
    split_.ends[plan.rank][rank.round] = NumKept(plan.rank);
  }

  int32_t NumKept(int32_t rank) const { return static_cast<int32_t>(split_.plans[rank].steps.size()); }

  void Keep(int32_t number, const Step& step) {
    const Rank& rank = ranks_[number];
    split_.plans[number].steps.push_back(step);
    split_.kept[number].push_back({static_cast<int32_t>(rank.next), rank.level, rank.awaited, {}, -1});
  }

  const std::vector<Plan> plans_;
  const Geometry geometry_;
  const int64_t round_count_;
  const int32_t num_slots_;
  std::vector<Rank> ranks_;
  std::map<std::array<int32_t, 2>, std::deque<int32_t>> signals_;  // from, to: level at which each signal is available
  SplitChannel split_;
};

// The layout of messages in scratch: for each rank, the slots of sent messages, then the received messages. A message
// consists of the parts of all channels, one after the other.
class MessageLayout {
 public:
  MessageLayout(const std::vector<const SplitChannel*>& channels, int64_t grain, int32_t num_slots) {
    for (size_t c = 0; c < channels.size(); ++c) {
      for (const auto& [link, segments] : channels[c]->segments) {
        std::vector<int64_t>& parts = parts_[link];
        parts.resize(channels.size() + 1);
        const int64_t count = segments.empty() ? 0 : segments.back().offset + segments.back().count;
        parts[c + 1] = CeilDiv(count, grain) * grain;
      }
    }
    std::map<std::array<int32_t, 2>, int64_t> sent, received;  // by rank and round
    std::vector<int64_t> slots(num_slots);
    int64_t most_received = 0;
    for (auto& [link, parts] : parts_) {
      for (size_t c = 0; c + 1 < parts.size(); ++c) parts[c + 1] += parts[c];
      const auto [round, to, from] = link;
      const int64_t count = std::max(parts.back(), grain);  // not empty, even for a signal without data
      int64_t& in_sends = sent[{from, round}];
      int64_t& in_receives = received[{to, round}];
      messages_[link] = {in_sends, in_receives, count};
      in_sends += count;
      in_receives += count;
      slots[round % num_slots] = std::max(slots[round % num_slots], in_sends);
      most_received = std::max(most_received, in_receives);
    }
    for (const int64_t slot : slots) {
      slot_begins_.push_back(count_);
      count_ += slot;
    }
    receive_begin_ = count_;
    count_ += most_received;
  }

  int64_t count() const { return count_; }  // elements; the same for all ranks

  // Positions count elements from the first message on.
  Transfer Sent(const Link& link) const {
    const Placed& placed = messages_.at(link);
    return {link[1], slot_begins_[link[0] % slot_begins_.size()] + placed.in_sends, placed.count};
  }
  Transfer Received(const Link& link) const {
    const Placed& placed = messages_.at(link);
    return {link[2], receive_begin_ + placed.in_receives, placed.count};
  }
  int64_t ChannelOffset(const Link& link, size_t channel) const { return parts_.at(link)[channel]; }

  std::vector<Link> Of(int32_t rank) const {
    std::vector<Link> links;
    for (const auto& [link, placed] : messages_) {
      if (link[1] == rank || link[2] == rank) links.push_back(link);
    }
    return links;
  }

 private:
  struct Placed {
    int64_t in_sends, in_receives, count;
  };
  std::map<Link, std::vector<int64_t>> parts_;  // offset of each channel's part
  std::map<Link, Placed> messages_;
  std::vector<int64_t> slot_begins_;
  int64_t receive_begin_ = 0;
  int64_t count_ = 0;
};

// The steps of one channel of this rank, with the entry and exit barriers.
struct ChannelSteps {
  std::vector<ProgramStep> steps;
  std::vector<int32_t> levels;      // of each step, ascending
  std::vector<int32_t> awaited;     // of each step, ascending; no more than its level
  std::map<int32_t, int32_t> ends;  // as in SplitChannel
  int32_t next = 0;                 // the first step that is in no launch

  void Add(const KeptStep& step) {
    levels.push_back(step.level);
    awaited.push_back(step.awaited);
  }
  int32_t size() const { return static_cast<int32_t>(steps.size()); }
  int32_t EndOf(int32_t round) const {
    const auto after = ends.upper_bound(round);
    return after == ends.begin() ? 0 : std::prev(after)->second;
  }
  // The first step of at least this level.
  int32_t AtLevel(int32_t level) const {
    return static_cast<int32_t>(std::lower_bound(levels.begin(), levels.end(), level) - levels.begin());
  }
};

// Splits a group of steps that threads run together at the end of a launch.
void SplitTogether(std::vector<ProgramStep>& steps, int32_t begin, int32_t end) {
  for (int32_t i = begin; i < end; i += steps[i].together) {
    if (i + steps[i].together <= end) continue;
    steps[end].together = i + steps[i].together - end;
    steps[i].together = end - i;
  }
}

// Returns the number of the new launch.
int32_t AddLaunch(RankProgram& program, const std::vector<ChannelProgram>& launch) {
  const auto number = static_cast<int32_t>(program.channels.size() / launch.size());
  program.channels.insert(program.channels.end(), launch.begin(), launch.end());
  return number;
}

// Divides a rank's steps into launches. A round begins as early as possible, and steps that can run before the next
// awaited round do so. All channels together keep the order of levels: no step comes after a step of a higher level,
// nor after a wait for a round whose number is the step's level or more. Otherwise a thread block that waits long would
// delay a later launch with steps that other ranks need first.
class Scheduler {
 public:
  Scheduler(std::vector<ChannelSteps>& channels, const std::vector<int32_t>& rounds, RankProgram& program,
            std::vector<ChannelProgram> layout, SendRecvSchedule& result)
      : channels_(channels), rounds_(rounds), program_(program), layout_(std::move(layout)), result_(result) {}

  void Schedule() {
    for (size_t i = 0; i < rounds_.size(); ++i) {
      const int32_t round = rounds_[i];
      LaunchUpTo([&](const ChannelSteps& channel) { return channel.EndOf(round); });
      result_.actions.push_back({Action::kPost, static_cast<int32_t>(i)});
    }
    LaunchUpTo([](const ChannelSteps& channel) { return channel.size(); });
    // The caller's stream must not end before the rounds that this call has begun.
    if (!rounds_.empty()) Await(rounds_.back() + 1);
    // The launch that copies the result (SendRecvSchedule) comes after all rounds.
    if (program_.shares_output && result_.actions.back().kind != Action::kLaunch) {
      result_.actions.push_back({Action::kLaunch, AddLaunch(program_, layout_)});
    }
  }

 private:
  template <typename EndOf>
  void LaunchUpTo(EndOf end_of) {
    int32_t level = 0;
    for (const ChannelSteps& channel : channels_) {
      if (const int32_t end = end_of(channel); end > channel.next) level = std::max(level, channel.levels[end - 1]);
    }
    std::vector<int32_t> ends;
    for (const ChannelSteps& channel : channels_) ends.push_back(std::max(end_of(channel), channel.AtLevel(level)));
    for (int32_t blocked = 0; blocked != kNever;) {
      blocked = kNever;  // all remaining steps wait for rounds before this one
      for (size_t c = 0; c < channels_.size(); ++c) {
        const std::vector<int32_t>& awaited = channels_[c].awaited;
        const auto end = awaited.begin() + std::max(ends[c], channels_[c].next);
        const auto waits = std::upper_bound(awaited.begin() + channels_[c].next, end, awaited_);
        if (waits != end) blocked = std::min(blocked, *waits);
      }
      std::vector<ChannelProgram> launch = layout_;
      bool moves = false;
      for (size_t c = 0; c < channels_.size(); ++c) {
        ChannelSteps& channel = channels_[c];
        const int32_t begin = channel.next;
        channel.next = std::max(begin, std::min(ends[c], channel.AtLevel(blocked)));
        SplitTogether(channel.steps, begin, channel.next);
        launch[c].first_step += begin;
        launch[c].num_steps = channel.next - begin;
        moves = moves || channel.next > begin;
      }
      if (moves) result_.actions.push_back({Action::kLaunch, AddLaunch(program_, launch)});
      if (blocked != kNever) Await(blocked);
    }
  }

  // Waits for this rank's rounds before `end`.
  void Await(int32_t end) {
    awaited_ = end;
    const auto after = std::lower_bound(rounds_.begin(), rounds_.end(), end);
    const auto number = static_cast<int32_t>(after - rounds_.begin()) - 1;
    if (number <= last_awaited_) return;
    last_awaited_ = number;
    result_.actions.push_back({Action::kAwait, number});
  }

  static constexpr int32_t kNever = std::numeric_limits<int32_t>::max();

  std::vector<ChannelSteps>& channels_;
  const std::vector<int32_t>& rounds_;  // this rank's rounds, ascending
  RankProgram& program_;
  const std::vector<ChannelProgram> layout_;
  SendRecvSchedule& result_;
  int32_t awaited_ = 0;
  int32_t last_awaited_ = -1;
};

// The steps that unpack the segments of a round. `begin_of` returns where the channel's part of a message begins.
template <typename BeginOf>
std::vector<ProgramStep> UnpackSteps(const SplitChannel& split, const std::vector<Link>& links, const Request& nothing,
                                     const Fragments& fragments, int32_t rank, BeginOf begin_of) {
  std::vector<Plan> plans(split.plans.size());
  for (size_t r = 0; r < plans.size(); ++r) plans[r].rank = static_cast<int32_t>(r);
  for (const Link& link : links) {
    const auto found = split.segments.find(link);
    if (link[1] != rank || found == split.segments.end()) continue;
    for (const PackedSegment& segment : found->second) {
      Step step;
      step.kind = StepKind::kCopy;
      step.count = segment.count;
      step.dst = segment.dst;
      step.src = {rank, Space::kScratch, begin_of(link) + segment.offset};
      plans[rank].steps.push_back(step);
    }
  }
  return StepsOf(plans, nothing, fragments, rank);
}

}  // namespace

RankProgram MakeSendRecvProgram(const Choice& choice, int64_t block_count, ContiguousCounts contiguous,
                                int64_t item_bytes, int32_t num_channels, int32_t rank, SplitLimits limits,
                                SendRecvSchedule* schedule) {
  RankProgram program;
  *schedule = {};
  Request whole = choice.request;
  whole.block_count = block_count;
  const int64_t grain = std::max<int64_t>(kGrainBytes / item_bytes, 1);
  const auto request_of = [&](int64_t count) {
    Request request = choice.request;
    request.block_count = count;
    return request;
  };

  std::map<int64_t, SplitChannel> splits;  // by the channel's elements per block
  std::vector<const SplitChannel*> by_channel;
  std::vector<ChannelProgram> layout;
  std::vector<int64_t> counts;
  for (int32_t c = 0; c < num_channels; ++c) {
    const Range range = ChannelRange(block_count, item_bytes, num_channels, c);
    counts.push_back(range.count);
    if (splits.count(range.count) == 0) {
      const Request request = request_of(range.count);
      PlanSplitter splitter(BuildAll(*choice.algorithm, request), request.geometry,
                            limits.round_bytes / num_channels / item_bytes, limits.num_slots);
      AddShares(splits.emplace(range.count, std::move(splitter).Split()).first->second.plans, request.geometry,
                program);
    }
    const SplitChannel& split = splits.at(range.count);
    by_channel.push_back(&split);
    ChannelProgram channel;
    channel.input = SliceOf(InputCount(whole), block_count, range, contiguous.input);
    channel.output = SliceOf(OutputCount(whole), block_count, range, contiguous.output);
    channel.scratch_begin = program.scratch_count;
    layout.push_back(channel);
    int64_t scratch_count = 0;  // the same on all ranks: a rank addresses its own and its peers' scratch alike
    for (const Plan& plan : split.plans) scratch_count = std::max(scratch_count, plan.scratch_count);
    program.scratch_count += CeilDiv(scratch_count, grain) * grain;
  }
  const MessageLayout messages(by_channel, grain, limits.num_slots);
  const int64_t messages_begin = program.scratch_count;
  program.scratch_count += messages.count();

  // Each channel has its own steps, because steps contain positions of messages.
  const auto fragments_of = [&](int32_t c) { return Fragments(counts[c], block_count, contiguous); };
  const auto in_channel = [&](int64_t in_messages, int32_t c) {
    return messages_begin + in_messages - layout[c].scratch_begin;
  };
  std::vector<ChannelSteps> channels;
  auto first_step = static_cast<int32_t>(program.steps.size());
  for (int32_t c = 0; c < num_channels; ++c) {
    const SplitChannel& split = *by_channel[c];
    const std::vector<KeptStep>& kept = split.kept[rank];
    ChannelSteps channel;
    channel.steps = StepsOf(split.plans, request_of(counts[c]), fragments_of(c), rank);
    int32_t num_entry_steps = 0;
    for (ProgramStep& step : channel.steps) {
      if (step.origin == kEntryBarrier) ++num_entry_steps;
      if (step.origin < 0) {
        channel.Add(step.origin == kEntryBarrier ? KeptStep{} : split.exit_barrier[rank]);
        continue;
      }
      const KeptStep& of_plan = kept[step.origin];
      channel.Add(of_plan);
      step.origin = of_plan.origin;
      if (of_plan.offset < 0) continue;
      step.step.dst.offset =
          in_channel(messages.Sent(of_plan.link).begin + messages.ChannelOffset(of_plan.link, c) + of_plan.offset, c);
    }
    for (const auto& [round, end] : split.ends[rank]) channel.ends[round] = num_entry_steps + end;
    std::vector<Place> sources = split.plans[rank].sources;
    Flatten(channel.steps, sources, counts[c], block_count, contiguous);
    layout[c].first_step = first_step;
    layout[c].first_source = static_cast<int32_t>(program.sources.size());
    first_step += static_cast<int32_t>(channel.steps.size());
    program.sources.insert(program.sources.end(), sources.begin(), sources.end());
    channels.push_back(std::move(channel));
  }
  std::map<int32_t, std::vector<Link>> links;  // of this rank, by round
  for (const Link& link : messages.Of(rank)) links[link[0]].push_back(link);
  std::vector<int32_t> numbers;
  for (const auto& [round, of_round] : links) numbers.push_back(round);
  Scheduler(channels, numbers, program, layout, *schedule).Schedule();
  for (const ChannelSteps& channel : channels) {
    program.steps.insert(program.steps.end(), channel.steps.begin(), channel.steps.end());
  }

  for (const auto& [number, of_round] : links) {
    Round round;
    for (const Link& link : of_round) {
      const bool sends = link[2] == rank;
      Transfer transfer = sends ? messages.Sent(link) : messages.Received(link);
      transfer.begin += messages_begin;
      (sends ? round.sends : round.receives).push_back(transfer);
    }
    std::vector<ChannelProgram> launch = layout;
    bool moves = false;
    for (int32_t c = 0; c < num_channels; ++c) {
      std::vector<ProgramStep> steps =
          UnpackSteps(*by_channel[c], of_round, request_of(0), fragments_of(c), rank, [&](const Link& link) {
            return in_channel(messages.Received(link).begin + messages.ChannelOffset(link, c), c);
          });
      std::vector<Place> no_sources;
      Flatten(steps, no_sources, counts[c], block_count, contiguous);
      launch[c].first_step = static_cast<int32_t>(program.steps.size());
      launch[c].num_steps = static_cast<int32_t>(steps.size());
      program.steps.insert(program.steps.end(), steps.begin(), steps.end());
      moves = moves || !steps.empty();
    }
    if (moves) round.unpack = AddLaunch(program, launch);
    schedule->rounds.push_back(std::move(round));
  }
  return program;
}

}  // namespace cuda
}  // namespace jaxcomm
