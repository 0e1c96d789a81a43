// Run-time switches of mutants, which the rewritten sources call. A compiler option includes this file first.
//
// JAXCOMM_MUTANT=<number> switches one mutant on. With JAXCOMM_MUTANT_COVERAGE=<file>, every process marks the switches
// that it reaches, one byte each, in this file. The caller creates the file in full length.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <type_traits>

namespace jm {

enum Mode { kUnknown, kSelected, kCoverage };

inline std::atomic<int> mode{kUnknown};
inline std::atomic<int> active{-1};
inline std::atomic<unsigned char*> reached{nullptr};
inline std::atomic<long> num_reached{0};

// The first call of a process, which several threads may make at once, and every call with coverage.
__attribute__((noinline)) inline bool Slow(int id) {
  if (mode.load(std::memory_order_acquire) == kUnknown) {
    const char* chosen = std::getenv("JAXCOMM_MUTANT");
    if (chosen != nullptr) active.store(std::atoi(chosen));
    int next = kSelected;
    if (const char* path = std::getenv("JAXCOMM_MUTANT_COVERAGE")) {
      const int file = open(path, O_RDWR);
      struct stat status;
      if (file >= 0 && fstat(file, &status) == 0) {
        void* bytes = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (bytes != MAP_FAILED) {
          num_reached.store(status.st_size);
          reached.store(static_cast<unsigned char*>(bytes));
          next = kCoverage;
        }
      }
      if (file >= 0) close(file);
    }
    mode.store(next, std::memory_order_release);
  }
  if (unsigned char* bytes = reached.load(); bytes != nullptr && id < num_reached.load()) bytes[id] = 1;
  return active.load() == id;
}

inline bool On(int id) {
  if (__builtin_expect(mode.load(std::memory_order_acquire) != kSelected, 0)) return Slow(id);
  return active.load(std::memory_order_relaxed) == id;
}

// Both operands are evaluated, with and without the mutant.
#define JM_ARITHMETIC(name, op, other)                                   \
  template <typename A, typename B>                                      \
  inline auto name(int id, const A& a, const B& b) -> decltype(a op b) { \
    if (On(id)) return static_cast<decltype(a op b)>(a other b);         \
    return a op b;                                                       \
  }
JM_ARITHMETIC(Add, +, -)
JM_ARITHMETIC(Subtract, -, +)
JM_ARITHMETIC(Multiply, *, +)
JM_ARITHMETIC(Divide, /, *)
JM_ARITHMETIC(Modulo, %, -)
JM_ARITHMETIC(ShiftLeft, <<, >>)
JM_ARITHMETIC(ShiftRight, >>, <<)
JM_ARITHMETIC(BitAnd, &, |)
JM_ARITHMETIC(BitOr, |, &)
JM_ARITHMETIC(BitXor, ^, |)
JM_ARITHMETIC(Less, <, <=)
JM_ARITHMETIC(LessEqual, <=, <)
JM_ARITHMETIC(Greater, >, >=)
JM_ARITHMETIC(GreaterEqual, >=, >)
JM_ARITHMETIC(Equal, ==, !=)
JM_ARITHMETIC(NotEqual, !=, ==)
#undef JM_ARITHMETIC

// The right side of += and -=.
template <typename T>
inline auto Negate(int id, const T& value) -> decltype(value + value) {
  return On(id) ? static_cast<decltype(value + value)>(-value) : value;
}

template <typename T>
inline const T& Min(int id, const T& a, const T& b) {
  return On(id) ? (a < b ? b : a) : (b < a ? b : a);
}
template <typename T>
inline const T& Max(int id, const T& a, const T& b) {
  return On(id) ? (b < a ? b : a) : (a < b ? b : a);
}

}  // namespace jm
