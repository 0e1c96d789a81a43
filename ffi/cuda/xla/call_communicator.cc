#include "cuda/xla/call_communicator.h"

namespace jaxcomm {
namespace cuda {

std::string RequestCommunicator(const XlaCollectives& collectives, const DeviceGroups& groups,
                                const std::vector<Member>& members) {
  if (!collectives.Provides() && !members.empty()) return "";
  return collectives.Request(groups);
}

std::string GetCommunicator(const XlaCollectives& collectives, const DeviceGroups& groups,
                            const std::vector<Member>& members, int32_t device, ncclComm_t* nccl_comm) {
  if (!collectives.Provides() && !members.empty()) {
    return OwnCommunicators::Get(members, groups.group_size(), device, nccl_comm);
  }
  void* from_xla = nullptr;
  std::string error = collectives.Get(groups, &from_xla);
  *nccl_comm = static_cast<ncclComm_t>(from_xla);
  return error;
}

}  // namespace cuda
}  // namespace jaxcomm
