#include "cuda/program/packing.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "plan/channels.h"
#include "plan/partition.h"

namespace jaxcomm::cuda {
namespace {

// The data of one put in its receiver's scratch.
struct PackedSegment {
  Place dst;
  int64_t count;
  int64_t offset;  // in scratch
  int32_t signal;  // number of the sender's next signal to the receiver
};

class Packer {
 public:
  Packer(const std::vector<Plan>& plans, const Geometry& geometry, const Fragments& fragments, int64_t item_bytes,
         int32_t num_channels, PackLimits limits)
      : plans_(plans),
        geometry_(geometry),
        fragments_(fragments),
        item_bytes_(item_bytes),
        grain_(std::max<int64_t>(kGrainBytes / item_bytes, 1)),
        send_count_(limits.send_bytes / num_channels / item_bytes),
        fragment_bytes_(limits.fragment_bytes) {}

  PackedPlans Pack() && {
    for (const Plan& plan : plans_) PlaceSends(plan);
    for (const Plan& plan : plans_) PlaceReceives(plan);
    result_.origins.resize(plans_.size());
    for (const Plan& plan : plans_) Rewrite(plan);
    return std::move(result_);
  }

 private:
  using Link = std::array<int32_t, 2>;  // sender, receiver

  int64_t Aligned(int64_t count) const { return CeilDiv(count, grain_) * grain_; }

  bool IsShort(const Place& place, int64_t count) const {
    const int64_t num_fragments = fragments_.Usual(place, count);
    return num_fragments > 1 && count * item_bytes_ < num_fragments * fragment_bytes_;
  }

  template <typename Visit>
  void ForEachInterNodePut(const Plan& plan, Visit visit) const {
    for (const Step& step : plan.steps) {
      if (IsInterNodePut(geometry_, plan, step)) visit(step);
    }
  }

  // Layout of scratch: the plan's own scratch, then packed data to send, then received data. The space for sends is
  // reused in turn: before a step packs into used space, the network must have read the earlier put (StepsOf). Each
  // received put has a place of its own, because no message informs the sender when a place is free.
  void PlaceSends(const Plan& plan) {
    int64_t largest = 0, all = 0;
    ForEachInterNodePut(plan, [&](const Step& step) {
      if (!IsShort(step.src, step.count)) return;
      largest = std::max(largest, Aligned(step.count));
      all += Aligned(step.count);
    });
    sends_.push_back({Aligned(plan.scratch_count), std::min(all, std::max(largest, send_count_))});
    end_.push_back(sends_.back().begin + Aligned(sends_.back().count));
  }

  void PlaceReceives(const Plan& plan) {
    std::map<int32_t, int32_t> num_signals;  // by receiver
    for (const Step& step : plan.steps) {
      if (step.kind == StepKind::kSignal) ++num_signals[step.peer];
      if (!IsInterNodePut(geometry_, plan, step) || !IsShort(step.dst, step.count)) continue;
      segments_[{plan.rank, step.peer}].push_back({step.dst, step.count, end_[step.peer], num_signals[step.peer]});
      end_[step.peer] += Aligned(step.count);
    }
    for (const auto& [peer, count] : num_signals) num_signals_[{plan.rank, peer}] = count;
  }

  void Rewrite(const Plan& plan) {
    Plan kept = plan;
    kept.steps.clear();
    kept.scratch_count = end_[plan.rank];
    result_.plans.push_back(std::move(kept));
    std::map<int32_t, size_t> num_put;        // segments, by receiver
    std::map<int32_t, int32_t> num_received;  // signals, by sender
    int64_t packed = 0;
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      const auto origin = static_cast<int32_t>(i);
      Step step = plan.steps[i];
      if (step.kind == StepKind::kWait) {
        Add(plan.rank, step, origin);
        Unpack(plan.rank, step.peer, num_received[step.peer]++, origin);
        continue;
      }
      if (!IsInterNodePut(geometry_, plan, step)) {
        Add(plan.rank, step, origin);
        continue;
      }
      if (IsShort(step.src, step.count)) {
        const Sends& sends = sends_[plan.rank];
        if (packed + step.count > sends.count) packed = 0;
        const Place to = {plan.rank, Space::kScratch, sends.begin + packed};
        packed += Aligned(step.count);
        Add(plan.rank, Copy(step.src, to, step.count), origin);
        step.src = to;
      }
      const bool unpacks = IsShort(step.dst, step.count);
      const Link link = {plan.rank, step.peer};
      if (unpacks) {
        const PackedSegment& segment = segments_.at(link)[num_put[step.peer]++];
        step.dst = {step.peer, Space::kScratch, segment.offset};
      }
      AddPuts(plan.rank, step, origin);
      // If no signal of the plan follows, an extra signal announces the data to the receiver.
      if (unpacks && num_put[step.peer] == segments_.at(link).size() && IsOpen(link)) {
        Add(plan.rank, Synchronize(StepKind::kSignal, step.peer), kExitBarrier);
      }
    }
    const auto n = static_cast<int32_t>(plans_.size());
    for (int32_t s = 1; s < n; ++s) {
      const int32_t peer = (plan.rank + n - s) % n;
      if (!IsOpen({peer, plan.rank})) continue;
      Add(plan.rank, Synchronize(StepKind::kWait, peer), kExitBarrier);
      Unpack(plan.rank, peer, NumSignals({peer, plan.rank}), kExitBarrier);
    }
  }

