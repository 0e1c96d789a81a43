// A thread that reads the reports of kernels, and records how far they have come. A kernel that aborts stops its GPU,
// and XLA's error does not say why.
#pragma once

#include <functional>

namespace jaxcomm::cuda {

// Time between the report on standard error and the end of the process, in which Python may raise XLA's error.
constexpr double kGraceS = 5;

// Starts the thread, once. After the first abort of a kernel it prints the report, waits, and calls `end`, which ends
// the process. The host's calls of CUDA may hang by then, so the thread makes none.
void StartWatchdog(std::function<void()> end, double grace_s = kGraceS);

}  // namespace jaxcomm::cuda
