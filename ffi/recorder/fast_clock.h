// CLOCK_MONOTONIC in ns, for half the cost of the system's function (10 instead of 24 ns, AMD EPYC guest, 2026-11). Two
// readings were most of the cost of a record.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace jaxcomm {

// Counts the processor's ticks since the latest comparison with the system's clock. It is the system's clock until two
// rates of the ticks agree, also after a suspend, and on processors whose ticks the system does not trust.
class FastClock {
 public:
  static uint64_t SystemNs() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  }
  uint64_t NowNs() const {
    if (latest_.load(std::memory_order_relaxed) == nullptr) return SystemNs();
    const uint64_t ns = NsAt(Ticks());
    return ns != 0 ? ns : SystemNs();
  }
  // Called by one thread, several times per second. Ten milliseconds at least must lie between two comparisons.
  void Compare();

  // The time at this count of ticks, 0 if the latest comparisons do not tell it.
  uint64_t NsAt(uint64_t at) const {
    const Comparison* const latest = latest_.load(std::memory_order_acquire);
    if (latest == nullptr) return 0;
    const auto ticks = static_cast<int64_t>(at - latest->ticks.load(std::memory_order_relaxed));
    const double ns = static_cast<double>(ticks) * latest->ns_per_tick.load(std::memory_order_relaxed);
    if (!(ns >= 0 && ns < kTrustedNs)) return 0;
    return latest->ns.load(std::memory_order_relaxed) + static_cast<uint64_t>(static_cast<int64_t>(ns));
  }
  // The count of ticks and the system's time, at once.
  void Compare(uint64_t ticks, uint64_t ns);

 private:
  // Since the latest comparison. After a longer time, the machine may have been suspended.
  static constexpr double kTrustedNs = 1e9;

  // Atomic only for a reader that is interrupted until its entry is used again.
  struct Comparison {
    std::atomic<uint64_t> ticks{0}, ns{0};
    std::atomic<double> ns_per_tick{0};
  };
  static uint64_t Ticks() {
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    return 0;
#endif
  }

  std::array<Comparison, 256> comparisons_;
  size_t next_ = 0;
  uint64_t ticks_ = 0, ns_ = 0;  // of the latest comparison; 0: none
  double ns_per_tick_ = 0;       // between the latest two; 0: none
  int next_look_ = 0;            // comparisons until the system's choice is read again
  bool usable_ = false;
  std::atomic<const Comparison*> latest_{nullptr};
};

}  // namespace jaxcomm
