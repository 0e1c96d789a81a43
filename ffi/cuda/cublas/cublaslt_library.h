// Finds and opens cuBLASLt at run time, and declares the part of its C interface that jaxcomm uses. Nothing links
// cuBLASLt, and builds need no headers of it: only calls with algorithm "fused" multiply on their own. Types, functions
// and numbers are those of cublasLt.h and cublas_api.h, compared by static_asserts with CUDA 12.9 and 13.0.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/status.h"

namespace jaxcomm {
namespace cublaslt {

// Pointers to structures of cuBLASLt.
using Handle = struct HandleOpaque*;
using Operation = struct OperationOpaque*;    // cublasLtMatmulDesc_t
using Layout = struct LayoutOpaque*;          // cublasLtMatrixLayout_t
using Preference = struct PreferenceOpaque*;  // cublasLtMatmulPreference_t

using Result = int;  // cublasStatus_t; 0 is success
constexpr Result kNotSupported = 15;

// cublasComputeType_t
constexpr int kCompute32F = 68, kCompute64F = 70, kCompute32FFastTf32 = 77;
// cublasLtMatmulDescAttributes_t, of 32 bits; and a cublasOperation_t.
constexpr int kTransposeB = 4;
constexpr int32_t kTransposed = 1;
// cublasLtMatmulPreferenceAttributes_t. The workspace is of 64 bits, the others of 32.
constexpr int kMaxWorkspaceBytes = 1;
constexpr int kReductionSchemes = 3;                // a mask
constexpr uint32_t kReduceInComputeType = 2;        // cublasLtReductionScheme_t
constexpr int kMinAlignmentBytes[] = {5, 6, 7, 8};  // of A, B, C, D

struct Algorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};
struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace_bytes;
  Result state;
  float num_waves;
  int reserved[4];
};
static_assert(sizeof(Heuristic) == 96, "as in cublasLt.h");

}  // namespace cublaslt

// F(name, result, arguments)
#define JAXCOMM_CUBLASLT_FUNCTIONS(F)                                                                                \
  F(GetVersion, size_t, ())                                                                                          \
  F(Create, cublaslt::Result, (cublaslt::Handle*))                                                                   \
  F(MatmulDescCreate, cublaslt::Result, (cublaslt::Operation*, int compute_type, cudaDataType scale_type))           \
  F(MatmulDescSetAttribute, cublaslt::Result, (cublaslt::Operation, int attribute, const void* value, size_t bytes)) \
  F(MatmulDescDestroy, cublaslt::Result, (cublaslt::Operation))                                                      \
  F(MatrixLayoutCreate, cublaslt::Result,                                                                            \
    (cublaslt::Layout*, cudaDataType, uint64_t rows, uint64_t columns, int64_t leading_dimension))                   \
  F(MatrixLayoutDestroy, cublaslt::Result, (cublaslt::Layout))                                                       \
  F(MatmulPreferenceCreate, cublaslt::Result, (cublaslt::Preference*))                                               \
  F(MatmulPreferenceSetAttribute, cublaslt::Result,                                                                  \
    (cublaslt::Preference, int attribute, const void* value, size_t bytes))                                          \
  F(MatmulPreferenceDestroy, cublaslt::Result, (cublaslt::Preference))                                               \
  F(MatmulAlgoGetHeuristic, cublaslt::Result,                                                                        \
    (cublaslt::Handle, cublaslt::Operation, cublaslt::Layout a, cublaslt::Layout b, cublaslt::Layout c,              \
     cublaslt::Layout d, cublaslt::Preference, int num_requested, cublaslt::Heuristic*, int* num_returned))          \
  F(Matmul, cublaslt::Result,                                                                                        \
    (cublaslt::Handle, cublaslt::Operation, const void* alpha, const void* a, cublaslt::Layout, const void* b,       \
     cublaslt::Layout, const void* beta, const void* c, cublaslt::Layout, void* d, cublaslt::Layout,                 \
     const cublaslt::Algorithm*, void* workspace, size_t workspace_bytes, cudaStream_t))

struct CublasLtLibrary {
#define JAXCOMM_DECLARE(name, result, arguments) result(*name) arguments = nullptr;
  JAXCOMM_CUBLASLT_FUNCTIONS(JAXCOMM_DECLARE)
#undef JAXCOMM_DECLARE
  std::string path;    // file of the library
  size_t version = 0;  // as cublasLtGetVersion returns it

  // The file of the cuBLAS wheel, for Open(); empty if there is none.
  static void SetWheel(const std::string& path);
  // The copy that this process has loaded; else the wheel's; else the copy that the loader finds; of CUDA 13 before 12.
  // The error names what to install. A copy that is found stays loaded. Thread-safe.
  static StatusOr<const CublasLtLibrary*> Open();
};

}  // namespace jaxcomm
