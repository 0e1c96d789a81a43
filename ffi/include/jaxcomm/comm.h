// The data that the host passes to a kernel: plain structs, passed by value. Host code may include this file without a
// CUDA compiler.
#pragma once

#include <cstdint>

#include "portable.h"

namespace jaxcomm {
namespace device {

// The ranks first, first + stride, ... of the group. This rank is member number `rank`.
struct Team {
  int32_t rank = 0;
  int32_t size = 1;
  int32_t first = 0;
  int32_t stride = 1;

  JAXCOMM_BOTH int32_t World(int32_t member) const { return first + member * stride; }
  // The member number of a rank of the group; -1 if the rank is not a member.
  JAXCOMM_BOTH int32_t Member(int32_t world) const {
    const int32_t distance = world - first;
    return distance >= 0 && distance < size * stride && distance % stride == 0 ? distance / stride : -1;
  }
};

// Memory of the same size at every rank of a node. The memory of local rank p begins at base + p * stride. `base` may
// point outside every allocation.
struct Window {
  char* base = nullptr;
  int64_t stride = 0;

  template <typename T = char>
  JAXCOMM_BOTH T* At(int32_t local_rank, int64_t byte_offset = 0) const {
    return reinterpret_cast<T*>(base + local_rank * stride + byte_offset);
  }
};

// An operand or result of XLA's at every rank of a node. Each rank has it at a place of its own, which may change from
// one run to the next. A kernel before that of the call writes `places`, so only kernels use At().
struct BufferWindow {
  Window window;
  const int64_t* places = nullptr;  // [local rank], in bytes from the begin of `window`; memory of the GPU

  template <typename T = char>
  JAXCOMM_BOTH T* At(int32_t local_rank, int64_t byte_offset = 0) const {
    return window.At<T>(local_rank, places[local_rank] + byte_offset);
  }
};

// An address range that stands for the memory of all ranks of a node at once. A store writes to every rank, and a load
// returns the sum over the ranks (multimem.h). Null if the GPUs, the switches or NCCL do not support multicast. The
// addresses are valid only for the functions of multimem.h.
struct Multicast {
  char* base = nullptr;

  template <typename T = char>
  JAXCOMM_BOTH T* At(int64_t byte_offset = 0) const {
    return reinterpret_cast<T*>(base + byte_offset);
  }
};

// How far the calls of a communicator have come on this GPU, also in replays of CUDA graphs. In host memory, beside the
// report. The first thread of the first block writes the begin and the end of a call: other blocks may still run.
struct Progress {
  uint64_t begun = 0;      // the number of the latest call of the communicator, in the upper half, and Comm::call_id
  uint64_t ended = 0;      // the number of the latest call that has ended
  uint64_t waits_ns = 0;   // latest time on the GPU's clock at which a thread waited, written every 50 us or so
  uint64_t waits_for = 0;  // the rank, in the upper half, and the step of this wait
};

// Why a kernel aborted. Resides in host memory that the GPU addresses; the host reads it while kernels run. CUDA
// promises that aligned loads and stores of up to 16 bytes there are atomic between host and GPU in system scope, but
// promises it for read-modify-write operations only where the link has them (hostNativeAtomicSupported). So host and
// GPU share `state` and `abort` by loads and stores alone, and the threads of the GPU claim the report with a word of
// their own.
struct Report {
  enum State : uint64_t { kNone = 0, kComplete = 2 };
  uint64_t state = kNone;
  uint64_t claim = 0;    // not read by the host; 1: a thread of the GPU writes the report
  uint64_t abort = 0;    // set by the host: all waits end
  uint64_t call_id = 0;  // Comm::call_id of the call that aborted
  int32_t channel = 0;
  int32_t step = 0;  // position in the plan, or the `step` that the kernel passed to Wait
  int32_t rank = 0;
  int32_t peer = 0;       // the rank that did not signal
  bool by_host = false;   // the host's `abort` has ended the wait
  uint64_t expected = 0;  // number of signals expected from the peer
  uint64_t seen = 0;
  uint64_t time_ns = 0;  // time on the GPU's clock
  Progress progress;
};

// Which counters a signal and its wait use: those of a channel, with a tag. jaxcomm's own channels have tag 0 only.
struct Channel {
  JAXCOMM_BOTH constexpr Channel(int32_t channel, int32_t with_tag = 0) : index(channel), tag(with_tag) {}

