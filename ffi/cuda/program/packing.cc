#include "cuda/program/packing.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "cuda/program/steps.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace cuda {
namespace {

bool IsInterNodePut(const Geometry& geometry, const Plan& plan, const Step& step) {
  return step.kind == StepKind::kPut && geometry.node(step.peer) != geometry.node(plan.rank);
}

// What a put leaves in its receiver's scratch.
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
        run_bytes_(limits.run_bytes) {}

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
    const int64_t num_pieces = fragments_.Usual(place, count);
    return num_pieces > 1 && count * item_bytes_ < num_pieces * run_bytes_;
  }

  template <typename Visit>
  void ForEachInterNodePut(const Plan& plan, Visit visit) const {
    for (const Step& step : plan.steps) {
      if (IsInterNodePut(geometry_, plan, step)) visit(step);
    }
  }

  // After the plan's own scratch comes what is sent, in turns: whoever packs into a place again has the put before read
  // (StepsOf). Then comes what is received, each put in a place of its own: nobody tells the sender that it is free.
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
      parcels_[{plan.rank, step.peer}].push_back({step.dst, step.count, end_[step.peer], num_signals[step.peer]});
      end_[step.peer] += Aligned(step.count);
    }
    for (const auto& [peer, count] : num_signals) num_signals_[{plan.rank, peer}] = count;
  }

  void Rewrite(const Plan& plan) {
    Plan kept = plan;
    kept.steps.clear();
    kept.scratch_count = end_[plan.rank];
    result_.plans.push_back(std::move(kept));
    std::map<int32_t, size_t> num_put;        // parcels, by receiver
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
        const PackedSegment& parcel = parcels_.at(link)[num_put[step.peer]++];
        step.dst = {step.peer, Space::kScratch, parcel.offset};
      }
      AddPuts(plan.rank, step, origin);
      // The receiver has to know when it can unpack what no signal of the plan follows.
      if (unpacks && num_put[step.peer] == parcels_.at(link).size() && IsOpen(link)) {
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

  // Whether no signal of the plan follows the last parcel.
  bool IsOpen(const Link& link) const {
    const auto found = parcels_.find(link);
    return found != parcels_.end() && found->second.back().signal == NumSignals(link);
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
    while (part.count > 1 && fragments_.MostPuts(part) > kMostPutsUnderWay) part.count = CeilDiv(part.count, 2);
    const int64_t most = part.count;
    for (int64_t done = 0; done < step.count; done += most) {
      part.count = std::min(most, step.count - done);
      Add(rank, part, origin);
      part.src.offset += most;
      part.dst.offset += most;
    }
  }

  // What `peer` has put before its signal of that number.
  void Unpack(int32_t rank, int32_t peer, int32_t signal, int32_t origin) {
    const auto found = parcels_.find({peer, rank});
    if (found == parcels_.end()) return;
    for (const PackedSegment& parcel : found->second) {
      if (parcel.signal != signal) continue;
      Add(rank, Copy({rank, Space::kScratch, parcel.offset}, parcel.dst, parcel.count), origin);
    }
  }

  struct Sends {
    int64_t begin, count;
  };

  const std::vector<Plan>& plans_;
  const Geometry& geometry_;
  const Fragments& fragments_;
  const int64_t item_bytes_, grain_, send_count_, run_bytes_;
  std::vector<Sends> sends_;  // by rank
  std::vector<int64_t> end_;  // of scratch, by rank
  std::map<Link, std::vector<PackedSegment>> parcels_;
  std::map<Link, int32_t> num_signals_;
  PackedPlans result_;
};

}  // namespace

int64_t Fragments::RunOf(const Place& place) const {
  const int64_t run = place.space == Space::kInput ? runs_.input : runs_.output;
  return run > 0 ? run : whole_count_;
}

// All of the buffer.
bool Fragments::InOne(const Place& place) const {
  return place.space == Space::kScratch || (block_count_ == whole_count_ && RunOf(place) == whole_count_);
}

int64_t Fragments::BlocksOf(const Place& place, int64_t count) const {
  return (place.offset % block_count_ + count - 1) / block_count_ + 1;
}

int64_t Fragments::Usual(const Place& place, int64_t count) const {
  if (InOne(place)) return 1;
  return BlocksOf(place, count) * CeilDiv(std::min(count, block_count_), RunOf(place));
}

int64_t Fragments::Most(const Place& place, int64_t count) const {
  if (InOne(place)) return 1;
  const int64_t run = RunOf(place);
  const int64_t cuts = run == whole_count_ ? 0 : CeilDiv(std::min(count, block_count_) - 1, run);
  return BlocksOf(place, count) * (1 + cuts);
}

int64_t Fragments::MostPuts(const Step& step) const {
  return Most(step.src, step.count) + Most(step.dst, step.count) - 1;
}

PackedPlans PackInterNodePuts(const std::vector<Plan>& plans, const Geometry& geometry, const Fragments& fragments,
                              int64_t item_bytes, int32_t num_channels, PackLimits limits) {
  return Packer(plans, geometry, fragments, item_bytes, num_channels, limits).Pack();
}

}  // namespace cuda
}  // namespace jaxcomm
