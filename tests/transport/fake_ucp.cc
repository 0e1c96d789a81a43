// A library with the names of UCX's functions. The environment determines its version: FAKE_UCP_MAJOR, FAKE_UCP_MINOR,
// FAKE_UCP_RELEASE. Macros make the libraries of test_ucx_library: ONLY_VERSION leaves out all other functions,
// WITHOUT_VERSION and WITHOUT_FREE leave out one.
#include <cstdlib>

#define FAKE_UCP extern "C" __attribute__((visibility("default")))

#ifndef WITHOUT_VERSION
namespace {
unsigned Number(const char* name) {
  const char* const text = std::getenv(name);
  return text ? static_cast<unsigned>(std::atoi(text)) : 0;
}
}  // namespace

FAKE_UCP void ucp_get_version(unsigned* major, unsigned* minor, unsigned* release) {
  *major = Number("FAKE_UCP_MAJOR");
  *minor = Number("FAKE_UCP_MINOR");
  *release = Number("FAKE_UCP_RELEASE");
}
#endif

#ifndef ONLY_VERSION
FAKE_UCP int fake_ucp_disabled_signals = 0;  // calls of the next function
FAKE_UCP void ucs_debug_disable_signals() { ++fake_ucp_disabled_signals; }

// Tests only compare the addresses of these functions.
FAKE_UCP void ucs_status_string() {}
FAKE_UCP void ucp_config_read() {}
FAKE_UCP void ucp_config_modify() {}
FAKE_UCP void ucp_config_release() {}
FAKE_UCP void ucp_init_version() {}
FAKE_UCP void ucp_cleanup() {}
FAKE_UCP void ucp_worker_create() {}
FAKE_UCP void ucp_worker_destroy() {}
FAKE_UCP void ucp_worker_get_address() {}
FAKE_UCP void ucp_worker_release_address() {}
FAKE_UCP void ucp_worker_get_efd() {}
FAKE_UCP void ucp_worker_arm() {}
FAKE_UCP void ucp_worker_progress() {}
FAKE_UCP void ucp_worker_set_am_recv_handler() {}
FAKE_UCP void ucp_ep_create() {}
FAKE_UCP void ucp_ep_close_nbx() {}
FAKE_UCP void ucp_am_send_nbx() {}
FAKE_UCP void ucp_am_recv_data_nbx() {}
FAKE_UCP void ucp_am_data_release() {}
#ifndef WITHOUT_FREE
FAKE_UCP void ucp_request_free() {}
#endif
#endif
