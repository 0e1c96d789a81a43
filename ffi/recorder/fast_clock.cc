#include "recorder/fast_clock.h"

#include <cmath>
#include <fstream>
#include <string>

namespace jaxcomm {
namespace {

constexpr int kLooks = 100;  // comparisons between two looks at the system's choice: about 10 s
constexpr double kAgree = 1e-3;

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
  if (next_look_-- == 0) {
    next_look_ = kLooks;
    usable_ = SystemUsesTicks();
  }
  if (!usable_) {
    ticks_ = 0;
    ns_per_tick_ = 0;
    return latest_.store(nullptr, std::memory_order_release);
  }
  // The shortest of some readings was not interrupted: its error is a few ns.
  uint64_t ticks = 0, ns = 0, shortest = UINT64_MAX;
  for (int i = 0; i < 5; ++i) {
    const uint64_t begin = Ticks(), now = SystemNs(), end = Ticks();
    if (end - begin >= shortest) continue;
    shortest = end - begin;
    ticks = begin + shortest / 2;
    ns = now;
  }
  Compare(ticks, ns);
}

void FastClock::Compare(uint64_t ticks, uint64_t ns) {
  double ns_per_tick = 0;
  if (ticks_ != 0 && ticks > ticks_) ns_per_tick = static_cast<double>(ns - ns_) / static_cast<double>(ticks - ticks_);
  if (ns_per_tick > 0 && std::abs(ns_per_tick - ns_per_tick_) <= kAgree * ns_per_tick_) {
    Comparison& comparison = comparisons_[next_++ % comparisons_.size()];
    comparison.ticks.store(ticks, std::memory_order_relaxed);
    comparison.ns.store(ns, std::memory_order_relaxed);
    comparison.ns_per_tick.store(ns_per_tick, std::memory_order_relaxed);
    latest_.store(&comparison, std::memory_order_release);
  } else {
    latest_.store(nullptr, std::memory_order_release);
  }
  ns_per_tick_ = ns_per_tick;
  ticks_ = ticks;
  ns_ = ns;
}

}  // namespace jaxcomm
