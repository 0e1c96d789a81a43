// Data movement by all threads of a block. These functions neither wait nor order memory accesses. A __syncthreads()
// must separate a write from a read by another thread, and a Signal and a Wait must separate accesses of different
// ranks.
#pragma once

#include "comm.h"
#include "sync.h"

#if JAXCOMM_HAS_DEVICE
namespace jaxcomm {
namespace device {

// The widest load and store.
struct alignas(16) Bytes16 {
  uint32_t words[4];
};

// Loads that a thread issues before it uses the first of them. The bandwidth of a link is the number of bytes in flight
// divided by the latency, so a thread that waits for each load cannot fill a link: docs/internals/cuda-bandwidth.md.
constexpr int kUnroll = 8;

// Calls store(i, load(i)) for i = 0 .. count - 1, by all threads of the block. Each thread issues up to kUnroll loads
// before the first store, also in the last iteration. `load` must not depend on the stores.
template <typename Load, typename Store>
JAXCOMM_DEVICE void Pass(int64_t count, Load load, Store store) {
  const auto num_threads = static_cast<int64_t>(blockDim.x);
  auto first = static_cast<int64_t>(threadIdx.x);
  for (; first + (kUnroll - 1) * num_threads < count; first += kUnroll * num_threads) {
    decltype(load(first)) units[kUnroll];
    JAXCOMM_UNROLL
    for (int k = 0; k < kUnroll; ++k) units[k] = load(first + k * num_threads);
    JAXCOMM_UNROLL
    for (int k = 0; k < kUnroll; ++k) store(first + k * num_threads, units[k]);
  }
  if (first >= count) return;
  // Initialized, because ptxas keeps registers for undefined values across all functions of the kernel.
  decltype(load(first)) units[kUnroll] = {};
  JAXCOMM_UNROLL
  for (int k = 0; k < kUnroll; ++k) {
    if (first + k * num_threads < count) units[k] = load(first + k * num_threads);
  }
  JAXCOMM_UNROLL
  for (int k = 0; k < kUnroll; ++k) {
    if (first + k * num_threads < count) store(first + k * num_threads, units[k]);
  }
}

// The pointers have no __restrict__: nvcc would load from `src` through the cache for constants (ld.global.nc), which
// may hold what was there before a peer wrote.
template <typename Unit>
JAXCOMM_DEVICE_CALLED void CopyUnits(Unit* dst, const Unit* src, int64_t count) {
  Pass(count, [&](int64_t i) { return src[i]; }, [&](int64_t i, const Unit& unit) { dst[i] = unit; });
}

// Precondition: dst and src have the same remainder modulo sizeof(Unit).
template <typename Unit>
JAXCOMM_DEVICE void CopyAligned(char* dst, const char* src, int64_t bytes) {
  const auto to_boundary = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & (sizeof(Unit) - 1));
  const int64_t head = to_boundary < bytes ? to_boundary : bytes;
  const int64_t units = (bytes - head) / static_cast<int64_t>(sizeof(Unit));
  const int64_t body_end = head + units * static_cast<int64_t>(sizeof(Unit));
  // Before and after the units, less than one byte per thread.
  for (auto i = static_cast<int64_t>(threadIdx.x); i < head; i += blockDim.x) dst[i] = src[i];
  CopyUnits(reinterpret_cast<Unit*>(dst + head), reinterpret_cast<const Unit*>(src + head), units);
  for (int64_t i = body_end + threadIdx.x; i < bytes; i += blockDim.x) dst[i] = src[i];
}

// Copies `bytes` bytes between buffers of any alignment that do not overlap. The unit is the largest that the common
// alignment allows: 16 bytes if both addresses have the same remainder modulo 16.
JAXCOMM_DEVICE void Copy(void* dst, const void* src, int64_t bytes) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const uintptr_t difference = reinterpret_cast<uintptr_t>(to) ^ reinterpret_cast<uintptr_t>(from);
  if ((difference & 15) == 0) {
    CopyAligned<Bytes16>(to, from, bytes);
  } else if ((difference & 7) == 0) {
    CopyAligned<uint64_t>(to, from, bytes);
  } else if ((difference & 3) == 0) {
    CopyAligned<uint32_t>(to, from, bytes);
  } else if ((difference & 1) == 0) {
    CopyAligned<uint16_t>(to, from, bytes);
  } else {
    CopyUnits(to, from, bytes);
  }
}

// Sets `bytes` bytes to zero.
JAXCOMM_DEVICE void Zero(void* dst, int64_t bytes) {
  char* to = static_cast<char*>(dst);
  const auto to_boundary = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & 15);
  const int64_t head = to_boundary < bytes ? to_boundary : bytes;
  const int64_t units = (bytes - head) / 16;
  const auto num_threads = static_cast<int64_t>(blockDim.x);
  const auto thread = static_cast<int64_t>(threadIdx.x);
  for (int64_t i = thread; i < head; i += num_threads) to[i] = 0;
  for (int64_t i = thread; i < units; i += num_threads) reinterpret_cast<Bytes16*>(to + head)[i] = Bytes16{};
  for (int64_t i = head + units * 16 + thread; i < bytes; i += num_threads) to[i] = 0;
}

// Writes to the window of a peer of this node. The data is visible to a peer that waits for this rank's next signal.
JAXCOMM_DEVICE void Put(const Window& window, int32_t peer, int64_t byte_offset, const void* src, int64_t bytes) {
  Copy(window.At(peer, byte_offset), src, bytes);
}

// Reads from the window of a peer of this node. The peer must have signalled that the data is ready. It must not change
// the data before this rank has signalled that the read is complete.
JAXCOMM_DEVICE void Get(void* dst, const Window& window, int32_t peer, int64_t byte_offset, int64_t bytes) {
  Copy(dst, window.At(peer, byte_offset), bytes);
}

// Put by all threads of the block, followed by one Signal once all threads have written.
JAXCOMM_DEVICE void PutSignal(const Comm& comm, int32_t channel, const Window& window, int32_t peer,
                              int64_t byte_offset, const void* src, int64_t bytes) {
  Put(window, peer, byte_offset, src, bytes);
  __syncthreads();
  if (threadIdx.x == 0) Signal(comm, channel, peer);
}

}  // namespace device
}  // namespace jaxcomm
#endif
