// The contents that a request promises in the outputs of its ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace jaxcomm {

enum class PromiseKind : uint8_t {
  kCopy,  // the elements of one of the sources: replicas
  kSum,   // the sum over the sources, all at one offset; each counts once, in any order that is the same on all ranks
  kZeros,
};

// Elements [begin, end) of an output. Element begin + i is made of element i of each source.
struct Promise {
  int64_t begin = 0;
  int64_t end = 0;
  PromiseKind kind = PromiseKind::kZeros;
  std::vector<Place> sources;  // in inputs
};

// For every element of the output of `rank`, in ascending order. The request must be well-formed.
std::vector<Promise> PromisesOf(const Request& request, int32_t rank);

}  // namespace jaxcomm
