#include "transfer/memory_pool.h"

#include <sys/mman.h>

#include <algorithm>

namespace jaxcomm {
namespace {

constexpr size_t kMaxIdleBytes = 256 << 20;
constexpr size_t kHugeBytes = 2 << 20;  // of a huge page; blocks have whole ones if they are as large

size_t Rounded(size_t bytes) {
  const size_t unit = bytes >= kHugeBytes ? kHugeBytes : 64 << 10;
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

MemoryPool& MemoryPool::Get() {
  static auto* pool = new MemoryPool;
  return *pool;
}

char* MemoryPool::Take(size_t bytes) {
  bytes = Rounded(bytes);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(idle_.rbegin(), idle_.rend(), [&](const Block& b) { return b.bytes == bytes; });
    if (found != idle_.rend()) {
      char* const data = found->data;
      idle_bytes_ -= bytes;
      idle_.erase(std::next(found).base());
      return data;
    }
  }
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  madvise(data, bytes, MADV_HUGEPAGE);  // fewer faults, where the kernel has them
  return static_cast<char*>(data);
}

void MemoryPool::Give(char* data, size_t bytes) {
  std::vector<Block> freed;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back({data, Rounded(bytes)});
    idle_bytes_ += idle_.back().bytes;
    auto end = idle_.begin();
    for (; idle_bytes_ > kMaxIdleBytes; ++end) idle_bytes_ -= end->bytes;
    freed.assign(idle_.begin(), end);
    idle_.erase(idle_.begin(), end);
  }
  for (const Block& block : freed) munmap(block.data, block.bytes);
}

}  // namespace jaxcomm
