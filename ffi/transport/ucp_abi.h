// The part of UCX's binary interface that jaxcomm calls. The library is opened at run time, so the build does not need
// UCX.
//
// UCX reads only the fields whose bit is set in a structure's mask. All declarations here hold for UCX 1.13 and later.
// tests/transport/test_ucp_abi.cc compares them with the headers of an installed UCX.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxcomm {
namespace ucp {

constexpr unsigned kApiMajor = 1;
constexpr unsigned kApiMinor = 13;

using Status = int8_t;  // UCX: a packed enumeration; negative values are errors
constexpr Status kOk = 0;
constexpr Status kInProgress = 1;
constexpr Status kBusy = -15;
constexpr Status kCanceled = -16;
constexpr Status kLastError = -100;

// Functions that start an operation return null (done), an error, or a request. For the last two:
inline bool IsError(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) >= static_cast<uintptr_t>(static_cast<intptr_t>(kLastError));
}
inline Status ErrorOf(const void* pointer) { return static_cast<Status>(reinterpret_cast<intptr_t>(pointer)); }

using Config = struct ConfigTag*;
using Context = struct ContextTag*;
using Worker = struct WorkerTag*;
using Endpoint = struct EndpointTag*;
using Address = struct AddressTag;

struct ContextParams {
  static constexpr uint64_t kFeatures = 1u << 0, kEstimatedNumEps = 1u << 6;
  static constexpr uint64_t kWakeup = 1u << 4, kActiveMessages = 1u << 6;  // features
  uint64_t mask = 0;
  uint64_t features = 0;
  size_t unused[3] = {};
  uint64_t unused_tag_mask = 0;
  int unused_shared = 0;
  size_t estimated_num_eps = 0;
  char reserved[128] = {};
};

struct WorkerParams {
  static constexpr uint64_t kThreadMode = 1u << 0;
  static constexpr int kSerialized = 1;
  uint64_t mask = 0;
  int thread_mode = 0;
  char reserved[512] = {};
};

struct EndpointParams {
  static constexpr uint64_t kAddress = 1u << 0, kErrorMode = 1u << 1, kErrorHandler = 1u << 2;
  static constexpr int kReportPeers = 1;  // error mode
  uint64_t mask = 0;
  const Address* address = nullptr;
  int error_mode = 0;
  void (*on_error)(void* arg, Endpoint endpoint, Status status) = nullptr;
  void* on_error_arg = nullptr;
  char reserved[256] = {};
};

struct ReceivedParams {
  static constexpr uint64_t kRendezvous = 1u << 17;
  uint64_t attributes;
  Endpoint reply;
};

// Handler of an active message.
using AmRecvCallback = Status (*)(void* arg, const void* header, size_t header_bytes, void* data, size_t bytes,
                                  const ReceivedParams* params);

struct HandlerParams {
  static constexpr uint64_t kId = 1u << 0, kFlags = 1u << 1, kCallback = 1u << 2, kArg = 1u << 3;
  static constexpr uint32_t kWholeMessage = 1u << 0;
  uint64_t mask = 0;
  unsigned id = 0;
  uint32_t flags = 0;
  AmRecvCallback callback = nullptr;
  void* arg = nullptr;
};

struct RequestParams {
  static constexpr uint32_t kCallback = 1u << 1, kUserData = 1u << 2, kFlags = 1u << 4;
  static constexpr uint32_t kEager = 1u << 1, kRendezvous = 1u << 2;  // flags of a send
  static constexpr uint32_t kForce = 1u << 0;                         // flag of a close
  uint32_t mask = 0;
  uint32_t flags = 0;
  void* unused_request = nullptr;
  union {
    void (*sent)(void* request, Status status, void* user_data) = nullptr;
    void (*received)(void* request, Status status, size_t bytes, void* user_data);
  };
  uint64_t unused_datatype = 0;
  void* user_data = nullptr;
  char reserved[128] = {};
};

// X(result, name, parameters) for each function.
#define JAXCOMM_UCP_FUNCTIONS(X)                                                                              \
  X(void, ucp_get_version, (unsigned* major, unsigned* minor, unsigned* release))                             \
  X(const char*, ucs_status_string, (Status status))                                                          \
  X(Status, ucp_config_read, (const char* prefix, const char* file, Config* config))                          \
  X(Status, ucp_config_modify, (Config config, const char* name, const char* value))                          \
  X(void, ucp_config_release, (Config config))                                                                \
  X(Status, ucp_init_version,                                                                                 \
    (unsigned major, unsigned minor, const ContextParams* params, Config config, Context* context))           \
  X(void, ucp_cleanup, (Context context))                                                                     \
  X(Status, ucp_worker_create, (Context context, const WorkerParams* params, Worker* worker))                 \
  X(void, ucp_worker_destroy, (Worker worker))                                                                \
  X(Status, ucp_worker_get_address, (Worker worker, Address * *address, size_t* address_bytes))               \
  X(void, ucp_worker_release_address, (Worker worker, Address * address))                                     \
  X(Status, ucp_worker_get_efd, (Worker worker, int* fd))                                                     \
  X(Status, ucp_worker_arm, (Worker worker))                                                                  \
  X(unsigned, ucp_worker_progress, (Worker worker))                                                           \
  X(Status, ucp_worker_set_am_recv_handler, (Worker worker, const HandlerParams* params))                     \
  X(Status, ucp_ep_create, (Worker worker, const EndpointParams* params, Endpoint* endpoint))                 \
  X(void*, ucp_ep_close_nbx, (Endpoint endpoint, const RequestParams* params))                                \
  X(void*, ucp_am_send_nbx,                                                                                   \
    (Endpoint endpoint, unsigned id, const void* header, size_t header_bytes, const void* data, size_t count, \
     const RequestParams* params))                                                                            \
  X(void*, ucp_am_recv_data_nbx,                                                                              \
    (Worker worker, void* descriptor, void* destination, size_t count, const RequestParams* params))          \
  X(void, ucp_am_data_release, (Worker worker, void* descriptor))                                             \
  X(void, ucp_request_free, (void* request))

struct Functions {
#define JAXCOMM_UCP_POINTER(result, name, parameters) result(*name) parameters = nullptr;
  JAXCOMM_UCP_FUNCTIONS(JAXCOMM_UCP_POINTER)
#undef JAXCOMM_UCP_POINTER
};

}  // namespace ucp
}  // namespace jaxcomm
