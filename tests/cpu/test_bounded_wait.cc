// The times of warnings and timeouts, on a clock of the test.
#include <string>
#include <vector>

#include "../../ffi/cpu/bounded_wait.h"
#include "../check.h"

namespace jaxcomm {
namespace {

using Clock = BoundedWait::Clock;

Clock::time_point At(double seconds) {
  return Clock::time_point{} + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

TEST_CASE("warnings come after warn_s and each time the wait has doubled, until the timeout") {
  BoundedWait wait(At(1000), {600, 30});
  std::vector<int> warned;
  int ended = 0;
  for (int second = 0; second < 700 && ended == 0; ++second) {
    if (wait.Expired(At(1000 + second))) {
      ended = second;
    } else if (wait.WarningDue(At(1000 + second))) {
      warned.push_back(second);
    }
  }
  CHECK((warned == std::vector<int>{30, 60, 120, 240, 480}));
  CHECK(ended == 600);
}

TEST_CASE("a late check warns once") {
  BoundedWait wait(At(0), {600, 30});
  CHECK(wait.WarningDue(At(250)));
  CHECK(!wait.WarningDue(At(251)));
  CHECK(!wait.WarningDue(At(479)));
  CHECK(wait.WarningDue(At(480)));
}

TEST_CASE("a grace period delays the timeout, not the warnings") {
  BoundedWait wait(At(0), {10, 4});
  CHECK(!wait.Expired(At(10.2), std::chrono::milliseconds(300)));
  CHECK(wait.Expired(At(10.4), std::chrono::milliseconds(300)));
  CHECK(wait.WarningDue(At(4)));
}

}  // namespace
}  // namespace jaxcomm
