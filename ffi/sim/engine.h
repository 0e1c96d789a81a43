// Executes a workload in simulated time.
//
// Every rank has a processor, which executes its ops in order, and a queue to the network. A transfer on the processor
// ends before the next op; a queued one ends before the next entry of the queue. Times are integers, so equal transfers
// end at the same time.
#pragma once

#include <cstdint>
#include <vector>

#include "common/status.h"
#include "sim/workload.h"

namespace jaxcomm {

// A transfer, or a wait for a signal, in time.
struct Interval {
  int32_t program = 0;
  int32_t op = 0;
  bool queued = false;
  int64_t start_ps = 0;
  int64_t end_ps = 0;
};

struct EngineResult {
  int64_t time_ps = 0;           // until the last rank has finished
  int64_t empty_ps = 0;          // the same if all transfers were empty
  double mean_wait_s = 0;        // time in which a rank waits for signals, on average
  std::vector<double> bytes_on;  // bytes on one link of each class
  int64_t num_ops = 0;           // executed
  std::vector<Interval> slices;  // the first ones that ended
};

// Fails if ranks wait for signals that never come. Records at most `max_slices` slices.
StatusOr<EngineResult> RunEngine(const Workload& workload, size_t max_slices = 0);

}  // namespace jaxcomm
