#include "plan/builder.h"

namespace jaxcomm {
namespace {

bool SamePlace(const Place& a, const Place& b) {
  return a.rank == b.rank && a.space == b.space && a.offset == b.offset;
}

}  // namespace

Builder::Builder(const Request& request, int32_t rank) : rank_(rank) {
  plan_.rank = rank;
  plan_.num_ranks = request.geometry.num_ranks();
}

void Builder::Move(Place src, Place dst, int64_t count) {
  if (count <= 0 || SamePlace(src, dst)) return;
  Step step;
  step.count = count;
  step.src = src;
  step.dst = dst;
  if (dst.rank != rank_) {
    step.kind = StepKind::kPut;
    step.peer = dst.rank;
  } else if (src.rank != rank_) {
    step.kind = StepKind::kGet;
    step.peer = src.rank;
  } else {
    step.kind = StepKind::kCopy;
  }
  plan_.steps.push_back(step);
}

void Builder::Reduce(const std::vector<Place>& sources, Place dst, int64_t count) {
  if (count <= 0 || sources.empty()) return;
  if (sources.size() == 1) return Move(sources[0], dst, count);
  Step step;
  step.kind = StepKind::kReduce;
  step.count = count;
  step.dst = dst;
  step.first_source = static_cast<int32_t>(plan_.sources.size());
  step.num_sources = static_cast<int32_t>(sources.size());
  plan_.sources.insert(plan_.sources.end(), sources.begin(), sources.end());
  plan_.steps.push_back(step);
}

void Builder::Zero(Place dst, int64_t count) {
  if (count <= 0) return;
  Step step;
  step.kind = StepKind::kZero;
  step.count = count;
  step.dst = dst;
  plan_.steps.push_back(step);
}

void Builder::Signal(int32_t peer) {
  Step step;
  step.kind = StepKind::kSignal;
  step.peer = peer;
  plan_.steps.push_back(step);
}

void Builder::Wait(int32_t peer) {
  Step step;
  step.kind = StepKind::kWait;
  step.peer = peer;
  plan_.steps.push_back(step);
}

Plan Builder::Finish(int64_t scratch_count) && {
  plan_.scratch_count = scratch_count;
  return std::move(plan_);
}

}  // namespace jaxcomm
