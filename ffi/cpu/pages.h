// Advice to the kernel about the pages of large buffers.
#pragma once

#include <cstdint>

namespace jaxcomm {

// At large sizes, page faults on fresh output memory cost more than the data. 2 MiB pages cause 512 times fewer faults.
void AdviseHugePages(char* data, int64_t bytes);

// Sets bytes of a buffer to zero. In large buffers, the pages of large ranges are discarded instead: the kernel
// provides zeros when they are used again. So zeros that nobody reads cost nothing.
//
// Memory whose pages a device or a driver has pinned must not be passed (cudaHostRegister, ibv_reg_mr): the device
// would keep the old pages. Memory that mlock has locked is written.
// `stream`: zeros that are written bypass the caches, and a StreamFence() must follow.
void ZeroBytes(char* data, int64_t bytes, int64_t buffer_bytes, bool stream);

// The parts of ZeroBytes with at least this many bytes are discarded.
constexpr int64_t kMinDiscardedBytes = 4 << 20;

// Nothing is discarded in buffers of at most this many bytes. malloc reuses their memory, so the next use would fault
// all pages in again. This is DEFAULT_MMAP_THRESHOLD_MAX of glibc on 64-bit machines (mallopt(3)): larger allocations
// are always fresh mappings.
constexpr int64_t kMaxReusedBytes = 32 << 20;

}  // namespace jaxcomm
