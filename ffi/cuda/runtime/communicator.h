// Resources of kernels for one lane of a group: symmetric memory, counters, a report.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda/nccl/bootstrap.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/gin.h"
#include "cuda/nccl/nccl_library.h"
#include "cuda/nccl/symmetric_memory.h"
#include "cuda/program/assign_or_return.h"
#include "cuda/program/call_program.h"
#include "cuda/runtime/recorded_calls.h"
#include "include/jaxcomm/comm.h"

namespace jaxcomm::cuda {

// One per ordered group of GPUs and process (own_communicators.h), and one more for calls that have been started. The
// two share an ncclComm_t. Never deleted, and the ncclComm_t is never destroyed: executables and CUDA graphs keep its
// addresses.
//
// All ranks of the communicator make the collective calls in the same order, outside of the capture of a CUDA graph. A
// collective call waits for the other ranks no longer than the timeout.
class Communicator {
 public:
  // Sets what all communicators made from now on use. `max_channels` and `symmetric_buffers`
  // (JAXCOMM_SYMMETRIC_BUFFERS) must be the same on all ranks. `node_id`: ranks whose names differ are on different
  // nodes, even if NVLink connects them; empty: no name. `process`: JAX's number of this process.
  // `num_processes`: 0 if unknown. `bulk_copy`: of JAXCOMM_BULK_COPY.
  static void Configure(double timeout_s, int32_t max_channels, const std::string& node_id = "",
                        bool symmetric_buffers = false, int32_t process = 0, int32_t num_processes = 0,
                        bool bulk_copy = false);
  struct Settings {
    double timeout_s = 30;
    int32_t max_channels = 32;
    uint64_t node_name = 0;  // hash of the name, 0: none
    bool symmetric_buffers = false;
    int32_t process = 0;
    int32_t num_processes = 0;
    bool bulk_copy = false;
  };
  static Settings Configured();

  // Owns `nccl_comm`, which nothing else uses; or the error with which this rank did not get one. `processes`: those of
  // the ranks, by incarnation. `all_done`: as Bootstrap::AllDone, for the steps before there is a bootstrap.
  // Collective.
  using AllDoneFunction = std::function<Status(const char* at, const Status& own)>;
  static StatusOr<Communicator*> Make(const NcclLibrary& nccl, const StatusOr<ncclComm_t>& nccl_comm,
                                      const std::vector<uint64_t>& processes, const AllDoneFunction& all_done);

  // The communicator of the same ranks for calls that have been started: such a call runs beside one of this
  // communicator. It has memory, counters and channels of its own, on the same ncclComm_t. Made by the first call,
  // whose outcome is final. Collective.
  StatusOr<Communicator*> AsynchronousLane();

  // The failures of all communicators of the process, for people.
  static std::vector<std::string> Failures();
  // The first abort of a kernel on any communicator of the process, by the time of the GPU's clock. Does not change
  // once it is an error. After it no call of the process may run: any operand may hold data that the kernel left
  // incomplete. Ranks that did not meet are no such failure, because no kernel has run.
  static Status FirstFailure();

  // Makes a call of this communicator known to the flight recorder, by device::Comm::call_id.
  void AddToRecorder(uint64_t call_id, const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count);
  void RemoveFromRecorder(uint64_t call_id) { recorded_calls_.Remove(call_id); }
  // Records the calls in progress of all communicators, and ends waits for processes that have left. Called by one
  // thread, now and then.
  static void RecordProgress();

  // A process of the program has ended or failed. Ends all waits, of kernels and of the host, of the communicators that
  // it belongs to, and their later calls fail. `why` names the process.
  static void NoteFailure(uint64_t process, const std::string& why);
  // The same for this process, which can't run a call that its peers may wait for.
  static void NoteOwnFailure(const std::string& why);
  // Why this process fails the calls of its peers: FirstFailure(), or the argument of NoteOwnFailure().
  static Status OwnFailure();

  // An error that names both ranks if two ranks pass different values of `what`. Collective.
  Status CheckSameOnAllRanks(const char* what, uint64_t own) {
    return OnGpu([&] { return bootstrap_.CheckEqual(what, own); });
  }
  // As the functions of Bootstrap. Collective.
  Status CheckSameCall(const std::string& name, uint64_t hash) {
    return OnGpu([&] { return bootstrap_.CheckSameCall(name, hash); });
  }
  Status AllDone(const char* at, const Status& own) {
    return OnGpu([&] { return bootstrap_.AllDone(at, own); });
  }
  StatusOr<bool> AllTrue(bool own) {
    return OnGpu([&] { return bootstrap_.AllTrue(own); });
  }

  // Symmetric memory of at least `bytes` at every rank, which lives as long as the process. Calls that need no more
  // than the newest arena share it. Collective.
  Status Reserve(int64_t bytes, device::Window* arena, int64_t* arena_bytes);

