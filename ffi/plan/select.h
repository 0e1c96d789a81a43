// Selects an algorithm for a request and gives the reason.
#pragma once

#include <string>

#include "plan/algorithms.h"
#include "plan/cost.h"

namespace jaxcomm {

struct Choice {
  const Algorithm* algorithm = nullptr;  // null: see `reason`
  bool ll = false;                       // executed by LL messages; otherwise step by step
  Request request;                       // with chunk_count filled in
  Cost cost;
  std::string reason;  // for the user: "asked for", "lowest predicted cost of 5: ring 12.3 us, ...", or why none fits
};

// `name`: the algorithm, or an explanation of why it cannot be used. Empty: the supported algorithm of lowest predicted
// cost. If the request declares several nodes of several ranks, the hierarchical algorithm is preferred unless it costs
// more than ten times as much. A chunk_count of 0 is filled in.
//
// LL algorithms are selected only if the machine supports LL. If `name` is an LL algorithm, it runs step by step on
// other machines. Multimem algorithms are used by name only.
Choice Select(Request request, const std::string& name, int64_t item_bytes, const Machine& machine);

}  // namespace jaxcomm
