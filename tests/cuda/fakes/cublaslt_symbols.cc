// A library with the names of cuBLASLt's functions. Only cublasLtGetVersion returns something: 1.
#include "../../../ffi/cuda/cublas/cublaslt_library.h"

// Defined by symbol, because the types of the functions do not matter.
#define FAKE_FUNCTION(name, result, arguments)                                          \
  __attribute__((visibility("default"))) size_t Fake##name() __asm__("cublasLt" #name); \
  size_t Fake##name() { return 1; }
JAXCOMM_CUBLASLT_FUNCTIONS(FAKE_FUNCTION)
