// Random requests of collectives between nodes.
#pragma once

#include <cstdint>
#include <random>

#include "../../../ffi/plan/plan.h"

namespace jaxcomm {

inline constexpr Collective kCollectives[] = {
#define JAXCOMM_COLLECTIVE(enumerator, ...) Collective::enumerator,
#include "../../../ffi/collectives.def"
#undef JAXCOMM_COLLECTIVE
};

// Blocks of 1 to 200 elements, with and without chunks. A permute is a shift.
inline Request RandomRequest(Collective collective, int32_t num_nodes, int32_t ranks_per_node,
                             std::mt19937_64& random) {
  Request request;
  request.collective = collective;
  request.geometry = {num_nodes, ranks_per_node, false, random() % 2 == 0};
  const int32_t n = request.geometry.num_ranks();
  request.block_count = collective == Collective::kBarrier ? 0 : static_cast<int64_t>(1 + random() % 200);
  request.chunk_count = random() % 2 == 0 ? 0 : static_cast<int64_t>(1 + random() % 50);
  request.root = static_cast<int32_t>(random() % n);
  const auto shift = static_cast<int32_t>(1 + random() % n);
  for (int32_t r = 0; r < n; ++r) request.source_of.push_back((r + shift) % n);
  return request;
}

// The layout of a buffer: contiguous blocks, or fragments of up to 40 elements.
inline int64_t RandomContiguousCount(std::mt19937_64& random) {
  return random() % 3 == 0 ? int64_t{0} : static_cast<int64_t>(1 + random() % 40);
}

}  // namespace jaxcomm
