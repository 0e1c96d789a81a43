#include "cuda/nccl/nodes.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace jaxcomm {
namespace cuda {
namespace {

// `connected`: all nodes are, on all ranks. If not, it leaves nothing behind.
bool SplitNodes(Bootstrap& bootstrap, const ncclCommProperties_t& all, int32_t ranks_per_node, Nodes* nodes,
                bool* connected, std::string* error) {
  const int32_t rank = bootstrap.rank();
  nodes->own = {rank % ranks_per_node, ranks_per_node, rank / ranks_per_node * ranks_per_node, 1};
  nodes->comm = bootstrap.nccl_comm();
  bool own = all.deviceApiSupport && all.nLsaTeams == 1;
  if (ranks_per_node < bootstrap.size()) {
    if (!MakeSubCommunicator(bootstrap, nodes->own.first, ranks_per_node, &nodes->comm, error)) return false;
    ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
    const ncclResult_t asked = bootstrap.nccl().CommQueryProperties(nodes->comm, &properties);
    const bool known = bootstrap.Check("ncclCommQueryProperties", asked, error);
    if (!bootstrap.AllDone("when it asked NCCL for its node", known, error)) return false;
    own = properties.deviceApiSupport && properties.nLsaTeams == 1;
  }
  if (!bootstrap.AllTrue(own, connected, error)) return false;
  if (!*connected && ranks_per_node < bootstrap.size()) bootstrap.nccl().CommAbort(nodes->comm);
  return true;
}

}  // namespace

// NCCL knows which ranks address each other's memory: it makes teams of equal size of ranks that follow each other. But
// a communicator of several teams has windows only if the network allows GIN. If kernels can't use that, each node gets
// a communicator of its own.
bool FindNodes(Bootstrap& bootstrap, const ncclCommProperties_t& properties, uint64_t name, bool can_gin, Nodes* nodes,
               std::string* error) {
  std::vector<uint64_t> names;
  if (!bootstrap.AllGather(name, &names, error)) return false;
  const int32_t team_size = bootstrap.size() / properties.nLsaTeams;
  const auto node_of = [&](int32_t r) { return std::pair(names[r], r / team_size); };
  std::vector<int32_t> lengths;
  for (int32_t r = 0; r < bootstrap.size(); ++r) {
    if (r == 0 || node_of(r) != node_of(r - 1)) lengths.push_back(0);
    ++lengths.back();
  }
  // As on CPUs: where names make uneven nodes, every rank is one.
  const bool even = std::all_of(lengths.begin(), lengths.end(), [&](int32_t length) { return length == lengths[0]; });
  const int32_t ranks_per_node = even ? lengths[0] : 1;
  if (properties.deviceApiSupport && properties.nLsaTeams > 1 && ranks_per_node == team_size) {
    if (!bootstrap.AllTrue(can_gin, &nodes->gin, error)) return false;
    if (nodes->gin) {
      const int32_t rank = bootstrap.rank();
      nodes->own = {rank % team_size, team_size, rank / team_size * team_size, 1};
      nodes->comm = bootstrap.nccl_comm();
      return true;
    }
  }
  bool connected = false;
  if (!SplitNodes(bootstrap, properties, ranks_per_node, nodes, &connected, error)) return false;
  // GPUs of one host that can't address each other: all that they exchange goes the long way.
  if (!connected && ranks_per_node > 1 && !SplitNodes(bootstrap, properties, 1, nodes, &connected, error)) return false;
  if (connected) return true;
  *error =
      "GPUs of the group have no windows, not even on their own memory: NCCL_WIN_ENABLE or NCCL_CUMEM_ENABLE is 0, or "
      "the driver is too old (see python -m jaxcomm.info --communicator)";
  return false;
}

// Not by ncclCommSplit: XLA's communicator shares what it has with those that are split from it, also the word that
// aborts it (splitShare). Blocking, for all ranks have met just before.
bool MakeSubCommunicator(Bootstrap& bootstrap, int32_t first, int32_t count, ncclComm_t* part, std::string* error) {
  const NcclLibrary& nccl = bootstrap.nccl();
  ncclUniqueId key = {};
  bool all_can = nccl.WhyNot("ncclCommInitRankConfig").empty() &&
                 (bootstrap.rank() != first || nccl.GetUniqueId(&key) == ncclSuccess);
  if (!bootstrap.AllTrue(all_can, &all_can, error)) return false;
  if (!all_can) {
    *error = "ncclGetUniqueId or ncclCommInitRankConfig: failed, or missing, on a rank of the group";
    return false;
  }
  uint64_t words[sizeof key / sizeof(uint64_t)];
  std::memcpy(words, &key, sizeof words);
  for (uint64_t& word : words) {
    std::vector<uint64_t> of_ranks;
    if (!bootstrap.AllGather(word, &of_ranks, error)) return false;
    word = of_ranks[static_cast<size_t>(first)];
  }
  std::memcpy(&key, words, sizeof words);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  const ncclResult_t asked = nccl.CommInitRankConfig(part, count, key, bootstrap.rank() - first, &config);
  const bool made = bootstrap.Check("ncclCommInitRankConfig", asked, error);
  return bootstrap.AllDone("in ncclCommInitRankConfig", made, error);
}

}  // namespace cuda
}  // namespace jaxcomm
