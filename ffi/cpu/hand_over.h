// The points where one thread hands a call to another. Tests that define JAXCOMM_HAND_OVER_HOOK run code of their own
// there, such as a failure of the run at the worst moment. Other builds have no code there.
#pragma once

#include <cstdint>

namespace jaxcomm {

enum class HandOver : uint8_t {
  kMatched,        // all local participants have arrived; the call has not started
  kEntered,        // other processes see the call
  kAddToProgress,  // a failure of the run does not reach the call before the progress thread has it
  kCallsFailed,    // the open calls of a failed run have failed; a device that arrives now gets the error
};

#if defined(JAXCOMM_HAND_OVER_HOOK)
extern void (*hand_over_hook)(HandOver point);
inline void AtHandOver(HandOver point) {
  if (hand_over_hook != nullptr) hand_over_hook(point);
}
#else
inline void AtHandOver(HandOver) {}
#endif

}  // namespace jaxcomm
