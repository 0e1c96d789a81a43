// The checks of Validate on single steps, which need only the geometry and the sizes of the buffers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"
#include "plan/partition.h"
#include "plan/plan.h"

namespace jaxcomm {

// Names elements [begin, end) of the buffer of `place`, for messages.
inline std::string Interval(const Place& place, int64_t begin, int64_t end) {
  constexpr const char* kSpaces[] = {"input", "output", "scratch"};
  return std::string(kSpaces[static_cast<int>(place.space)]) + " [" + std::to_string(begin) + ", " +
         std::to_string(end) + ") of rank " + std::to_string(place.rank);
}

// Whether elements [offset, offset + count) of the place's buffer exist.
inline Status CheckBounds(const std::vector<Plan>& plans, const Request& request, const Place& place, int64_t count) {
  int64_t size = 0;
  switch (place.space) {
    case Space::kInput:
      size = InputCount(request);
      break;
    case Space::kOutput:
      size = OutputCount(request);
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
inline Status CheckStep(const std::vector<Plan>& plans, const Request& request, int32_t rank, const Step& step) {
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

}  // namespace jaxcomm
