// Seconds as a duration of the standard library's clocks.
#pragma once

#include <algorithm>
#include <chrono>

namespace jaxcomm {

// At most a century, also for infinity: the sum with the time of a clock does not overflow.
inline std::chrono::nanoseconds DurationOf(double seconds) {
  constexpr double kCentury = 100.0 * 365 * 24 * 3600;
  const std::chrono::duration<double> limited(std::min(std::max(0.0, seconds), kCentury));
  return std::chrono::duration_cast<std::chrono::nanoseconds>(limited);
}

}  // namespace jaxcomm
