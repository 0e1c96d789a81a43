// The plan layer without Python: builder, table of algorithms, validation, cost and selection.
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/builder.h"
#include "../../ffi/plan/cost.h"
#include "../../ffi/plan/select.h"
#include "../../ffi/plan/validate.h"
#include "../check.h"

namespace jaxcomm {
namespace {

constexpr Collective kCollectives[] = {
#define JAXCOMM_COLLECTIVE(enumerator, name, ...) Collective::enumerator,
#include "../../ffi/collectives.def"
#undef JAXCOMM_COLLECTIVE
};

Request MakeRequest(Collective collective, int32_t num_nodes, int32_t ranks_per_node, int64_t block_count) {
  Request request;
  request.collective = collective;
  request.geometry.num_nodes = num_nodes;
  request.geometry.ranks_per_node = ranks_per_node;
  request.block_count = block_count;
  if (collective == Collective::kPermute) {
    for (int32_t rank = 0; rank < request.geometry.num_ranks(); ++rank) request.source_of.push_back(rank - 1);
  }
  return request;
}

Machine MakeMachine() {
  Machine machine;
  machine.links = {LinkModel{1e-7, 1e10}, LinkModel{1e-6, 1e10}, LinkModel{5e-6, 1e9}};
  return machine;
}

TEST_CASE("a builder picks the kind of a step") {
  const Request request = MakeRequest(Collective::kAllReduce, 1, 3, 8);
  Builder builder(request, 1);
  builder.Move(builder.Input(0), builder.Output(0), 8);
  builder.Move(builder.Input(0), Builder::At(2, Space::kScratch, 4), 8);
  builder.Move(Builder::At(0, Space::kInput, 2), builder.Output(2), 6);
  builder.Move(builder.Output(3), builder.Output(3), 5);  // the same place
  builder.Move(builder.Input(0), builder.Output(0), 0);   // nothing
  builder.Zero(builder.Output(0), 0);
  builder.Reduce({builder.Input(0)}, builder.Output(0), 8);  // of one operand
  builder.Reduce({builder.Input(0), Builder::At(2, Space::kInput, 0)}, builder.Output(0), 8);
  const Plan plan = std::move(builder).Finish(12);
  const StepKind kinds[] = {StepKind::kCopy, StepKind::kPut, StepKind::kGet, StepKind::kCopy, StepKind::kReduce};
  CHECK(plan.rank == 1 && plan.num_ranks == 3 && plan.scratch_count == 12);
  CHECK(plan.steps.size() == 5);
  for (size_t i = 0; i < 5; ++i) CHECK(plan.steps[i].kind == kinds[i]);
  CHECK(plan.steps[1].peer == 2 && plan.steps[2].peer == 0);
  CHECK(plan.sources.size() == 2 && plan.steps[4].first_source == 0 && plan.steps[4].num_sources == 2);
}

TEST_CASE("every algorithm is correct for a few geometries") {
  for (Collective collective : kCollectives) {
    CHECK(std::strcmp(Algorithms(collective)[0].name, "direct") == 0);
    for (const Algorithm& algorithm : Algorithms(collective)) {
      CHECK(FindAlgorithm(collective, algorithm.name) == &algorithm);
      for (int32_t num_nodes : {1, 2, 3}) {
        for (int32_t ranks_per_node : {1, 2, 4}) {
          for (int64_t chunk_count : {0, 5}) {
            Request request = MakeRequest(collective, num_nodes, ranks_per_node, 67);
            request.chunk_count = chunk_count;
            if (!algorithm.supports(request)) continue;
            const std::string fault = Validate(BuildAll(algorithm, request), request);
            if (!fault.empty()) std::fprintf(stderr, "%s %s: %s\n", Name(collective), algorithm.name, fault.c_str());
            CHECK(fault.empty());
          }
        }
      }
    }
    CHECK(FindAlgorithm(collective, "none") == nullptr);
  }
}

TEST_CASE("no step of a ring can be left out") {
  const Request request = MakeRequest(Collective::kAllGather, 1, 4, 16);
  const Algorithm& ring = *FindAlgorithm(Collective::kAllGather, "ring");
  const std::vector<Plan> plans = BuildAll(ring, request);
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    for (size_t i = 0; i < plans[rank].steps.size(); ++i) {
      std::vector<Plan> broken = plans;
      broken[rank].steps.erase(broken[rank].steps.begin() + static_cast<std::ptrdiff_t>(i));
      CHECK(!Validate(broken, request).empty());
    }
  }
  CHECK(!Validate({}, request).empty());
}

TEST_CASE("cost of a ring") {
  const Request request = MakeRequest(Collective::kAllGather, 1, 4, 1000);
  const Algorithm& ring = *FindAlgorithm(Collective::kAllGather, "ring");
  const Cost cost = CostOf(ring, request, 4, MakeMachine());
  const Traffic& node = cost.traffic[static_cast<size_t>(Link::kNode)];
  CHECK(node.messages == 3 && node.bytes == 3 * 4000 && node.signals == 2);
  CHECK(cost.traffic[static_cast<size_t>(Link::kSelf)].bytes == 4000);
  CHECK(cost.time_s > 0);
}

TEST_CASE("selection") {
  const Machine machine = MakeMachine();
  const Choice hierarchical = Select(MakeRequest(Collective::kAllToAll, 2, 4, 1 << 20), "", 4, machine);
  CHECK(std::strcmp(hierarchical.algorithm->name, "hierarchical") == 0);
  CHECK(hierarchical.request.chunk_count > 0);
  const Choice asked = Select(MakeRequest(Collective::kAllToAll, 2, 4, 1), "bruck", 4, machine);
  CHECK(std::strcmp(asked.algorithm->name, "bruck") == 0 && asked.reason == "asked for");
  const Choice none = Select(MakeRequest(Collective::kAllToAll, 2, 4, 1), "fast", 4, machine);
  CHECK(none.algorithm == nullptr && !none.reason.empty());
}

}  // namespace
}  // namespace jaxcomm
