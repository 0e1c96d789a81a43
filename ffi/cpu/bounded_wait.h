// Bounded waits for ranks that are alive but late: a warning on standard error, then an error.
#pragma once

#include <chrono>
#include <cstdio>
#include <string>

namespace jaxcomm {

struct WaitLimits {
  double timeout_s = 600;                       // JAXCOMM_TIMEOUT_S
  double warn_s = 30;                           // JAXCOMM_WARN_S
  const char* timeout_name = kTimeoutVariable;  // who has set timeout_s

  static constexpr char kTimeoutVariable[] = "JAXCOMM_TIMEOUT_S";
  static constexpr char kTimeoutArgument[] = "timeout_s";
};

// One wait. Not thread-safe.
class BoundedWait {
 public:
  using Clock = std::chrono::steady_clock;

  BoundedWait() = default;
  BoundedWait(Clock::time_point began, const WaitLimits& limits)
      : began_(began), limits_(limits), next_warning_s_(limits.warn_s) {}

  Clock::time_point began() const { return began_; }
  bool Expired(Clock::time_point now) const { return Seconds(now) >= limits_.timeout_s; }
  bool Expired(Clock::time_point now, Clock::duration grace) const { return Expired(now - grace); }

  double warn_s() const { return limits_.warn_s; }
  // Whether a warning is due: after warn_s, then each time the wait has doubled.
  bool WarningDue(Clock::time_point now) {
    if (Seconds(now) < next_warning_s_) return false;
    while (next_warning_s_ <= Seconds(now)) next_warning_s_ *= 2;
    return true;
  }

  // " within 600 s (JAXCOMM_TIMEOUT_S)", or "(timeout_s)" after the argument of a call
  std::string WithinTimeout() const { return Within(limits_.timeout_s, limits_.timeout_name); }

  // Whether an error was made by WithinTimeout(), perhaps in another process.
  static bool IsTimeout(const std::string& error) {
    return error.find(std::string("(") + WaitLimits::kTimeoutVariable + ")") != std::string::npos ||
           error.find(std::string("(") + WaitLimits::kTimeoutArgument + ")") != std::string::npos;
  }

  // Prints a line on standard error. late(within) returns its text; `within` is the time waited, such as " within 30
  // s".
  template <typename Late>
  void Warn(const Late& late) const {
    const double warned_s = next_warning_s_ / 2;  // the limit that WarningDue() found exceeded
    const std::string text = late(Within(warned_s, warned_s == limits_.warn_s ? "JAXCOMM_WARN_S" : ""));
    std::fprintf(stderr, "warning: %s; an error follows after %g s (%s)\n", text.c_str(), limits_.timeout_s,
                 limits_.timeout_name);
  }

 private:
  double Seconds(Clock::time_point now) const { return std::chrono::duration<double>(now - began_).count(); }
  static std::string Within(double seconds, const char* variable) {
    char text[64];
    std::snprintf(text, sizeof(text), *variable != 0 ? " within %g s (%s)" : " within %g s", seconds, variable);
    return text;
  }

  Clock::time_point began_{};
  WaitLimits limits_;
  double next_warning_s_ = 0;
};

}  // namespace jaxcomm
