// UCX with a hook in ucp_worker_arm, messages that are lost, and a count of assembled ones. All other functions are
// those of the library that this one is linked with.
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

// Messages with a payload of this size are neither sent nor completed.
std::atomic<size_t> ucp_lost_bytes{0};

void* ucp_am_send_nbx(void* endpoint, unsigned id, const void* header, size_t header_bytes, const void* data,
                      size_t bytes, const jaxcomm::ucp::RequestParams* params) {
  static const auto send = reinterpret_cast<decltype(&ucp_am_send_nbx)>(dlsym(RTLD_NEXT, "ucp_am_send_nbx"));
  return bytes == ucp_lost_bytes && bytes > 0 ? &ucp_lost_bytes
                                              : send(endpoint, id, header, header_bytes, data, bytes, params);
}

// Eager messages that UCX has assembled from several segments, in memory of its own.
std::atomic<int> ucp_num_assembled{0};

jaxcomm::ucp::Status ucp_worker_set_am_recv_handler(void* worker, const jaxcomm::ucp::HandlerParams* params) {
  using Set = jaxcomm::ucp::Status (*)(void*, const jaxcomm::ucp::HandlerParams*);
  static const auto set = reinterpret_cast<Set>(dlsym(RTLD_NEXT, "ucp_worker_set_am_recv_handler"));
  static jaxcomm::ucp::AmRecvCallback callback;
  constexpr uint64_t kData = 1u << 16;  // UCP_AM_RECV_ATTR_FLAG_DATA: the receiver may keep the memory
  callback = params->callback;
  jaxcomm::ucp::HandlerParams counting = *params;
  counting.callback = [](void* arg, const void* header, size_t header_bytes, void* data, size_t bytes,
                         const jaxcomm::ucp::ReceivedParams* received) {
    if (received->attributes & kData) ++ucp_num_assembled;
    return callback(arg, header, header_bytes, data, bytes, received);
  };
  return set(worker, &counting);
}

}  // extern "C"
#pragma GCC visibility pop
