#include "cuda/nccl/nodes.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/program/assign_or_return.h"

namespace jaxcomm {
namespace cuda {

// NCCL forms LSA teams of equal size from consecutive ranks that address each other's memory.
StatusOr<int32_t> FindRanksPerNode(Bootstrap& bootstrap, const ncclCommProperties_t& properties, uint64_t name) {
  JAXCOMM_ASSIGN_OR_RETURN(const std::vector<uint64_t> names, bootstrap.AllGather(name));
  const int32_t team_size = bootstrap.size() / properties.nLsaTeams;
  const auto node_of = [&](int32_t r) { return std::pair(names[r], r / team_size); };
  std::vector<int32_t> lengths;
  for (int32_t r = 0; r < bootstrap.size(); ++r) {
    if (r == 0 || node_of(r) != node_of(r - 1)) lengths.push_back(0);
    ++lengths.back();
  }
  const bool even = std::all_of(lengths.begin(), lengths.end(), [&](int32_t length) { return length == lengths[0]; });
  return even ? lengths[0] : 1;
}

}  // namespace cuda
}  // namespace jaxcomm
