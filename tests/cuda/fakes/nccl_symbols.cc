// A library with the names of NCCL's functions, of which none does anything but ncclGetVersion: it gives
// FAKE_NCCL_VERSION of the environment.
#include <cstdlib>
#include <cstring>

#include "../../../ffi/cuda/nccl/nccl_library.h"

namespace {

int Fake(const char* name, int* version) {
  if (std::strcmp(name, "ncclGetVersion") == 0) *version = std::atoi(std::getenv("FAKE_NCCL_VERSION"));
  return 0;
}

}  // namespace

// By symbol: nccl.h declares the names with their own types.
#define FAKE_FUNCTION(name)                                                                \
  __attribute__((visibility("default"))) int Fake##name(int* first) __asm__("nccl" #name); \
  int Fake##name(int* first) { return Fake("nccl" #name, first); }
JAXCOMM_NCCL_NEEDED(FAKE_FUNCTION)
JAXCOMM_NCCL_OPTIONAL(FAKE_FUNCTION)
