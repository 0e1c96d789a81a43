// Memory for arrays that arrive, used again: to touch fresh memory takes as long as to receive what goes there.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace jaxcomm {

// Thread-safe.
class MemoryPool {
 public:
  // Never destroyed: arrays may outlive all else.
  static MemoryPool& Get();

  // Aligned to pages of the kernel, with any content. Null: the host has not enough.
  char* Take(size_t bytes);
  void Give(char* data, size_t bytes);  // what Take(bytes) has returned

 private:
  struct Block {
    char* data;
    size_t bytes;
  };

  std::mutex mutex_;
  std::vector<Block> idle_;  // the latest is the last
  size_t idle_bytes_ = 0;
};

}  // namespace jaxcomm
