// Builds the plan of one rank. Enforces rules of plan.h: no empty data step, the right kind of step for each pair of
// places.
#pragma once

#include <utility>
#include <vector>

#include "plan/plan.h"

namespace jaxcomm {

class Builder {
 public:
  Builder(const Request& request, int32_t rank);

  Place Input(int64_t offset) const { return {rank_, Space::kInput, offset}; }
  Place Output(int64_t offset) const { return {rank_, Space::kOutput, offset}; }
  Place Scratch(int64_t offset) const { return {rank_, Space::kScratch, offset}; }
  static Place At(int32_t peer, Space space, int64_t offset) { return {peer, space, offset}; }

  // Makes room for this many steps and operands of reductions. A plan may have more.
  void Reserve(int64_t steps, int64_t sources);
  // dst = src: a copy, put or get, depending on the ranks of src and dst. No step if count is 0 or src and dst are the
  // same place.
  void Move(Place src, Place dst, int64_t count);
  // dst = sources[0] op sources[1] ...; dst is in this rank's memory.
  void Reduce(const std::vector<Place>& sources, Place dst, int64_t count);
  void Zero(Place dst, int64_t count);
  void Signal(int32_t peer);
  void Wait(int32_t peer);

  // Returns the plan. scratch_count: elements of scratch at every rank.
  Plan Finish(int64_t scratch_count) &&;

 private:
  int32_t rank_;
  Plan plan_;
};

}  // namespace jaxcomm
