// Differences between nvcc, host compilers and the emulation of tests/cuda/fakes/emulation.h, which runs the same
// kernels on the CPU. JAXCOMM_HAS_DEVICE is 1 where device functions are declared.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include <cuda/atomic>
#define JAXCOMM_HAS_DEVICE 1
#define JAXCOMM_BOTH __host__ __device__ inline
#define JAXCOMM_DEVICE __device__ inline
// Compiled once per file instead of once per kernel.
#define JAXCOMM_DEVICE_CALLED __device__ __noinline__ inline
#define JAXCOMM_UNROLL _Pragma("unroll")
#elif defined(JAXCOMM_EMULATION)
#include JAXCOMM_EMULATION
#define JAXCOMM_HAS_DEVICE 1
#define JAXCOMM_BOTH inline
#define JAXCOMM_DEVICE inline
#define JAXCOMM_DEVICE_CALLED inline
#define JAXCOMM_UNROLL
#else
#define JAXCOMM_HAS_DEVICE 0
#define JAXCOMM_BOTH inline
#endif

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace device {

#if defined(__CUDACC__)
namespace atomics = ::cuda;
#else
namespace atomics = ::emulation;
#endif
// A word that several threads of the scope access without further order.
template <atomics::thread_scope kScope>
using AtomicWord = atomics::atomic_ref<uint64_t, kScope>;

// Atomic and ordered in system scope: all GPUs and the host.
JAXCOMM_DEVICE uint64_t LoadAcquire(const uint64_t* word) {
  return AtomicWord<atomics::thread_scope_system>(*const_cast<uint64_t*>(word)).load(atomics::memory_order_acquire);
}

JAXCOMM_DEVICE void StoreRelease(uint64_t* word, uint64_t value) {
  AtomicWord<atomics::thread_scope_system>(*word).store(value, atomics::memory_order_release);
}

// The same without an order.
JAXCOMM_DEVICE void StoreToHost(uint64_t* word, uint64_t value) {
  AtomicWord<atomics::thread_scope_system>(*word).store(value, atomics::memory_order_relaxed);
}

// Atomic between the threads of a block and later kernels of the stream. Orders nothing.
JAXCOMM_DEVICE uint64_t LoadRelaxed(const uint64_t* word) {
  return AtomicWord<atomics::thread_scope_block>(*const_cast<uint64_t*>(word)).load(atomics::memory_order_relaxed);
}

JAXCOMM_DEVICE void StoreRelaxed(uint64_t* word, uint64_t value) {
  AtomicWord<atomics::thread_scope_block>(*word).store(value, atomics::memory_order_relaxed);
}

// Returns true to the one caller on this GPU that changes the word from `expected` to `desired`. Atomic between the
// threads of the GPU, also on host memory.
JAXCOMM_DEVICE bool Claim(uint64_t* word, uint64_t expected, uint64_t desired) {
  return AtomicWord<atomics::thread_scope_device>(*word).compare_exchange_strong(expected, desired,
                                                                                 atomics::memory_order_relaxed);
}

// Adds to the word and returns what it was. Atomic between the threads of a block. Orders nothing.
JAXCOMM_DEVICE uint64_t FetchAdd(uint64_t* word, uint64_t add) {
  return AtomicWord<atomics::thread_scope_block>(*word).fetch_add(add, atomics::memory_order_relaxed);
}

// Stores two words. Each word is stored atomically, but one may become visible before the other. Visible to all GPUs.
// Orders nothing.
JAXCOMM_DEVICE void StorePair(uint64_t* pair, uint64_t first, uint64_t second) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(pair), "l"(first), "l"(second) : "memory");
#else
  emulation::StorePair(pair, first, second);
#endif
}

JAXCOMM_DEVICE void LoadPair(const uint64_t* pair, uint64_t* first, uint64_t* second) {
#if defined(__CUDACC__)
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(*first), "=l"(*second) : "l"(pair) : "memory");
#else
  emulation::LoadPair(pair, first, second);
#endif
}

// Orders accesses of this thread to a Multicast with its accesses to the same memory at other addresses. The two are
// aliases, which signals and barriers alone do not order: PTX ISA, "Proxies". Without effect where there is no
// Multicast.
JAXCOMM_DEVICE void FenceAliases() {
#if !defined(__CUDACC__)
  emulation::FenceAliases();
#elif __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.alias;" ::: "memory");
#endif
}

// The block's dynamic shared memory. Its size is that of the kernel launch, and its alignment is 16 bytes. Its content
// is undefined at first.
JAXCOMM_DEVICE void* DynamicShared() {
#if defined(__CUDACC__)
  extern __shared__ __align__(16) unsigned char jaxcomm_dynamic_shared[];
  return jaxcomm_dynamic_shared;
#else
  return emulation::DynamicShared();
#endif
}

// A clock that all kernels of a GPU share.
JAXCOMM_DEVICE uint64_t NowNs() {
#if defined(__CUDACC__)
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#else
  return emulation::NowNs();
#endif
}

// Called between two polls of a word that another thread changes.
JAXCOMM_DEVICE void Pause() {
#if !defined(__CUDACC__)
  emulation::Pause();
#endif
}

}  // namespace device
}  // namespace jaxcomm
#endif
