// Proves that the plans of a group produce the result of the collective in every order that an executor may choose.
//
// Signals are counted per ordered pair of ranks, so the k-th wait always matches the k-th signal, whatever the timing
// (a Kahn network). Hence, if one schedule ends, no schedule deadlocks, and the happens-before order of one schedule
// holds in all. Two accesses to the same elements, at least one of them a write, must be ordered by it. Contents are
// expressions over the inputs. A sum must count every rank once, and the sums of an all_reduce must be the same
// expression, operand for operand, on all ranks.
//
// One rule is stricter than the contract in plan.h: a put across the network counts as arrived only after its target
// has waited for the next signal from the same sender. Networks do not order a put to one rank before a signal to
// another.
#pragma once

#include <vector>

#include "common/status.h"
#include "plan/plan.h"

namespace jaxcomm {

// Success if the plans are correct, otherwise the first fault: rank, step and reason.
Status Validate(const std::vector<Plan>& plans, const Request& request);

}  // namespace jaxcomm
