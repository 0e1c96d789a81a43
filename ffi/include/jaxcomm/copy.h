// Data movement by all threads of a block, or by those of another group where a function takes `threads`. These
// functions neither wait nor order memory accesses. A Sync() must separate a write from a read by another thread, and a
// Signal and a Wait must separate accesses of different ranks.
#pragma once

#include "comm.h"
#include "sync.h"
#include "threads.h"

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

// Calls store(i, load(i)) for i = 0 .. count - 1, by all of `threads`. Each thread issues up to kUnroll loads before
// the first store, also in the last iteration. `load` must not depend on the stores.
template <typename Load, typename Store>
JAXCOMM_DEVICE void Pass(int64_t count, Threads threads, Load load, Store store) {
  const int64_t num_threads = threads.size;
  int64_t first = threads.rank;
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
JAXCOMM_DEVICE_CALLED void CopyUnits(Unit* dst, const Unit* src, int64_t count, Threads threads) {
  Pass(count, threads, [&](int64_t i) { return src[i]; }, [&](int64_t i, const Unit& unit) { dst[i] = unit; });
}

// Precondition: dst and src have the same remainder modulo sizeof(Unit).
template <typename Unit>
JAXCOMM_DEVICE void CopyAligned(char* dst, const char* src, int64_t bytes, Threads threads) {
  const auto to_boundary = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & (sizeof(Unit) - 1));
  const int64_t head = to_boundary < bytes ? to_boundary : bytes;
  const int64_t units = (bytes - head) / static_cast<int64_t>(sizeof(Unit));
  const int64_t body_end = head + units * static_cast<int64_t>(sizeof(Unit));
  // Before and after the units, less than one byte per thread.
  for (int64_t i = threads.rank; i < head; i += threads.size) dst[i] = src[i];
  CopyUnits(reinterpret_cast<Unit*>(dst + head), reinterpret_cast<const Unit*>(src + head), units, threads);
  for (int64_t i = body_end + threads.rank; i < bytes; i += threads.size) dst[i] = src[i];
}

// Copies `bytes` bytes between buffers of any alignment that do not overlap. The unit is the largest that the common
// alignment allows: 16 bytes if both addresses have the same remainder modulo 16.
JAXCOMM_DEVICE void Copy(void* dst, const void* src, int64_t bytes, Threads threads = OfBlock()) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const uintptr_t difference = reinterpret_cast<uintptr_t>(to) ^ reinterpret_cast<uintptr_t>(from);
  if ((difference & 15) == 0) {
    CopyAligned<Bytes16>(to, from, bytes, threads);
  } else if ((difference & 7) == 0) {
    CopyAligned<uint64_t>(to, from, bytes, threads);
  } else if ((difference & 3) == 0) {
    CopyAligned<uint32_t>(to, from, bytes, threads);
  } else if ((difference & 1) == 0) {
    CopyAligned<uint16_t>(to, from, bytes, threads);
  } else {
    CopyUnits(to, from, bytes, threads);
  }
}

struct CopyRange {
  char* dst = nullptr;
  const char* src = nullptr;
  int64_t bytes = 0;
};

// The bytes that a warp keeps in flight.
constexpr int64_t kTileBytes = kUnroll * kWarpThreads * static_cast<int64_t>(sizeof(Bytes16));

// Copies range(0) .. range(num - 1), of at most `most_bytes` bytes each, by all threads of the block. The ranges must
// not overlap. Warps take tiles of all ranges in turn, so loads from all peers are in flight at once. One Copy after
// the other would wait for each peer's loads before it issued those to the next.
template <typename Range>
JAXCOMM_DEVICE void CopyRanges(int32_t num, int64_t most_bytes, Range range) {
  const Threads block = OfBlock(), warp = OfWarp();
  const int32_t num_warps = (block.size + kWarpThreads - 1) / kWarpThreads;
  // The first tile of a range may be short.
  const auto tiles = static_cast<int32_t>((most_bytes + sizeof(Bytes16) - 1 + kTileBytes - 1) / kTileBytes);
  for (int32_t tile = block.rank / kWarpThreads; tile < num * tiles; tile += num_warps) {
    const CopyRange all = range(tile % num);
    // Tiles begin at multiples of 16 bytes in the destination: only the first and the last have single bytes.
    const auto shift = static_cast<int64_t>(reinterpret_cast<uintptr_t>(all.dst) & (sizeof(Bytes16) - 1));
    int64_t begin = tile / num * kTileBytes - shift;
    const int64_t end = begin + kTileBytes < all.bytes ? begin + kTileBytes : all.bytes;
    if (begin < 0) begin = 0;
    if (begin < end) Copy(all.dst + begin, all.src + begin, end - begin, warp);
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

// Writes to the window of a peer of this node: a Window or a BufferWindow. The data is visible to a peer that waits for
// this rank's next signal.
template <typename AnyWindow = Window>
JAXCOMM_DEVICE void Put(const AnyWindow& window, int32_t peer, int64_t byte_offset, const void* src, int64_t bytes,
                        Threads threads = OfBlock()) {
  Copy(window.At(peer, byte_offset), src, bytes, threads);
}

// Reads from the window of a peer of this node. The peer must have signalled that the data is ready. It must not change
// the data before this rank has signalled that the read is complete.
template <typename AnyWindow = Window>
JAXCOMM_DEVICE void Get(void* dst, const AnyWindow& window, int32_t peer, int64_t byte_offset, int64_t bytes,
                        Threads threads = OfBlock()) {
  Copy(dst, window.At(peer, byte_offset), bytes, threads);
}

// Put by all threads of the group, followed by one Signal once all of them have written.
template <typename AnyWindow = Window>
JAXCOMM_DEVICE void PutSignal(const Comm& comm, Channel channel, const AnyWindow& window, int32_t peer,
                              int64_t byte_offset, const void* src, int64_t bytes,
                              const ThreadGroup& threads = OfBlock()) {
  Put(window, peer, byte_offset, src, bytes, threads);
  Signal(comm, channel, peer, threads);
}

}  // namespace device
}  // namespace jaxcomm
#endif
