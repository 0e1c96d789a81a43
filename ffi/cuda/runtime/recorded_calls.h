// Calls of one lane on one GPU in the flight recorder. Kernels say how far they have come (device::Progress), also when
// XLA replays a CUDA graph, in which the host sees no call. A thread of the host looks now and then, so the recorder
// has the call in progress, and some of those before.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "common/call_spec.h"
#include "common/dtype.h"
#include "include/jaxcomm/comm.h"
#include "recorder/recorder.h"

namespace jaxcomm::cuda {

class RecordedCalls {
 public:
  // A call with this device::Comm::call_id. `rank`: position of this GPU in its group.
  void Add(uint64_t call_id, const CallSpec& spec, int32_t process, int32_t device, int32_t rank, DType dtype,
           int64_t input_count, int64_t output_count);
  // The call has gone. It is known for a while after that, because Look() sees only later that it has run.
  void Remove(uint64_t call_id);
  // Called by one thread. The rank for which a kernel has waited since the last look, or -1.
  int32_t Look(const device::Progress& progress);

 private:
  struct Call {
    uint32_t site = Recorder::kNoSite;
    DType dtype = DType::kU8;
    int64_t input_count = 0, output_count = 0;
    uint64_t hash = 0;           // equal on all ranks
    std::vector<int64_t> ranks;  // of the group
    int32_t rank = 0;
    uint64_t arrived = 0;  // this GPU, as RecordedCall::arrived_mask
  };

  std::mutex mutex_;
  std::map<uint32_t, Call> calls_;  // by the lower half of call_id
  std::deque<uint32_t> removed_;    // those of calls_ that have gone

  uint32_t number_ = 0;  // of the latest call that has been seen
  Call call_;
  CallRecord record_;
  bool open_ = false;
  uint64_t waits_ns_ = 0;
};

}  // namespace jaxcomm::cuda
