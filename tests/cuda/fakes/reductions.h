// The emulated reductions of all element types and operations are half of the work of compiling a kernel. reductions.cc
// compiles them once; programs that include this header link them.
#pragma once

#include "../../../ffi/cuda/kernels/executor.cuh"
#include "../../../ffi/cuda/kernels/ll.cuh"

#if !defined(JAXCOMM_REDUCTIONS_EXTERN)
#define JAXCOMM_REDUCTIONS_EXTERN extern
#endif

// The pairs that VisitReduction (ffi/cuda/kernels/reductions.h) calls. Other pairs are compiled where they are used.
#define JAXCOMM_REDUCTION(Op, ...)                                                  \
  JAXCOMM_REDUCTIONS_EXTERN template void ReduceRange<__VA_ARGS__, arithmetic::Op>( \
      const Elements&, const Operands&, int64_t, int64_t, bool, __VA_ARGS__);       \
  JAXCOMM_REDUCTIONS_EXTERN template bool LlCall::ReduceUnits<__VA_ARGS__, arithmetic::Op>(__VA_ARGS__);
#define JAXCOMM_ORDERED(...)          \
  JAXCOMM_REDUCTION(Max, __VA_ARGS__) \
  JAXCOMM_REDUCTION(Min, __VA_ARGS__)
#define JAXCOMM_ALL(...)              \
  JAXCOMM_REDUCTION(Sum, __VA_ARGS__) \
  JAXCOMM_ORDERED(__VA_ARGS__)

namespace jaxcomm {
namespace cuda {

JAXCOMM_ORDERED(arithmetic::Plain<int8_t>)
JAXCOMM_ORDERED(arithmetic::Plain<int16_t>)
JAXCOMM_ORDERED(arithmetic::Plain<int32_t>)
JAXCOMM_ORDERED(arithmetic::Plain<int64_t>)
JAXCOMM_ALL(arithmetic::Plain<uint8_t>)
JAXCOMM_ALL(arithmetic::Plain<uint16_t>)
JAXCOMM_ALL(arithmetic::Plain<uint32_t>)
JAXCOMM_ALL(arithmetic::Plain<uint64_t>)
JAXCOMM_ALL(arithmetic::Widened<Float16>)
JAXCOMM_ALL(arithmetic::Widened<BFloat16>)
JAXCOMM_ALL(arithmetic::Plain<float>)
JAXCOMM_ALL(arithmetic::Plain<double>)
JAXCOMM_ALL(AnyFloat8)
JAXCOMM_REDUCTION(Sum, arithmetic::Plain<arithmetic::Complex<float>>)

}  // namespace cuda
}  // namespace jaxcomm

#undef JAXCOMM_ALL
#undef JAXCOMM_ORDERED
#undef JAXCOMM_REDUCTION
