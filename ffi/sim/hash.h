// Hashes of the simulator, and a hash table.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/hash.h"

namespace jaxcomm {

inline uint64_t Mix(uint64_t x) { return Mix(x, 0); }

// The bits of a number, to be hashed.
inline uint64_t Bits(double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// A hash table of positions in a vector that its user keeps. Open addressing with 8 bytes per slot.
class Index {
 public:
  // The position with this hash for which equal(position) holds, else -1.
  template <typename Equal>
  int32_t Find(uint64_t hash, Equal equal) const {
    if (slots_.empty()) return -1;
    const auto key = static_cast<uint32_t>(hash);
    for (size_t at = key & (slots_.size() - 1);; at = (at + 1) & (slots_.size() - 1)) {
      const Slot& slot = slots_[at];
      if (slot.position < 0) return -1;
      if (slot.key == key && equal(slot.position)) return slot.position;
    }
  }

  void Add(uint64_t hash, int32_t position) {
    if (2 * ++size_ > slots_.size()) {
      std::vector<Slot> old(slots_.empty() ? 16 : 2 * slots_.size());
      old.swap(slots_);
      for (const Slot& slot : old) {
        if (slot.position >= 0) Put(slot);
      }
    }
    Put({static_cast<uint32_t>(hash), position});
  }

  void Clear() {
    if (slots_.size() > 64 * (size_ + 1)) slots_.clear();  // one large use must not slow down many small ones
    std::fill(slots_.begin(), slots_.end(), Slot());
    size_ = 0;
  }

 private:
  struct Slot {
    uint32_t key = 0;
    int32_t position = -1;
  };
  void Put(const Slot& slot) {
    size_t at = slot.key & (slots_.size() - 1);
    while (slots_[at].position >= 0) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = slot;
  }

  std::vector<Slot> slots_;  // a power of two
  size_t size_ = 0;
};

}  // namespace jaxcomm
