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

// Part of a message: what one put brings.
struct PackedSegment {
  Place dst;
  int64_t count;
  int64_t offset;  // in the channel's part of the message
};

using Link = std::array<int32_t, 3>;  // round, receiver, sender

// A step that is left in a plan.
struct KeptStep {
  int32_t origin = 0;   // position in the plan as it was
  int32_t level = 0;    // see send_recv_schedule.h
  int32_t awaited = 0;  // this rank waits for own rounds before this one
  Link link = {};       // packs: the message
  int64_t offset = -1;  // packs: in the channel's part of it
};

// The plans of one channel, without what goes to other nodes.
struct SplitChannel {
  std::vector<Plan> plans;
  std::vector<std::vector<KeptStep>> left;              // by rank, for each step
  std::vector<KeptStep> leave;                          // by rank: at the end of the plan
  std::vector<std::map<int32_t, int32_t>> ends;         // by rank and round: steps that the round waits for
  std::map<Link, std::vector<PackedSegment>> segments;  // of each message; none: a mere signal
};

// Runs the plans, any schedule of them: which message is in which round does not depend on it.
class PlanSplitter {
 public:
  PlanSplitter(std::vector<Plan> plans, const Geometry& geometry, int64_t round_count, int32_t num_slots)
      : plans_(std::move(plans)),
        geometry_(geometry),
        round_count_(std::max<int64_t>(round_count, 1)),
        num_slots_(num_slots),
        ranks_(plans_.size()) {}

  SplitChannel Split() && {
    split_.left.resize(plans_.size());
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
      KeptStep leave = {kExitBarrier, 0, ranks_[plan.rank].awaited, {}, -1};
      const int32_t first = geometry_.node(plan.rank) * geometry_.ranks_per_node;
      for (int32_t r = first; r < first + geometry_.ranks_per_node; ++r) {
        leave.level = std::max(leave.level, ranks_[r].level);  // all wait for all of the node
      }
      split_.leave.push_back(leave);
    }
    return std::move(split_);
  }

 private:
  struct Rank {
    size_t next = 0;
    int32_t level = 0;
    int32_t awaited = 0;
    int32_t round = 0;   // in which it sends
    int64_t filled = 0;  // elements that are in it
    int64_t packed = 0;  // elements, in all rounds
  };

  // False: the rank has to wait for another.
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
        Enter(rank, rank.level);
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

  static void Enter(Rank& rank, int32_t round) {
    if (round <= rank.round) return;
    rank.round = round;
    rank.filled = 0;
  }

  void Pack(const Plan& plan, const Step& step) {
    Rank& rank = ranks_[plan.rank];
    Enter(rank, std::max(rank.level, rank.round + (rank.filled >= round_count_ ? 1 : 0)));
    rank.filled += step.count;
    // The slot's last round must have been sent. It is before this one, so this keeps to the rule of levels.
    rank.awaited = std::max(rank.awaited, rank.round - num_slots_ + 1);
    rank.level = std::max(rank.level, rank.awaited);
    const Link link = {rank.round, step.peer, plan.rank};
    std::vector<PackedSegment>& segments = split_.segments[link];
    const int64_t offset = segments.empty() ? 0 : segments.back().offset + segments.back().count;
    segments.push_back({step.dst, step.count, offset});
    Step pack = step;
    pack.kind = StepKind::kCopy;
    pack.peer = -1;
    // For now a place that nothing else uses: slots are found when the messages of all channels are known.
    pack.dst = {plan.rank, Space::kScratch, plan.scratch_count + rank.packed};
    rank.packed += step.count;
    Keep(plan.rank, pack);
    split_.left[plan.rank].back().link = link;
    split_.left[plan.rank].back().offset = offset;
    split_.ends[plan.rank][rank.round] = NumKept(plan.rank);
  }

  int32_t NumKept(int32_t rank) const { return static_cast<int32_t>(split_.plans[rank].steps.size()); }

  void Keep(int32_t number, const Step& step) {
    const Rank& rank = ranks_[number];
    split_.plans[number].steps.push_back(step);
    split_.left[number].push_back({static_cast<int32_t>(rank.next), rank.level, rank.awaited, {}, -1});
  }

  const std::vector<Plan> plans_;
  const Geometry geometry_;
  const int64_t round_count_;
  const int32_t num_slots_;
  std::vector<Rank> ranks_;
  std::map<std::array<int32_t, 2>, std::deque<int32_t>> signals_;  // from, to: level at which it is there
  SplitChannel split_;
};

// Where messages lie: for each rank, slots of what it sends, then what it receives. A message has the parts of all
// channels one after the other.
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
      const int64_t count = std::max(parts.back(), grain);  // of a mere signal: something
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

  // Elements from the first message on.
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
  std::map<Link, std::vector<int64_t>> parts_;  // where each channel's begins
  std::map<Link, Placed> messages_;
  std::vector<int64_t> slot_begins_;
  int64_t receive_begin_ = 0;
  int64_t count_ = 0;
};

