// Which boxes of an array go from the shards of one job to those of another.
#pragma once

#include <cstdint>
#include <vector>

#include "common/status.h"
#include "plan/boxes.h"

namespace jaxcomm {

struct TransferMove {
  int32_t from = 0;  // number of a source
  int32_t to = 0;    // number of a destination
  Box box;           // of the array
};

// The moves of MakeBoxes with a rank for each source and each destination. Each element of a destination comes once.
// All processes get the same moves from the same boxes.
StatusOr<std::vector<TransferMove>> TransferMoves(const std::vector<Box>& sources,
                                                  const std::vector<Box>& destinations);

}  // namespace jaxcomm
