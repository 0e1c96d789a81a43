// Selects an algorithm for a request and gives the reason.
#pragma once

#include <string>
#include <utility>

#include "common/status.h"
#include "plan/algorithms.h"
#include "plan/cost.h"

namespace jaxcomm {

struct Choice {
  Choice(const Algorithm& chosen, Request of_chosen) : algorithm(&chosen), request(std::move(of_chosen)) {}

  const Algorithm* algorithm;  // never null
  Request request;             // with chunk_count filled in
  bool ll = false;             // executed by LL messages; otherwise step by step
  Cost cost;
  std::string reason;  // for the user: "asked for", or "lowest predicted cost of 5: ring 12.3 us, ..."
};

// Selects the algorithm `name`. If `name` is empty, selects the supported algorithm of lowest predicted cost. If the
// request declares several nodes of several ranks, the hierarchical algorithm is preferred unless it costs more than
// 1.56 times as much; in one address space, ten times as much. A chunk_count of 0 is filled in. Fails if no algorithm
// fits; the message gives the reason.
//
// LL algorithms are selected only if the machine supports LL. If `name` is an LL algorithm, it runs step by step on
// other machines. Multimem algorithms are used by name only.
StatusOr<Choice> Select(const Request& request, const std::string& name, int64_t item_bytes, const Machine& machine);

}  // namespace jaxcomm
