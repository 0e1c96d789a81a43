// A library with the names of UCX's functions. The environment determines its version: FAKE_UCP_MAJOR, FAKE_UCP_MINOR,
// FAKE_UCP_RELEASE. Macros make the libraries of test_ucx_library: ONLY_VERSION leaves out all other functions,
// WITHOUT_VERSION and WITHOUT_FREE leave out one.
#include <cstdlib>

#include "../../ffi/transport/ucp_abi.h"

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

// Tests only compare the addresses of the other functions.
#define ucp_get_version fake_ucp_unused
#ifdef WITHOUT_FREE
#define ucp_request_free fake_ucp_without_free
#endif
#define DEFINE(result, name, parameters) \
  FAKE_UCP void name() {}
JAXCOMM_UCP_FUNCTIONS(DEFINE)
#endif
