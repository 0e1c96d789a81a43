// What a kernel gets from the host: plain data, passed by value. Host code may include this without a CUDA compiler.
#pragma once

#include <cstdint>

#include "portable.h"

namespace jaxcomm {
namespace device {

// Ranks first, first + stride, ... of the group, of which this rank is number `rank`.
struct Team {
  int32_t rank = 0;
  int32_t size = 1;
  int32_t first = 0;
  int32_t stride = 1;

  JAXCOMM_BOTH int32_t World(int32_t member) const { return first + member * stride; }
};

// Memory of the same size at every rank of a node: that of the node's p-th rank begins at base + p * stride. Base may
// point outside of every allocation.
struct Window {
  char* base = nullptr;
  int64_t stride = 0;

  template <typename T = char>
  JAXCOMM_BOTH T* At(int32_t local_rank, int64_t byte_offset = 0) const {
    return reinterpret_cast<T*>(base + local_rank * stride + byte_offset);
  }
};

// Stands for the memory of all ranks of a node at once: what is stored arrives at every rank, what is loaded is the sum
// of theirs (multimem.h). Null where GPUs, switches or NCCL don't offer that. Nothing else may be done with its
// addresses.
struct Multicast {
  char* base = nullptr;

  template <typename T = char>
  JAXCOMM_BOTH T* At(int64_t byte_offset = 0) const {
    return reinterpret_cast<T*>(base + byte_offset);
  }
};

// Why a kernel aborted. Lies in memory that the host reads while kernels run.
struct Report {
  enum State : uint64_t { kNone = 0, kClaimed = 1, kComplete = 2 };
  uint64_t state = kNone;
  uint64_t abort = 0;    // set by the host: all waits end
  uint64_t call_id = 0;  // which call: Comm::call_id
  int32_t channel = 0;
  int32_t step = 0;  // position in the plan, or what the kernel passed to Wait
  int32_t rank = 0;
  int32_t peer = 0;       // that did not signal
  uint64_t expected = 0;  // count of the peer's signals
  uint64_t seen = 0;
  uint64_t time_ns = 0;  // of the GPU's clock
};

// Counters of the signals between the ranks of a node. A counter has one writer, so a signal is a store. Counts go on
// from one kernel to the next: nothing is ever reset.
struct Signals {
  Window pad;                    // uint64_t [channel][sender], what the ranks of the node have signalled to the owner
  uint64_t* sent = nullptr;      // [channel][receiver], of this rank alone
  uint64_t* received = nullptr;  // [channel][sender], of this rank alone
  int32_t num_channels = 0;
};

// Where the messages of ll.h arrive. Memory that nothing else ever writes to, all zero at first. What a sender
// writes has one receiver, and stays until the sender's next exchange but one on the channel.
struct LlSlots {
  Window pad;                  // LlLine [channel][epoch % 2][sender][unit], for the owner
  uint64_t* epochs = nullptr;  // [channel], exchanges that this rank has finished
  int32_t num_channels = 0;
  int32_t num_units = 0;  // from one sender
};

// One rank's handle of a communicator.
struct Comm {
  Team world;
  Team local;  // ranks whose memory this one can address
  Signals signals;
  LlSlots ll_slots;
  Window arena;  // symmetric memory that the communicator owns
  int64_t arena_bytes = 0;
  Multicast arena_multicast;  // the same memory
  uint64_t timeout_ns = 0;    // of every wait
  Report* report = nullptr;
  // One word per GPU and process, of all communicators: not zero once a kernel there has aborted.
  uint64_t* abort_flag = nullptr;
  uint64_t call_id = 0;  // number of the call, for reports
};

}  // namespace device
}  // namespace jaxcomm
