// UCX with a hook in ucp_worker_arm. All other functions are those of the library that this one is linked with.
#include <dlfcn.h>

#include <atomic>

#include "../../ffi/transport/ucp_abi.h"

#pragma GCC visibility push(default)
extern "C" {

// Runs in the progress thread after each success of ucp_worker_arm.
std::atomic<void (*)()> ucp_hook{nullptr};

jaxcomm::ucp::Status ucp_worker_arm(void* worker) {
  using Arm = jaxcomm::ucp::Status (*)(void*);
  static const auto arm = reinterpret_cast<Arm>(dlsym(RTLD_NEXT, "ucp_worker_arm"));
  const jaxcomm::ucp::Status status = arm(worker);
  if (void (*const hook)() = ucp_hook; hook && status == jaxcomm::ucp::kOk) hook();
  return status;
}

}  // extern "C"
#pragma GCC visibility pop
