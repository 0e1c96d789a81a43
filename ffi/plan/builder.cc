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

void Builder::Reserve(int64_t steps, int64_t sources) {
  plan_.steps.reserve(static_cast<size_t>(steps));
  plan_.sources.reserve(static_cast<size_t>(sources));
}

void Builder::Move(Place src, Place dst, int64_t count) {
  if (count <= 0 || SamePlace(src, dst)) return;
  Step& step = plan_.steps.emplace_back();  // in place: a copy waits for the stores of its parts
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
}

void Builder::Reduce(const std::vector<Place>& sources, Place dst, int64_t count) {
  if (count <= 0 || sources.empty()) return;
  if (sources.size() == 1) return Move(sources[0], dst, count);
  Step& step = plan_.steps.emplace_back();
  step.kind = StepKind::kReduce;
  step.count = count;
  step.dst = dst;
  step.first_source = static_cast<int32_t>(plan_.sources.size());
  step.num_sources = static_cast<int32_t>(sources.size());
  plan_.sources.insert(plan_.sources.end(), sources.begin(), sources.end());
}

void Builder::Zero(Place dst, int64_t count) {
  if (count <= 0) return;
  Step& step = plan_.steps.emplace_back();
  step.kind = StepKind::kZero;
  step.count = count;
  step.dst = dst;
}

void Builder::Signal(int32_t peer) {
  Step& step = plan_.steps.emplace_back();
  step.kind = StepKind::kSignal;
  step.peer = peer;
}

void Builder::Wait(int32_t peer) {
  Step& step = plan_.steps.emplace_back();
  step.kind = StepKind::kWait;
  step.peer = peer;
}

Plan Builder::Finish(int64_t scratch_count) && {
  plan_.scratch_count = scratch_count;
  return std::move(plan_);
}

}  // namespace jaxcomm
