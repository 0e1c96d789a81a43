#include "recorder/fast_clock.h"

#include <fstream>
#include <string>

namespace jaxcomm {
namespace {

// Linux keeps time by the ticks only if they are constant and equal on all processors.
bool SystemUsesTicks() {
#if defined(__x86_64__)
  std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  std::string name;
  return static_cast<bool>(file >> name) && name == "tsc";
#else
  return false;
#endif
}

}  // namespace

void FastClock::Compare() {
  static const bool usable = SystemUsesTicks();
  if (!usable) return;
  // The shortest of some readings was not interrupted: its error is a few ns.
  uint64_t ticks = 0, ns = 0, shortest = UINT64_MAX;
  for (int i = 0; i < 5; ++i) {
    const uint64_t begin = Ticks(), now = SystemNs(), end = Ticks();
    if (end - begin >= shortest) continue;
    shortest = end - begin;
    ticks = begin + shortest / 2;
    ns = now;
  }
  if (ticks_ != 0 && ticks > ticks_) {
    Comparison& comparison = comparisons_[next_++ % comparisons_.size()];
    comparison.ticks.store(ticks, std::memory_order_relaxed);
    comparison.ns.store(ns, std::memory_order_relaxed);
    comparison.ns_per_tick.store(static_cast<double>(ns - ns_) / static_cast<double>(ticks - ticks_),
                                 std::memory_order_relaxed);
    latest_.store(&comparison, std::memory_order_release);
  }
  ticks_ = ticks;
  ns_ = ns;
}

}  // namespace jaxcomm
