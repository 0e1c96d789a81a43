// Random slices for tests of all_to_all_v: the vectors of all ranks, and the numbers of rows that they need.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "../../ffi/plan/slices.h"

namespace jaxcomm {

struct RaggedCase {
  int32_t n = 1;
  int64_t per_pair = 1;
  int64_t input_rows = 0;
  int64_t output_rows = 0;
  std::vector<int64_t> table;  // (n, 4, n * per_pair)

  int64_t& At(int32_t rank, int vector, int64_t slice) { return table[(rank * 4 + vector) * n * per_pair + slice]; }
  Slices slices() const { return Slices(table.data(), true, n, n * per_pair); }
};

// Slices of up to three rows, a part of them empty. Senders and receivers order their slices at random, with gaps.
inline RaggedCase DrawRagged(int32_t n, int64_t per_pair, std::mt19937& random) {
  RaggedCase c;
  c.n = n;
  c.per_pair = per_pair;
  const int64_t per_rank = n * per_pair;
  c.table.assign(n * 4 * per_rank, 0);
  c.input_rows = c.output_rows = per_rank * 4;
  const auto order = [&] {
    std::vector<int64_t> slices(per_rank);
    std::iota(slices.begin(), slices.end(), 0);
    std::shuffle(slices.begin(), slices.end(), random);
    return slices;
  };
  for (int32_t r = 0; r < n; ++r) {
    int64_t row = 0;
    for (const int64_t i : order()) {
      row += random() % 2;
      const int64_t size = random() % 3 == 0 ? 0 : random() % 4;
      c.At(r, 0, i) = row;
      c.At(r, 1, i) = size;
      c.At(static_cast<int32_t>(i / per_pair), 3, r * per_pair + i % per_pair) = size;
      row += size;
    }
  }
  for (int32_t r = 0; r < n; ++r) {
    int64_t row = 0;
    for (const int64_t i : order()) {  // slice i of the received ones
      row += random() % 2;
      c.At(static_cast<int32_t>(i / per_pair), 2, r * per_pair + i % per_pair) = row;
      row += c.At(r, 3, i);
    }
  }
  return c;
}

}  // namespace jaxcomm