  int32_t NumSignals(const Link& link) const {
    const auto found = num_signals_.find(link);
    return found == num_signals_.end() ? 0 : found->second;
  }

  // Whether no signal of the plan follows the last segment.
  bool IsOpen(const Link& link) const {
    const auto found = segments_.find(link);
    return found != segments_.end() && found->second.back().signal == NumSignals(link);
  }

  static Step Copy(const Place& src, const Place& dst, int64_t count) {
    Step step;
    step.kind = StepKind::kCopy;
    step.count = count;
    step.src = src;
    step.dst = dst;
    return step;
  }

  static Step Synchronize(StepKind kind, int32_t peer) {
    Step step;
    step.kind = kind;
    step.peer = peer;
    return step;
  }

  void Add(int32_t rank, const Step& step, int32_t origin) {
    result_.plans[rank].steps.push_back(step);
    result_.origins[rank].push_back(origin);
  }

  void AddPuts(int32_t rank, const Step& step, int32_t origin) {
    Step part = step;
    for (int64_t done = 0; done < step.count; done += part.count) {
      part.src.offset = step.src.offset + done;
      part.dst.offset = step.dst.offset + done;
      // Computed for each part, because the number of fragments depends on where the part begins.
      part.count = step.count - done;
      while (part.count > 1 && fragments_.MostPuts(part) > kMostPutsUnderWay) part.count = CeilDiv(part.count, 2);
      Add(rank, part, origin);
    }
  }

  // Unpacks the data that `peer` has put before its signal number `signal`.
  void Unpack(int32_t rank, int32_t peer, int32_t signal, int32_t origin) {
    const auto found = segments_.find({peer, rank});
    if (found == segments_.end()) return;
    for (const PackedSegment& segment : found->second) {
      if (segment.signal != signal) continue;
      Add(rank, Copy({rank, Space::kScratch, segment.offset}, segment.dst, segment.count), origin);
    }
  }

  struct Sends {
    int64_t begin, count;
  };

  const std::vector<Plan>& plans_;
  const Geometry& geometry_;
  const Fragments& fragments_;
  const int64_t item_bytes_, grain_, send_count_, fragment_bytes_;
  std::vector<Sends> sends_;  // by rank
  std::vector<int64_t> end_;  // of scratch, by rank
  std::map<Link, std::vector<PackedSegment>> segments_;
  std::map<Link, int32_t> num_signals_;
  PackedPlans result_;
};

}  // namespace

int64_t Fragments::ContiguousCount(const Place& place) const {
  const int64_t count = place.space == Space::kInput ? contiguous_.input : contiguous_.output;
  return count > 0 ? count : whole_count_;
}

// Whether the channel has all of the buffer, as one contiguous range.
bool Fragments::InOne(const Place& place) const {
  return place.space == Space::kScratch || (block_count_ == whole_count_ && ContiguousCount(place) == whole_count_);
}

int64_t Fragments::BlocksOf(const Place& place, int64_t count) const {
  return (place.offset % block_count_ + count - 1) / block_count_ + 1;
}

int64_t Fragments::Usual(const Place& place, int64_t count) const {
  if (InOne(place)) return 1;
  return BlocksOf(place, count) * CeilDiv(std::min(count, block_count_), ContiguousCount(place));
}

int64_t Fragments::Most(const Place& place, int64_t count) const {
  if (InOne(place)) return 1;
  const int64_t contiguous_count = ContiguousCount(place);
  const int64_t num_splits =
      contiguous_count == whole_count_ ? 0 : CeilDiv(std::min(count, block_count_) - 1, contiguous_count);
  return BlocksOf(place, count) * (1 + num_splits);
}

bool Fragments::IsFlat(const Place& place, int64_t count) const {
  if (place.space == Space::kScratch) return true;
  if (ContiguousCount(place) != whole_count_) return false;
  return block_count_ == whole_count_ || place.offset % block_count_ + count <= block_count_;
}

int64_t Fragments::Position(const Place& place) const {
  if (place.space == Space::kScratch) return place.offset;
  return place.offset / block_count_ * whole_count_ + place.offset % block_count_;
}

int64_t Fragments::MostPuts(const Step& step) const {
  return Most(step.src, step.count) + Most(step.dst, step.count) - 1;
}

bool IsInterNodePut(const Geometry& geometry, const Plan& plan, const Step& step) {
  return step.kind == StepKind::kPut && geometry.node(step.peer) != geometry.node(plan.rank);
}

PackedPlans PackInterNodePuts(const std::vector<Plan>& plans, const Geometry& geometry, const Fragments& fragments,
                              int64_t item_bytes, int32_t num_channels, PackLimits limits) {
  return Packer(plans, geometry, fragments, item_bytes, num_channels, limits).Pack();
}

}  // namespace jaxcomm::cuda