  int32_t index;
  int32_t tag;
};

// Counters of the signals between the ranks of a node. Each counter has one writer, so a signal is a store. Counts
// continue from one kernel to the next and are never reset.
struct Signals {
  Window pad;                    // uint64_t [channel][tag][sender], signals of the node's ranks to the owner
  uint64_t* sent = nullptr;      // [channel][tag][receiver], used by this rank only
  uint64_t* received = nullptr;  // [channel][tag][sender], used by this rank only
  int32_t num_channels = 0;
  int32_t num_tags = 1;
};

// Receive slots of the messages of ll.h. The memory starts as zeros, and only these messages are ever written to it.
// Each slot has one sender and one receiver. A message stays until the sender's second next exchange on the channel.
struct LlSlots {
  Window pad;                  // LlLine [channel][epoch % 2][sender][unit], for the owner
  uint64_t* epochs = nullptr;  // [channel], exchanges that this rank has completed
  int32_t num_channels = 0;
  int32_t num_units = 0;  // from one sender in one exchange
};

// The handle of a communicator on one rank.
struct Comm {
  Team world;
  Team local;  // the ranks whose memory this rank can address
  Signals signals;
  LlSlots ll_slots;
  Window arena;  // symmetric memory that the communicator owns
  int64_t arena_bytes = 0;
  Multicast arena_multicast;  // the same memory as `arena`
  uint64_t timeout_ns = 0;    // limit of every wait
  Report* report = nullptr;
  // One word per GPU and process, shared by all communicators. Not zero once a kernel of the process has aborted on
  // this GPU.
  uint64_t* abort_flag = nullptr;
  uint64_t call_id = 0;           // number of the call, for reports
  uint64_t* num_calls = nullptr;  // begun, for Progress; memory of the GPU. Null: nothing is written
};

// The ranks with the same number in their nodes: member g is of node g. Nodes have consecutive ranks and equal sizes.
JAXCOMM_BOTH Team RailOf(const Comm& comm) {
  const int32_t size = comm.local.size;
  return {comm.world.rank / size, comm.world.size / size, comm.local.rank, size};
}

// The most entries of a channel in NCCL's queue to one rank. A put or signal that finds the queue full waits in NCCL's
// code, without a deadline, until the network takes an entry out.
//
// NCCL has one queue per rank and context of GIN. Each signal and each put of up to 1 GiB takes an entry. A put that
// raises a counter takes two more in a second queue of the same length. With GDAKI, entries leave in order, and before
// the counter rises: a channel whose counter shows all puts has only the signals behind the last put in the queue.
// jaxcomm asks for queues that hold kMostEntries of each channel of a context, and at least 128, NCCL's default. NCCL's
// CPU proxy, which has no second queue, ignores this: it has 256 entries on InfiniBand, and 32 on TCP sockets. It
// stores the counter before it frees the entry, which also waits for those in front of it: a channel whose counter
// shows all puts may still have their entries until the network has taken those. Source: NVIDIA/nccl 2.32.3,
// src/include/nccl_device/gin/gdaki/doca_gpunetio/device/doca_gpunetio_dev_verbs_counter.cuh (put_counter: 1 entry and
// 2), doca_gpunetio_dev_verbs_onesided.cuh (signal: 1), gin/proxy/gin_proxy.h (postGfd),
// src/transport/net_ib/gdaki/gin_host_gdaki.cc (queueDepth), src/gin/gin_host_proxy.cc (NCCL_NET_MAX_REQUESTS *
// maxRecvs).
constexpr int64_t kMostEntries = 16;
// Maximum number of outstanding puts: they take two entries each in the second queue. A plan counts those to one rank,
// Gin::Put those to all ranks together.
constexpr int64_t kMostPutsUnderWay = kMostEntries / 2;

// Report::step of a wait until the network has read the sources of puts to other nodes.
constexpr int32_t kFlushStep = -5;

// For the puts and signals to other nodes in gin.h. Empty in a group of one node.
struct GinHandle {
  Comm comm;  // its `local` team contains all ranks; of its signals, only `received` is used: [channel][sender]
  uint64_t* puts = nullptr;  // [channel], used by this rank only
  void* arena = nullptr;     // ncclWindow_t of the arena
};

// Bytes of an arena that WithSignals needs.
JAXCOMM_BOTH constexpr int64_t SignalsBytes(int32_t num_ranks, int32_t num_channels, int32_t num_tags = 1) {
  return (int64_t{3} * num_channels * num_tags * num_ranks * static_cast<int64_t>(sizeof(uint64_t)) + 15) / 16 * 16;
}

// The same ranks with channels of their own, whose counters lie in comm.arena from `byte_offset` on, a multiple of 8.
// Kernels that use other channels than these never change them. The memory starts as zeros and belongs to the
// counters. All arguments are the same on all ranks.
JAXCOMM_BOTH Comm WithSignals(Comm comm, int64_t byte_offset, int32_t num_channels, int32_t num_tags = 1) {
  const int64_t count = int64_t{num_channels} * num_tags * comm.local.size;
  comm.signals.pad = {comm.arena.base + byte_offset, comm.arena.stride};
  comm.signals.sent = comm.arena.At<uint64_t>(comm.local.rank, byte_offset) + count;
  comm.signals.received = comm.signals.sent + count;
  comm.signals.num_channels = num_channels;
  comm.signals.num_tags = num_tags;
  return comm;
}

}  // namespace device
}  // namespace jaxcomm
