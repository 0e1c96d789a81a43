// y = the weighted sum of rows.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace jaxcomm {

// The rows of one token. Rows and weights are in the order of the choices, node by node.
struct TokenRows {
  const void* const* rows = nullptr;
  const void* weights = nullptr;  // f32, or f64 for rows of f64; null: ones
  const int32_t* ends = nullptr;  // by node: the end of its rows
  int num_nodes = 1;
};

// Adds the rows of each node in f32 (f64 for f64), starting from 0. With several nodes, the sum of each is rounded to
// the type of the rows, and then the sums are added in the order of the nodes. y has `count` elements.
using CombineFn = void (*)(void* y, const TokenRows& token, int64_t count);

// Null if the type is not a float of at least 16 bits.
CombineFn FindCombine(DType dtype);

}  // namespace jaxcomm
