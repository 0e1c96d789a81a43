// One access reaches the memory of all ranks: NVSwitch returns the sum of a load over all ranks and broadcasts a store
// to all ranks. Requires Hopper or later and a Multicast::base that is not null. The unit is 16 bytes: addresses and
// sizes must be multiples of 16. These functions neither wait nor order memory accesses of different threads; see
// copy.h.
//
// The addresses are aliases of those of the windows. FenceAliases must separate an access at one address from an access
// to the same memory at another, also by another thread or rank. MultimemReduce, MultimemPut and Barrier contain it. A
// kernel that calls MulticastSum or MulticastStore itself needs it before and after.
#pragma once

#include <cstring>
#include <iterator>
#include <type_traits>

#include "arithmetic.h"
#include "copy.h"
#include "small_float.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace device {

// The sum of 16 bytes of elements over the ranks, for f32, bf16 and f16. bf16 and f16 are added in f32 and rounded
// once. The switch chooses the order of summation.
template <typename Codec>
JAXCOMM_DEVICE Bytes16 MulticastSum(const Bytes16* address) {
  constexpr bool kF32 = std::is_same_v<Codec, arithmetic::Plain<float>>;
  constexpr bool kBF16 = std::is_same_v<Codec, arithmetic::Widened<BFloat16>>;
  static_assert(kF32 || kBF16 || std::is_same_v<Codec, arithmetic::Widened<Float16>>, "f32, bf16 or f16");
  Bytes16 sum = {};
#if !defined(__CUDACC__)
  emulation::AccessMulticast();
  typename Codec::Storage elements[16 / sizeof(typename Codec::Storage)];
  for (size_t i = 0; i < std::size(elements); ++i) {
    float total = 0;
    for (int r = 0; r < emulation::NumReplicas(address); ++r) {
      const void* replica = emulation::Replica(const_cast<Bytes16*>(address), r);
      total += Codec::Decode(static_cast<const typename Codec::Storage*>(replica)[i]);
    }
    elements[i] = Codec::Encode(total);
  }
  std::memcpy(&sum, elements, sizeof(sum));
#elif __CUDA_ARCH__ >= 900
  const auto at = __cvta_generic_to_global(address);
  if constexpr (kF32) {
    float parts[4];
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(parts[0]), "=f"(parts[1]), "=f"(parts[2]), "=f"(parts[3])
                 : "l"(at)
                 : "memory");
    for (int i = 0; i < 4; ++i) sum.words[i] = __float_as_uint(parts[i]);
  } else if constexpr (kBF16) {
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(sum.words[0]), "=r"(sum.words[1]), "=r"(sum.words[2]), "=r"(sum.words[3])
                 : "l"(at)
                 : "memory");
  } else {
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
                 : "=r"(sum.words[0]), "=r"(sum.words[1]), "=r"(sum.words[2]), "=r"(sum.words[3])
                 : "l"(at)
                 : "memory");
  }
#else
  __trap();  // the instruction does not exist here, so there is no Multicast
#endif
  return sum;
}

// Writes 16 bytes to the same offset on all ranks.
JAXCOMM_DEVICE void MulticastStore(Bytes16* address, const Bytes16& value) {
#if !defined(__CUDACC__)
  emulation::AccessMulticast();
  for (int r = 0; r < emulation::NumReplicas(address); ++r) {
    *static_cast<Bytes16*>(emulation::Replica(address, r)) = value;
  }
#elif __CUDA_ARCH__ >= 900
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(address)),
               "f"(__uint_as_float(value.words[0])), "f"(__uint_as_float(value.words[1])),
               "f"(__uint_as_float(value.words[2])), "f"(__uint_as_float(value.words[3]))
               : "memory");
#else
  __trap();
#endif
}

// dst = the sum of the windows over the ranks. Called by all threads of the block. Ranks that read the same elements
// may get different bits. For equal bits, let one rank read and put the result to the others.
template <typename Codec>
JAXCOMM_DEVICE void MultimemReduce(void* dst, const Multicast& window, int64_t byte_offset, int64_t bytes) {
  const auto* from = window.At<const Bytes16>(byte_offset);
  FenceAliases();  // the operands were written through addresses of single ranks
  Pass(
      bytes / static_cast<int64_t>(sizeof(Bytes16)), OfBlock(),
      [&](int64_t i) { return MulticastSum<Codec>(from + i); },
      [&](int64_t i, const Bytes16& sum) { static_cast<Bytes16*>(dst)[i] = sum; });
  FenceAliases();  // and may be overwritten through them
}

// Writes to the windows of all ranks, including this rank's own. Called by all threads of the block. The data is
// visible to a peer that waits for this rank's next signal.
JAXCOMM_DEVICE void MultimemPut(const Multicast& window, int64_t byte_offset, const void* src, int64_t bytes) {
  auto* to = window.At<Bytes16>(byte_offset);
  FenceAliases();  // earlier data was read through addresses of single ranks
  Pass(
      bytes / static_cast<int64_t>(sizeof(Bytes16)), OfBlock(),
      [&](int64_t i) { return static_cast<const Bytes16*>(src)[i]; },
      [&](int64_t i, const Bytes16& value) { MulticastStore(to + i, value); });
  FenceAliases();  // and this data will be
}

}  // namespace device
}  // namespace jaxcomm
#endif