// The steps of one channel of this rank, with those of entering and leaving.
struct ChannelSteps {
  std::vector<ProgramStep> steps;
  std::vector<int32_t> levels;      // of each, ascending
  std::vector<int32_t> awaited;     // of each, ascending; no more than its level
  std::map<int32_t, int32_t> ends;  // as SplitChannel's
  int32_t next = 0;                 // the first that is in no segment

  void Add(const KeptStep& left) {
    levels.push_back(left.level);
    awaited.push_back(left.awaited);
  }
  int32_t size() const { return static_cast<int32_t>(steps.size()); }
  int32_t EndOf(int32_t round) const {
    const auto after = ends.upper_bound(round);
    return after == ends.begin() ? 0 : std::prev(after)->second;
  }
  // The first step of that level or of a higher one.
  int32_t AtLevel(int32_t level) const {
    return static_cast<int32_t>(std::lower_bound(levels.begin(), levels.end(), level) - levels.begin());
  }
};

// Cuts steps that threads run together where a segment ends.
void SplitTogether(std::vector<ProgramStep>& steps, int32_t begin, int32_t end) {
  for (int32_t i = begin; i < end; i += steps[i].together) {
    if (i + steps[i].together <= end) continue;
    steps[end].together = i + steps[i].together - end;
    steps[i].together = end - i;
  }
}

// Returns its number.
int32_t AddWalk(RankProgram& program, const std::vector<ChannelProgram>& walk) {
  const auto number = static_cast<int32_t>(program.channels.size() / walk.size());
  program.channels.insert(program.channels.end(), walk.begin(), walk.end());
  return number;
}

// Cuts a rank's steps into segments. A round is begun as early as it can be, and what can go on before the next one is
// awaited goes on. But everything keeps to the order of levels, for all channels together: no step comes after one of a
// higher level, nor after a wait for rounds from its level on. Or a thread block that has to wait long would keep a
// later segment from steps that others need first.
class Scheduler {
 public:
  Scheduler(std::vector<ChannelSteps>& channels, const std::vector<int32_t>& rounds, RankProgram& program,
            std::vector<ChannelProgram> layout, SendRecvSchedule& result)
      : channels_(channels), rounds_(rounds), program_(program), layout_(std::move(layout)), result_(result) {}

  void Schedule() {
    for (size_t i = 0; i < rounds_.size(); ++i) {
      const int32_t round = rounds_[i];
      WalkTo([&](const ChannelSteps& channel) { return channel.EndOf(round); });
      result_.actions.push_back({Action::kPost, static_cast<int32_t>(i)});
    }
    WalkTo([](const ChannelSteps& channel) { return channel.size(); });
    // The caller's stream must not end before what it has begun.
    if (!rounds_.empty()) Await(rounds_.back() + 1);
    // What copies the result (SendRecvSchedule) comes after all of them.
    if (program_.shares_output && result_.actions.back().kind != Action::kWalk) {
      result_.actions.push_back({Action::kWalk, AddWalk(program_, layout_)});
    }
  }

 private:
  template <typename EndOf>
  void WalkTo(EndOf end_of) {
    int32_t level = 0;
    for (const ChannelSteps& channel : channels_) {
      if (const int32_t end = end_of(channel); end > channel.next) level = std::max(level, channel.levels[end - 1]);
    }
    std::vector<int32_t> ends;
    for (const ChannelSteps& channel : channels_) ends.push_back(std::max(end_of(channel), channel.AtLevel(level)));
    for (int32_t blocked = 0; blocked != kNever;) {
      blocked = kNever;  // all that is left waits for rounds before this one
      for (size_t c = 0; c < channels_.size(); ++c) {
        const std::vector<int32_t>& awaited = channels_[c].awaited;
        const auto end = awaited.begin() + std::max(ends[c], channels_[c].next);
        const auto waits = std::upper_bound(awaited.begin() + channels_[c].next, end, awaited_);
        if (waits != end) blocked = std::min(blocked, *waits);
      }
      std::vector<ChannelProgram> walk = layout_;
      bool moves = false;
      for (size_t c = 0; c < channels_.size(); ++c) {
        ChannelSteps& channel = channels_[c];
        const int32_t begin = channel.next;
        channel.next = std::max(begin, std::min(ends[c], channel.AtLevel(blocked)));
        SplitTogether(channel.steps, begin, channel.next);
        walk[c].first_step += begin;
        walk[c].num_steps = channel.next - begin;
        moves = moves || channel.next > begin;
      }
      if (moves) result_.actions.push_back({Action::kWalk, AddWalk(program_, walk)});
      if (blocked != kNever) Await(blocked);
    }
  }

  // For own rounds before `end`.
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
  const std::vector<int32_t>& rounds_;  // own ones, ascending
  RankProgram& program_;
  const std::vector<ChannelProgram> layout_;
  SendRecvSchedule& result_;
  int32_t awaited_ = 0;
  int32_t last_awaited_ = -1;
};

