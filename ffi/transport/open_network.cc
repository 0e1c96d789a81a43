#include "transport/open_network.h"

#include "transport/ucx_network.h"

namespace jaxcomm {

StatusOr<std::unique_ptr<Network>> OpenNetwork(const NetworkOptions& options, int process, int num_processes,
                                               uint64_t token, Receiver* receiver) {
  return OpenUcxNetwork(UcxOptions{options}, process, num_processes, token, receiver);
}

}  // namespace jaxcomm
