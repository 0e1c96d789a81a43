// Selects an algorithm by the cost model: the part of Resolve() that compares plans.
#pragma once

#include <string>

#include "common/status.h"
#include "plan/resolve.h"

namespace jaxcomm {

// Selects the algorithm `name`. If `name` is empty, selects the supported algorithm of lowest predicted cost. If the
// request declares several nodes of several ranks, the hierarchical algorithm is preferred unless it costs more than
// 1.56 times as much; in one address space, ten times as much. A chunk_count of 0 is filled in. Fails if no algorithm
// fits; the message gives the reason.
//
// LL algorithms are selected only if the machine supports LL. If `name` is an LL algorithm, it runs step by step on
// other machines. Multimem algorithms are used by name only.
StatusOr<Resolution> Select(const Request& request, const std::string& name, int64_t item_bytes,
                            const Machine& machine);

}  // namespace jaxcomm
