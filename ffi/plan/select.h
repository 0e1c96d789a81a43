// Chooses an algorithm for a request, and says why.
#pragma once

#include <string>

#include "algorithms.h"
#include "cost.h"

namespace jaxcomm {

struct Choice {
  const Algorithm* algorithm = nullptr;  // null: see `reason`
  bool ll = false;                       // by LL messages; else step by step
  Request request;                       // with chunk_count filled in
  Cost cost;
  std::string reason;  // for people: "asked for", "lowest predicted cost of 5: ring 12.3 us, ...", or why nothing fits
};

// `name` empty: the supported algorithm of lowest predicted cost; but the hierarchical one, unless it is out of all
// proportion, where the request declares several nodes of several ranks. Otherwise that algorithm, or an explanation of
// why it can't be used. chunk_count 0 is filled in. LL algorithms are chosen only where the machine
// has it; asked for, they run step by step elsewhere. Those by multimem are never chosen, only asked for.
Choice Select(Request request, const std::string& name, int64_t item_bytes, const Machine& machine);

}  // namespace jaxcomm
