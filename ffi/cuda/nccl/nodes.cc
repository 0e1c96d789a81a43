#include "cuda/nccl/nodes.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda/nccl/nccl_calls.h"

namespace jaxcomm {
namespace cuda {

// NCCL forms LSA teams of equal size from consecutive ranks that address each other's memory.
StatusOr<int32_t> FindRanksPerNode(Bootstrap& bootstrap, const ncclCommProperties_t& properties, uint64_t name) {
  const StatusOr<std::vector<uint64_t>> gathered = bootstrap.AllGather(name);
  JAXCOMM_RETURN_IF_ERROR(gathered.status());
  const std::vector<uint64_t>& names = *gathered;
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

StatusOr<ncclComm_t> DuplicateNcclComm(Bootstrap& bootstrap) {
  const NcclLibrary& nccl = bootstrap.nccl();
  ncclUniqueId key = {};
  const bool own_can = bootstrap.rank() != 0 || nccl.GetUniqueId(&key) == ncclSuccess;
  const StatusOr<bool> all_can = bootstrap.AllTrue(own_can);
  JAXCOMM_RETURN_IF_ERROR(all_can.status());
  if (!*all_can) return UnavailableError("ncclGetUniqueId failed on rank 0 of the group");
  uint64_t words[sizeof key / sizeof(uint64_t)];
  std::memcpy(words, &key, sizeof words);
  for (uint64_t& word : words) {
    const StatusOr<std::vector<uint64_t>> of_ranks = bootstrap.AllGather(word);
    JAXCOMM_RETURN_IF_ERROR(of_ranks.status());
    word = of_ranks->front();
  }
  std::memcpy(&key, words, sizeof words);
  StatusOr<ncclComm_t> made =
      MakeNcclComm(nccl, key, bootstrap.size(), bootstrap.rank(), bootstrap.timeout_s(), bootstrap.processes());
  JAXCOMM_RETURN_IF_ERROR(bootstrap.AllDone("in ncclCommInitRankConfig", made.status()));
  return made;
}

}  // namespace cuda
}  // namespace jaxcomm
