// What kernels need of an ncclComm_t: symmetric memory, counters, a report.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/nccl/bootstrap.h"
#include "cuda/nccl/gin.h"
#include "cuda/nccl/nccl_library.h"
#include "cuda/nccl/symmetric_memory.h"
#include "cuda/program/call_program.h"
#include "cuda/runtime/send_recv_proxy.h"
#include "include/jaxcomm/comm.h"

namespace jaxcomm {
namespace cuda {

// One per ncclComm_t and process; never deleted, for executables and CUDA graphs keep its addresses, and XLA may have
// destroyed the ncclComm_t before the end of the process.
//
// Whatever is said to be collective is called by all ranks of the communicator, in the same order, outside of the
// capture of a CUDA graph. It waits for the other ranks, but no longer than the timeout; NCCL's own waits, when memory
// is registered, are as long as NCCL's.
class Communicator {
 public:
  // For all communicators made from now on. `max_channels` and `windows` (JAXCOMM_SYMMETRIC_BUFFERS) must be the same
  // on all ranks. `node_id`: ranks whose names differ are of different nodes, whatever NVLink connects; empty: no name.
  static void Configure(double timeout_s, int32_t max_channels, const std::string& node_id = "", bool windows = false);
  struct Settings {
    double timeout_s = 30;
    int32_t max_channels = 32;
    uint64_t node_name = 0;  // hash of the name, 0: none
    bool windows = false;
  };
  static Settings Configured();

  // Collective when it is called first for `nccl_comm`. Null, and `error` filled in, if that can't be used; then it is
  // null ever after. If XLA replaces communicators, because a process has died, a new one must not get the address of
  // an old one: NCCL has no question that tells them apart and is safe to ask.
  static Communicator* Get(ncclComm_t nccl_comm, std::string* error);

  // Why kernels have aborted, of all communicators that have ever been made.
  static std::vector<std::string> Failures();
  // Empty, or why a kernel has aborted, on any communicator of the process: that which did so first, as far as can be
  // told; from then on always the same. Then nothing of the process may go on: what the kernel has left in a buffer may
  // be the operand of any other call. Not so of ranks that have not met: no kernel has run.
  static std::string FirstFailure();

  // Whether all ranks have come with the same number. Collective. False: `error` says who has another.
  bool IsSameOnAllRanks(const char* what, uint64_t own, std::string* error);
  // Whether all ranks are done with what each does alone; `error`, and `at`: as Bootstrap::AllDone. Collective.
  bool AllDone(const char* at, bool own, std::string* error);

  // Symmetric memory of at least `bytes` at every rank, which stays what it is as long as the process: all calls with
  // less share the newest. Collective. False: `error` is filled in.
  bool Reserve(int64_t bytes, device::Window* arena, int64_t* arena_bytes, std::string* error);

  // The same for calls of one owner alone, zero at first: what one kernel leaves there, the next one of this owner
  // finds. Who asks for more than there is gets another arena, and the old one stays with those who have it.
  bool ReserveFor(const std::string& owner, int64_t bytes, device::Comm* comm, std::string* error);
  // Offset table, which the other ranks of the node write.
  const device::Window& offset_table() const { return offset_table_; }
  // Where a buffer of this rank is: bytes from the begin of its signals. `window` is an ncclWindow_t on memory of
  // XLA's, in which the buffer begins at `offset`; in the second form it is in the arena. False, and `error` filled in,
  // if peers can't address it as they do the rest.
  bool OffsetOf(ncclWindow_t window, int64_t offset, int64_t* buffer_offset, std::string* error) const;
  int64_t OffsetOf(const device::Window& arena, int64_t offset) const;

  // Around what a call puts on `stream`: calls on other streams come one after the other, in the order in which the
  // host has started them, since they share signals and arena. Not so in the capture of a CUDA graph, whose nodes XLA
  // orders. Empty, or what is wrong.
  std::string Begin(cudaStream_t stream);
  std::string End(cudaStream_t stream);

  // What NCCL has registered `arena`, which is of Reserve, as.
  ncclWindow_t Registered(const device::Window& arena);

  // Empty, or why a kernel has aborted, or why ranks have not met. Then this communicator is of no more use: the
  // ranks' counters have parted.
  std::string Failure();
  // Empty, or why no call may run on it: FirstFailure(), or its own.
  std::string WhyNot();

  const device::Comm& comm() const { return comm_; }  // without an arena
  int32_t rank() const { return comm_.world.rank; }
  int32_t size() const { return comm_.world.size; }
  RankPlacement placement() const { return {rank(), comm_.local.size, gin_ ? InterNode::kGin : InterNode::kSendRecv}; }
  // What goes between nodes. Both are null where there is one.
  const Gin* gin() const { return gin_.get(); }
  SendRecvProxy* send_recv_proxy() const { return send_recv_proxy_.get(); }  // null where there is GIN
  // Channels for plans; one more is that of ExchangeOffsets (exchange_offsets.cuh).
  int32_t max_channels() const { return comm_.signals.num_channels - 1; }
  int device() const { return device_; }

 private:
  Communicator(const NcclLibrary& nccl, ncclComm_t nccl_comm, const Settings& settings)
      : nccl_(nccl), settings_(settings), bootstrap_(nccl, nccl_comm, settings.timeout_s) {}

  // Failure(), of kernels and messages. `time_ns`: when, on the GPU's clock; later than all others if no kernel says
  // so.
  std::string KernelFailure(uint64_t* time_ns);
  bool Make(std::string* error);
  bool QueryProperties(ncclCommProperties_t* properties, std::string* error);
  bool CheckDevice(int num_sms, std::string* error) const;
  bool MakeLocalMemory(std::string* error);
  bool MakeCounters(std::string* error);
  bool MakeGin(std::string* error);
  bool MakeSendRecvProxy(int num_sms, std::string* error);

  const NcclLibrary& nccl_;
  const Settings settings_;
  int device_ = 0;
  device::Comm comm_;
  device::Window offset_table_;
  device::Report* report_ = nullptr;  // as the host addresses it
  std::unique_ptr<Gin> gin_;
  std::unique_ptr<SendRecvProxy> send_recv_proxy_;

  struct Arena {
    device::Window window;
    device::Multicast multicast;
    int64_t bytes = 0;
  };

  std::mutex mutex_;
  Bootstrap bootstrap_;
  std::optional<SymmetricMemory> memory_;  // there is some once nodes are found
  cudaEvent_t last_ = nullptr;             // end of the last call that was not captured
  cudaStream_t last_stream_ = nullptr;
  device::Window arena_;
  int64_t arena_bytes_ = 0;
  std::map<std::string, Arena> arenas_;  // the newest one of each owner

  std::mutex failure_mutex_;  // not the other one, under which calls wait for other ranks
  std::string failure_;
};

}  // namespace cuda
}  // namespace jaxcomm
