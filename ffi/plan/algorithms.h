// The table of algorithms: one row per way to carry out a collective.
#pragma once

#include <cstdint>
#include <vector>

#include "plan.h"

namespace jaxcomm {

// How a plan is carried out.
enum class Protocol : uint8_t {
  kSteps,  // step by step
  // As an exchange of messages that carry their own flags, with the result of the plan, which has to be direct; where
  // Machine::ll says so, elsewhere step by step.
  kLl,         // blocks
  kLlTwoShot,  // pieces of a block, one per rank; then the sums of these
  // By a switch that reads from, and writes to, all ranks at once. Sums are in the order of the switch, not in the
  // plan's. Only where it is asked for.
  kMultimem,
};

// Which requests an algorithm supports.
struct Support {
  bool (*predicate)(const Request& request);  // of a well-formed request
  const char* requirement;                    // for people, after "needs": what the predicate asks for
  bool hierarchical = false;  // a plan for several nodes of several ranks, which selection prefers there

  bool operator()(const Request& request) const;
};

struct Algorithm {
  const char* name;
  const char* source;  // paper, DOI or upstream file
  Support supports;    // geometry and sizes that `build` takes
  Plan (*build)(const Request& request, int32_t rank);
  Protocol protocol = Protocol::kSteps;
};

// Rows in order of preference: on equal predicted cost the first wins.
const std::vector<Algorithm>& Algorithms(Collective collective);

// Null if there is none of that name.
const Algorithm* FindAlgorithm(Collective collective, const char* name);

// The plans of all ranks, in rank order. The request must be supported.
std::vector<Plan> BuildAll(const Algorithm& algorithm, const Request& request);

}  // namespace jaxcomm
