#include "cuda/xla/call_communicator.h"

namespace jaxcomm {
namespace cuda {

Status RequestCommunicator(const XlaCollectives& collectives, const DeviceGroups& groups,
                           const std::vector<Member>& members) {
  if (!collectives.Provides() && !members.empty()) return OkStatus();
  return collectives.Request(groups);
}

StatusOr<Communicator*> GetCommunicator(const XlaCollectives& collectives, const DeviceGroups& groups,
                                        const std::vector<Member>& members, int32_t device) {
  if (!collectives.Provides() && !members.empty()) {
    return OwnCommunicators::Get(members, groups.group_size(), device);
  }
  const StatusOr<void*> from_xla = collectives.Get(groups);
  JAXCOMM_RETURN_IF_ERROR(from_xla.status());
  return OwnCommunicators::Get(static_cast<ncclComm_t>(*from_xla), device);
}

}  // namespace cuda
}  // namespace jaxcomm