  // Sets the arena of `comm` to memory for the calls of one owner only. It is zero at first, and keeps its contents
  // between kernels. A request for more than the owner has makes another arena; calls with the old one keep it.
  // Collective.
  Status ReserveFor(const std::string& owner, int64_t bytes, device::Comm* comm);
  // Offset table, which the other ranks of the node write.
  const device::Window& offset_table() const { return offset_table_; }
  // Where this rank addresses a window, in bytes from the signals. First form: an ncclWindow_t on XLA's memory, made on
  // XLA's communicator; an error if it does not have the distance between ranks that jaxcomm's windows have. Second
  // form: an arena.
  StatusOr<int64_t> PlaceOf(ncclWindow_t window) const;
  int64_t PlaceOf(const device::Window& arena) const;

  // Work that is enqueued on `stream` from now on waits for all calls that have been started on this GPU. Does nothing
  // during the capture of a CUDA graph.
  static void WaitForStarted(int device, cudaStream_t stream);

  // Called before and after a call enqueues its work on `stream`. Calls on different streams share signals and arena,
  // so they run one after the other, in the order in which the host enqueued them. During the capture of a CUDA graph
  // these do nothing, because XLA orders its nodes.
  Status Begin(cudaStream_t stream);
  Status End(cudaStream_t stream);

  // NCCL's handle of `arena`, which Reserve() returned; null for none.
  ncclWindow_t Registered(const device::Window& arena);

  // The abort of a kernel, the failure of a process, or the error of ranks that did not meet. After it this
  // communicator can't be used any more: the counters of its ranks differ.
  Status Failure();
  // An error if no call may run on this communicator: FirstFailure(), or its own Failure().
  Status CheckUsable();

  const device::Comm& comm() const { return comm_; }  // without an arena
  int32_t rank() const { return comm_.world.rank; }
  int32_t size() const { return comm_.world.size; }
  RankPlacement placement() const { return {rank(), comm_.local.size}; }
  const Gin* gin() const { return gin_.get(); }  // null in a group of one node
  // Channels for plans. ExchangeOffsets (exchange_offsets.cuh) has one more.
  int32_t max_channels() const { return comm_.signals.num_channels - 1; }
  int device() const { return device_; }
  // Whether kernels on this GPU use bulk copies. Ranks may differ.
  bool bulk_copies() const { return bulk_copies_; }

 private:
  Communicator(Bootstrap& bootstrap, const Settings& settings, bool asynchronous)
      : nccl_(bootstrap.nccl()), settings_(settings), asynchronous_(asynchronous), bootstrap_(bootstrap) {}
  StatusOr<Communicator*> MakeAsynchronousLane();
  // Makes a collective call on this GPU.
  template <typename F>
  auto OnGpu(F call) -> decltype(call()) {
    std::lock_guard<std::mutex> lock(bootstrap_.mutex);
    ScopedDevice keep;
    JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(device_)));
    return call();
  }

  // Joins the communicators of the process, which Failures() and NoteFailure() see. Returns this.
  Communicator* Register();
  // Aborts if a process of this communicator has failed. Whether it has.
  bool AbortIfFailed();
  // Failure() of kernels. `time_ns`, if given: its time on the GPU's clock.
  Status KernelFailure(uint64_t* time_ns = nullptr);
  Status Make(const AllDoneFunction& all_done);
  Status MakeBootstrap();
  // Makes what no other lane uses.
  Status MakeLane();
  Status CheckBulkCopies();
  Status LoadKernels() const;
  Status MakeLocalMemory();
  Status MakeCounters();
  Status CheckWindows();
  Status MakeGin();

  const NcclLibrary& nccl_;
  const Settings settings_;
  const bool asynchronous_;  // this is the lane of another communicator
  ncclCommProperties_t properties_ = {};
  int device_ = 0;
  int64_t num_sms_ = 0;  // of the smallest GPU
  bool bulk_copies_ = false;
  device::Comm comm_;
  device::Window offset_table_;
  device::Report* report_ = nullptr;  // as the host addresses it
  RecordedCalls recorded_calls_;
  std::unique_ptr<Gin> gin_;

  struct Arena {
    device::Window window;
    device::Multicast multicast;
    int64_t bytes = 0;
  };

  std::mutex stream_mutex_;
  cudaEvent_t last_ = nullptr;  // end of the last call that was not captured
  cudaStream_t last_stream_ = nullptr;

  Bootstrap& bootstrap_;                   // of both lanes; its mutex also guards the members below
  std::optional<SymmetricMemory> memory_;  // set once the nodes are known
  device::Window arena_;
  int64_t arena_bytes_ = 0;
  std::map<std::string, Arena> arenas_;  // the newest of each owner

  std::mutex lane_mutex_;  // held while the lane is made, before the mutex of bootstrap_
  std::optional<StatusOr<Communicator*>> lane_;

  std::mutex failure_mutex_;  // separate, because calls wait for other ranks under the mutex of bootstrap_
  Status failure_;
  Status abort_reason_;
};

}  // namespace jaxcomm::cuda
