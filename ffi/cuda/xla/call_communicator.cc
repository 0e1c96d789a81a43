#include "cuda/xla/call_communicator.h"

namespace jaxcomm {
namespace cuda {

std::string RequestCommunicator(const XlaCollectives& collectives, const DeviceGroups& groups,
                                const std::vector<Member>& members) {
  if (!collectives.Lends() && !members.empty()) return "";
  return collectives.Request(groups);
}

std::string GetCommunicator(const XlaCollectives& collectives, const DeviceGroups& groups,
                            const std::vector<Member>& members, int32_t device, ncclComm_t* nccl_comm) {
  if (!collectives.Lends() && !members.empty()) {
    return OwnCommunicators::Get(members, groups.group_size(), device, nccl_comm);
  }
  void* lent = nullptr;
  std::string error = collectives.Get(groups, &lent);
  *nccl_comm = static_cast<ncclComm_t>(lent);
  return error;
}

}  // namespace cuda
}  // namespace jaxcomm
