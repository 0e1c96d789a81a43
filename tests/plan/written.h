// Plans written by hand: steps, places and groups of plans in one line each.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/validate.h"
#include "../check.h"

namespace jaxcomm {

constexpr Collective kCollectives[] = {
#define JAXCOMM_COLLECTIVE(enumerator, name, ...) Collective::enumerator,
#include "../../ffi/collectives.def"
#undef JAXCOMM_COLLECTIVE
};

inline Place Input(int32_t rank, int64_t offset = 0) { return {rank, Space::kInput, offset}; }
inline Place Output(int32_t rank, int64_t offset = 0) { return {rank, Space::kOutput, offset}; }
inline Place Scratch(int32_t rank, int64_t offset = 0) { return {rank, Space::kScratch, offset}; }

inline Step Move(StepKind kind, int32_t peer, Place dst, Place src, int64_t count) {
  Step step;
  step.kind = kind;
  step.peer = peer;
  step.count = count;
  step.dst = dst;
  step.src = src;
  return step;
}
inline Step Copy(Place dst, Place src, int64_t count) { return Move(StepKind::kCopy, -1, dst, src, count); }
inline Step Put(Place dst, Place src, int64_t count) { return Move(StepKind::kPut, dst.rank, dst, src, count); }
inline Step Get(Place dst, Place src, int64_t count) { return Move(StepKind::kGet, src.rank, dst, src, count); }
inline Step Zero(Place dst, int64_t count) { return Move(StepKind::kZero, -1, dst, {}, count); }
inline Step Signal(int32_t peer) { return Move(StepKind::kSignal, peer, {}, {}, 0); }
inline Step Wait(int32_t peer) { return Move(StepKind::kWait, peer, {}, {}, 0); }
// Operands: `num_sources` places of Plan::sources, from `first_source` on.
inline Step Reduce(Place dst, int32_t first_source, int32_t num_sources, int64_t count) {
  Step step = Move(StepKind::kReduce, -1, dst, {}, count);
  step.first_source = first_source;
  step.num_sources = num_sources;
  return step;
}

// The plans of ranks 0, 1, ...
inline std::vector<Plan> Group(std::vector<std::vector<Step>> steps, int64_t scratch_count = 0) {
  std::vector<Plan> plans(steps.size());
  for (size_t rank = 0; rank < steps.size(); ++rank) {
    plans[rank].rank = static_cast<int32_t>(rank);
    plans[rank].num_ranks = static_cast<int32_t>(steps.size());
    plans[rank].scratch_count = scratch_count;
    plans[rank].steps = std::move(steps[rank]);
  }
  return plans;
}

inline Request Ask(Collective collective, int32_t num_nodes, int32_t ranks_per_node, int64_t block_count,
                   int64_t chunk_count = 0) {
  Request request;
  request.collective = collective;
  request.geometry.num_nodes = num_nodes;
  request.geometry.ranks_per_node = ranks_per_node;
  request.block_count = block_count;
  request.chunk_count = chunk_count;
  if (collective == Collective::kPermute) {  // to the next rank; the first gets zeros
    for (int32_t rank = 0; rank < num_nodes * ranks_per_node; ++rank) request.source_of.push_back(rank - 1);
  }
  return request;
}
// The same request, but ranks cannot read the memory of other nodes.
inline Request AskApart(Collective collective, int32_t num_nodes, int32_t ranks_per_node, int64_t block_count,
                        int64_t chunk_count = 0) {
  Request request = Ask(collective, num_nodes, ranks_per_node, block_count, chunk_count);
  request.geometry.all_addressable = false;
  return request;
}

inline std::vector<Plan> Build(const char* algorithm, const Request& request) {
  const Algorithm* found = FindAlgorithm(request.collective, algorithm);
  CHECK(found != nullptr && found->supports(request));
  return BuildAll(*found, request);
}

inline void Expect(const std::string& expected, const std::string& got) {
  if (got != expected) std::fprintf(stderr, "expected: \"%s\"\n     got: \"%s\"\n", expected.c_str(), got.c_str());
  CHECK(got == expected);
}
// `fault`: the whole message of Validate; empty if it accepts the plans.
inline void Expect(const std::string& fault, const std::vector<Plan>& plans, const Request& request) {
  Expect(fault, Validate(plans, request).message());
}

}  // namespace jaxcomm
