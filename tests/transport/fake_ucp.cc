// A library that has only UCX's query of its version. The environment determines the version.
#include <cstdlib>

extern "C" __attribute__((visibility("default"))) void ucp_get_version(unsigned* major, unsigned* minor,
                                                                       unsigned* release) {
  *major = static_cast<unsigned>(std::atoi(std::getenv("FAKE_UCP_MAJOR")));
  *minor = static_cast<unsigned>(std::atoi(std::getenv("FAKE_UCP_MINOR")));
  *release = 0;
}
