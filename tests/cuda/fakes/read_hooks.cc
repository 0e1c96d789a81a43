// The calls that -fsanitize=thread puts into a program. Reads go to the observer, and atomic operations are executed.
#include "read_hooks.h"

#include <cstdint>
#include <cstring>

namespace fake {

ReadObserver read_observer = nullptr;

static void Observe(const void* address, size_t bytes) {
  static thread_local bool runs = false;
  if (read_observer == nullptr || runs) return;
  runs = true;
  read_observer(address, bytes);
  runs = false;
}

}  // namespace fake

extern "C" {
#define JAXCOMM_HOOKS(bytes)                                                          \
  void __tsan_read##bytes(void* address) { fake::Observe(address, bytes); }           \
  void __tsan_unaligned_read##bytes(void* address) { fake::Observe(address, bytes); } \
  void __tsan_write##bytes(void*) {}                                                  \
  void __tsan_unaligned_write##bytes(void*) {}
JAXCOMM_HOOKS(1)
JAXCOMM_HOOKS(2)
JAXCOMM_HOOKS(4)
JAXCOMM_HOOKS(8)
JAXCOMM_HOOKS(16)

void __tsan_read_range(void* address, size_t bytes) { fake::Observe(address, bytes); }
void __tsan_write_range(void*, size_t) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  fake::Observe(from, bytes);
  return std::memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) { return std::memset(to, value, bytes); }

#define JAXCOMM_ATOMICS(bits, type)                                                                                \
  type __tsan_atomic##bits##_load(const volatile type* word, int) { return __atomic_load_n(word, 5); }             \
  void __tsan_atomic##bits##_store(volatile type* word, type value, int) { __atomic_store_n(word, value, 5); }     \
  type __tsan_atomic##bits##_fetch_add(volatile type* word, type value, int) {                                     \
    return __atomic_fetch_add(word, value, 5);                                                                     \
  }                                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile type* word, type* expected, type desired, int, int) { \
    return __atomic_compare_exchange_n(word, expected, desired, false, 5, 5) ? 1 : 0;                              \
  }
JAXCOMM_ATOMICS(32, int32_t)
JAXCOMM_ATOMICS(64, int64_t)
}
