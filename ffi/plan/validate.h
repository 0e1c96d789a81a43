// Proves that the plans of a group do what the collective promises, in every order that an executor may choose.
//
// Signals are counted per ordered pair of ranks, so the k-th wait always meets the k-th signal, whatever the timing
// (a Kahn network). Hence one schedule that ends shows that none deadlocks, and one schedule gives the order that all
// have in common. Two accesses of the same elements, one of them a write, that this order leaves open are a fault.
// Contents are expressions over the inputs; sums must count every rank once, and an all_reduce must have the same
// expression, operand for operand, on all ranks.
//
// Stricter than the contract in plan.h in one point: what a rank puts across the network counts as arrived only after
// the next signal to the same rank has been waited for. Networks don't order a put to one rank before a signal to
// another.
#pragma once

#include <vector>

#include "../common/status.h"
#include "plan.h"

namespace jaxcomm {

// Success if the plans are correct, else the first fault found: rank, step and what is wrong.
Status Validate(const std::vector<Plan>& plans, const Request& request);

}  // namespace jaxcomm