// What moves the parcels of a round to where they belong. `begin_of`: where the channel's part of a message is.
template <typename BeginOf>
std::vector<ProgramStep> UnpackSteps(const SplitChannel& cut, const std::vector<Link>& links, const Request& nothing,
                                     const Fragments& fragments, int32_t rank, BeginOf begin_of) {
  std::vector<Plan> plans(cut.plans.size());
  for (size_t r = 0; r < plans.size(); ++r) plans[r].rank = static_cast<int32_t>(r);
  for (const Link& link : links) {
    const auto found = cut.segments.find(link);
    if (link[1] != rank || found == cut.segments.end()) continue;
    for (const PackedSegment& parcel : found->second) {
      Step step;
      step.kind = StepKind::kCopy;
      step.count = parcel.count;
      step.dst = parcel.dst;
      step.src = {rank, Space::kScratch, begin_of(link) + parcel.offset};
      plans[rank].steps.push_back(step);
    }
  }
  return StepsOf(plans, nothing, fragments, rank);
}

}  // namespace

RankProgram MakeSendRecvProgram(const Choice& choice, int64_t block_count, Runs runs, int64_t item_bytes,
                                int32_t num_channels, int32_t rank, SplitLimits limits, SendRecvSchedule* schedule) {
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

  std::map<int64_t, SplitChannel> cuts;  // by elements of a block
  std::vector<const SplitChannel*> by_channel;
  std::vector<ChannelProgram> layout;
  std::vector<int64_t> counts;
  for (int32_t c = 0; c < num_channels; ++c) {
    const Range range = ChannelRange(block_count, item_bytes, num_channels, c);
    counts.push_back(range.count);
    if (cuts.count(range.count) == 0) {
      const Request request = request_of(range.count);
      PlanSplitter cutter(BuildAll(*choice.algorithm, request), request.geometry,
                          limits.round_bytes / num_channels / item_bytes, limits.num_slots);
      AddShares(cuts.emplace(range.count, std::move(cutter).Split()).first->second.plans, request.geometry, program);
    }
    const SplitChannel& cut = cuts.at(range.count);
    by_channel.push_back(&cut);
    ChannelProgram channel;
    channel.input = SliceOf(InputCount(whole), block_count, range, runs.input);
    channel.output = SliceOf(OutputCount(whole), block_count, range, runs.output);
    channel.scratch_begin = program.scratch_count;
    layout.push_back(channel);
    int64_t scratch_count = 0;  // the same at all ranks: peers' scratch is addressed as the own
    for (const Plan& plan : cut.plans) scratch_count = std::max(scratch_count, plan.scratch_count);
    program.scratch_count += CeilDiv(scratch_count, grain) * grain;
  }
  const MessageLayout messages(by_channel, grain, limits.num_slots);
  const int64_t messages_begin = program.scratch_count;
  program.scratch_count += messages.count();

  // Steps, each channel's own: they name places of messages.
  const auto fragments_of = [&](int32_t c) { return Fragments(counts[c], block_count, runs); };
  const auto in_channel = [&](int64_t in_messages, int32_t c) {
    return messages_begin + in_messages - layout[c].scratch_begin;
  };
  std::vector<ChannelSteps> channels;
  auto first_step = static_cast<int32_t>(program.steps.size());
  for (int32_t c = 0; c < num_channels; ++c) {
    const SplitChannel& cut = *by_channel[c];
    const std::vector<KeptStep>& left = cut.left[rank];
    ChannelSteps channel;
    channel.steps = StepsOf(cut.plans, request_of(counts[c]), fragments_of(c), rank);
    int32_t entering = 0;
    for (ProgramStep& step : channel.steps) {
      if (step.origin == kEntryBarrier) ++entering;
      if (step.origin < 0) {
        channel.Add(step.origin == kEntryBarrier ? KeptStep{} : cut.leave[rank]);
        continue;
      }
      const KeptStep& of_plan = left[step.origin];
      channel.Add(of_plan);
      step.origin = of_plan.origin;
      if (of_plan.offset < 0) continue;
      step.step.dst.offset =
          in_channel(messages.Sent(of_plan.link).begin + messages.ChannelOffset(of_plan.link, c) + of_plan.offset, c);
    }
    for (const auto& [round, end] : cut.ends[rank]) channel.ends[round] = entering + end;
    std::vector<Place> sources = cut.plans[rank].sources;
    Flatten(channel.steps, sources, counts[c], block_count, runs);
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
    std::vector<ChannelProgram> walk = layout;
    bool moves = false;
    for (int32_t c = 0; c < num_channels; ++c) {
      std::vector<ProgramStep> steps =
          UnpackSteps(*by_channel[c], of_round, request_of(0), fragments_of(c), rank, [&](const Link& link) {
            return in_channel(messages.Received(link).begin + messages.ChannelOffset(link, c), c);
          });
      std::vector<Place> no_sources;
      Flatten(steps, no_sources, counts[c], block_count, runs);
      walk[c].first_step = static_cast<int32_t>(program.steps.size());
      walk[c].num_steps = static_cast<int32_t>(steps.size());
      program.steps.insert(program.steps.end(), steps.begin(), steps.end());
      moves = moves || !steps.empty();
    }
    if (moves) round.unpack = AddWalk(program, walk);
    schedule->rounds.push_back(std::move(round));
  }
  return program;
}

}  // namespace cuda
}  // namespace jaxcomm
