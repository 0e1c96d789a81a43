#include "cuda/nccl/nodes.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda/nccl/nccl_calls.h"

namespace jaxcomm {
namespace cuda {
namespace {

// Whether all nodes have addressable memory, on all ranks. If not, destroys the communicator that it made.
StatusOr<bool> SplitNodes(Bootstrap& bootstrap, const ncclCommProperties_t& all, int32_t ranks_per_node, Nodes* nodes) {
  const int32_t rank = bootstrap.rank();
  nodes->own = {rank % ranks_per_node, ranks_per_node, rank / ranks_per_node * ranks_per_node, 1};
  nodes->comm = bootstrap.nccl_comm();
  bool own = all.deviceApiSupport && all.nLsaTeams == 1;
  if (ranks_per_node < bootstrap.size()) {
    const StatusOr<ncclComm_t> made = MakeSubCommunicator(bootstrap, nodes->own.first, ranks_per_node);
    JAXCOMM_RETURN_IF_ERROR(made.status());
    nodes->comm = *made;
    ncclCommProperties_t properties = NoProperties(bootstrap.nccl());
    const ncclResult_t asked = bootstrap.nccl().CommQueryProperties(nodes->comm, &properties);
    const Status known = CheckNccl(bootstrap.nccl(), nodes->comm, "ncclCommQueryProperties", asked);
    JAXCOMM_RETURN_IF_ERROR(bootstrap.AllDone("when it asked NCCL for its node", known));
    own = properties.deviceApiSupport && properties.nLsaTeams == 1;
  }
  const StatusOr<bool> connected = bootstrap.AllTrue(own);
  JAXCOMM_RETURN_IF_ERROR(connected.status());
  if (!*connected && ranks_per_node < bootstrap.size()) AbortNcclComm(bootstrap.nccl(), nodes->comm);
  return connected;
}

}  // namespace

// NCCL forms LSA teams of equal size from consecutive ranks that address each other's memory. But a communicator of
// several teams has windows only if the network supports GIN. If kernels can't use GIN, each node gets a communicator
// of its own.
StatusOr<Nodes> FindNodes(Bootstrap& bootstrap, const ncclCommProperties_t& properties, uint64_t name, bool can_gin) {
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
  // As on CPUs: if the nodes would be uneven, every rank is a node of its own.
  const bool even = std::all_of(lengths.begin(), lengths.end(), [&](int32_t length) { return length == lengths[0]; });
  const int32_t ranks_per_node = even ? lengths[0] : 1;
  Nodes nodes;
  if (properties.deviceApiSupport && properties.nLsaTeams > 1 && ranks_per_node == team_size) {
    const StatusOr<bool> gin = bootstrap.AllTrue(can_gin);
    JAXCOMM_RETURN_IF_ERROR(gin.status());
    if (*gin) {
      const int32_t rank = bootstrap.rank();
      nodes.own = {rank % team_size, team_size, rank / team_size * team_size, 1};
      nodes.comm = bootstrap.nccl_comm();
      nodes.gin = true;
      return nodes;
    }
  }
  StatusOr<bool> connected = SplitNodes(bootstrap, properties, ranks_per_node, &nodes);
  JAXCOMM_RETURN_IF_ERROR(connected.status());
  if (!*connected && ranks_per_node > 1) {
    // GPUs of one host that can't address each other's memory: each becomes a node, and all data goes through NCCL.
    connected = SplitNodes(bootstrap, properties, 1, &nodes);
    JAXCOMM_RETURN_IF_ERROR(connected.status());
  }
  if (*connected) return nodes;
  return UnavailableError(
      "GPUs of the group have no windows, not even on their own memory: NCCL_WIN_ENABLE or NCCL_CUMEM_ENABLE is 0, or "
      "the driver is too old (see python -m jaxcomm.info --communicator)");
}

StatusOr<ncclComm_t> MakeSubCommunicator(Bootstrap& bootstrap, int32_t first, int32_t count) {
  const NcclLibrary& nccl = bootstrap.nccl();
  ncclUniqueId key = {};
  const bool own_can = nccl.Require("ncclCommInitRankConfig").ok() &&
                       (bootstrap.rank() != first || nccl.GetUniqueId(&key) == ncclSuccess);
  const StatusOr<bool> all_can = bootstrap.AllTrue(own_can);
  JAXCOMM_RETURN_IF_ERROR(all_can.status());
  if (!*all_can) {
    return UnavailableError("ncclGetUniqueId or ncclCommInitRankConfig: failed, or missing, on a rank of the group");
  }
  uint64_t words[sizeof key / sizeof(uint64_t)];
  std::memcpy(words, &key, sizeof words);
  for (uint64_t& word : words) {
    const StatusOr<std::vector<uint64_t>> of_ranks = bootstrap.AllGather(word);
    JAXCOMM_RETURN_IF_ERROR(of_ranks.status());
    word = (*of_ranks)[static_cast<size_t>(first)];
  }
  std::memcpy(&key, words, sizeof words);
  StatusOr<ncclComm_t> made = MakeNcclComm(nccl, key, count, bootstrap.rank() - first, bootstrap.timeout_s());
  JAXCOMM_RETURN_IF_ERROR(bootstrap.AllDone("in ncclCommInitRankConfig", made.status()));
  return made;
}

}  // namespace cuda
}  // namespace jaxcomm
