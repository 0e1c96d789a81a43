#include "cpu/pages.h"

#include <sys/mman.h>

#include <cstring>

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

void ZeroBytes(char* data, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  char* const begin = data + (Up(address, kHugePageBytes) - address);
  const int64_t size = bytes - (begin - data);
  const int64_t middle = size > 0 ? size / kHugePageBytes * kHugePageBytes : 0;
  if (middle < kMinDiscardedBytes || !Discard(begin, middle)) {
    std::memset(data, 0, static_cast<size_t>(bytes));
    return;
  }
  std::memset(data, 0, static_cast<size_t>(begin - data));
  std::memset(begin + middle, 0, static_cast<size_t>(size - middle));
}

}  // namespace jaxcomm
