// A library with the names of NCCL's functions. Only ncclGetVersion does something: it returns FAKE_NCCL_VERSION from
// the environment.
#include <cstdlib>
#include <cstring>

#include "../../../ffi/cuda/nccl/nccl_library.h"

namespace {

int Fake(const char* name, int* version) {
  if (std::strcmp(name, "ncclGetVersion") == 0) *version = std::atoi(std::getenv("FAKE_NCCL_VERSION"));
  return 0;
}

}  // namespace

// Defined by symbol, because nccl.h declares the names with their own types.
#define FAKE_FUNCTION(name)                                                                \
  __attribute__((visibility("default"))) int Fake##name(int* first) __asm__("nccl" #name); \
  int Fake##name(int* first) { return Fake("nccl" #name, first); }
JAXCOMM_NCCL_FUNCTIONS(FAKE_FUNCTION)
