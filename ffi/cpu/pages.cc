#include "cpu/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "cpu/copy.h"

namespace jaxcomm {
namespace {

constexpr int64_t kHugePageBytes = 2 << 20;

uintptr_t Down(uintptr_t address, uintptr_t unit) { return address / unit * unit; }
uintptr_t Up(uintptr_t address, uintptr_t unit) { return Down(address + unit - 1, unit); }

// Only private anonymous memory is zero after MADV_DONTNEED. MADV_FREE, which may only lose the old values, fails for
// any other memory, and for locked memory.
bool Discard(char* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_FREE)
  const auto size = static_cast<size_t>(bytes);
  return madvise(data, size, MADV_FREE) == 0 && madvise(data, size, MADV_DONTNEED) == 0;
#else
  (void)data, (void)bytes;
  return false;
#endif
}

// Whether discarded pages become zero. Emulators of Linux may accept the advice and ignore it.
bool DiscardZeroes() {
  const auto size = static_cast<size_t>(2 * sysconf(_SC_PAGESIZE));
  void* const pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return false;
  auto* const data = static_cast<char*>(pages);
  std::memset(data, 7, size);
  const bool zero = Discard(data, static_cast<int64_t>(size)) &&
                    std::all_of(data, data + size, [](char value) { return value == 0; });
  munmap(pages, size);
  return zero;
}

}  // namespace

void AdviseHugePages(char* data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  if (bytes < 2 * kHugePageBytes) return;
  const uintptr_t begin = Up(reinterpret_cast<uintptr_t>(data), kHugePageBytes);
  const uintptr_t end = Down(reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes), kHugePageBytes);
  // An error is harmless: pages stay small.
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

void ZeroBytes(char* data, int64_t bytes, int64_t buffer_bytes, bool stream) {
  static const bool can_discard = DiscardZeroes();
  const auto write = [stream](char* to, int64_t size) {
    if (stream) return StreamZeros(to, size);
    std::memset(to, 0, static_cast<size_t>(size));
  };
  const auto address = reinterpret_cast<uintptr_t>(data);
  char* const begin = data + (Up(address, kHugePageBytes) - address);
  const int64_t size = bytes - (begin - data);
  const int64_t middle = size > 0 ? size / kHugePageBytes * kHugePageBytes : 0;
  if (buffer_bytes <= kMaxReusedBytes || middle < kMinDiscardedBytes || !can_discard || !Discard(begin, middle)) {
    return write(data, bytes);
  }
  write(data, begin - data);
  write(begin + middle, size - middle);
}

}  // namespace jaxcomm
