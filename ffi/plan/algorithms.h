// The table of algorithms of each collective.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plan/plan.h"

namespace jaxcomm {

// How the plan of an algorithm is executed.
enum class Protocol : uint8_t {
  kSteps,  // step by step
  // By LL messages, which carry their own flags, with the result of the plan. The plan must be direct. Without
  // Machine::ll (or ll_two_shot) the plan is executed step by step.
  kLl,         // each message holds a block
  kLlTwoShot,  // each message holds one of n parts of a block; a second exchange distributes the sums
  // By a switch that reads from and writes to all ranks at once. The switch determines the order of sums, not the plan.
  // Never selected automatically.
  kMultimem,
};

// Which requests an algorithm supports.
struct Support {
  bool (*predicate)(const Request& request);  // called with well-formed requests only
  const char* requirement;                    // the predicate in words, after "needs" in an error text
  bool hierarchical = false;                  // made for several nodes of several ranks; selection prefers it there

  bool operator()(const Request& request) const;
};

struct Algorithm {
  const char* name;
  const char* source;  // paper, DOI or upstream file
  Support supports;    // requests that `build` accepts
  Plan (*build)(const Request& request, int32_t rank);
  Protocol protocol = Protocol::kSteps;
};

// An algorithm and the request of its plans.
struct Choice {
  Choice(const Algorithm& chosen, Request of_chosen) : algorithm(&chosen), request(std::move(of_chosen)) {}

  const Algorithm* algorithm;  // never null
  Request request;
};

// Rows in order of preference: of rows with equal predicted cost, the first is selected.
const std::vector<Algorithm>& Algorithms(Collective collective);

// Null if no algorithm has that name.
const Algorithm* FindAlgorithm(Collective collective, const char* name);

// The plan of one rank, staged if the request has a staged_count. The request must be supported.
Plan BuildPlan(const Algorithm& algorithm, const Request& request, int32_t rank);

// The plans of all ranks, in rank order.
std::vector<Plan> BuildAll(const Algorithm& algorithm, const Request& request);

}  // namespace jaxcomm
