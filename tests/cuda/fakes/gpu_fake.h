// Fakes of the CUDA runtime, and of the NCCL functions that involve no other rank, for programs in which ranks are
// threads and memory is the host's. Must be included before emulation.h, which defines macros with the names of
// parameters in the headers here.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../../ffi/cuda/nccl/nccl_library.h"
#include "../../check.h"

namespace jaxcomm {
namespace fake {

// Makes one call of this name fail on this thread, which is a rank, after `skipped` other calls.
struct Fault {
  std::string call;
  int skipped = 0;
};
inline thread_local Fault fault;
inline bool Fails(const char* call) { return fault.call == call && fault.skipped-- == 0; }

// State of this thread.
inline thread_local int current_device = 0;
inline thread_local int num_sms = 132;                    // of its GPU
inline thread_local int compute_capability = 9;           // major number, of its GPU
inline thread_local int ptx_version = 90;                 // of its kernels' code
inline thread_local int shared_memory_bytes = 227 << 10;  // of a thread block
// A kernel's code must be loaded before its first launch, which would otherwise wait for running kernels.
template <typename Args>
inline std::atomic<bool> is_loaded{false};

// Bytes of dynamic shared memory with which a kernel may be launched on this thread's GPU: 48 KiB, or more if it was
// loaded for more.
struct SharedLimit {
  void Load(int64_t bytes) { limit_bytes = std::max(limit_bytes, bytes); }
  bool Allows(int64_t bytes) const { return bytes <= limit_bytes; }
  int64_t limit_bytes = 48 << 10;
};
inline thread_local SharedLimit plan_shared, gin_shared, slice_shared;

inline int num_gpus = 1024;  // of the process

// Called before memory is allocated, on any thread.
inline std::function<void()> before_allocation;
inline std::atomic<int> num_allocated{0};  // blocks from cudaMalloc and cudaHostAlloc that are not free, and streams

inline std::atomic<int> num_symmetric{0};  // blocks from ncclMemAlloc that are not free

// Whether a kernel has stopped this thread's GPU (device::Trap). CUDA starts no later work on it, and copies nothing.
bool IsStopped();

struct Stream {
  bool captures = false;
  int num_waits = 0, num_records = 0;                    // of events
  std::vector<std::function<void(cudaStream_t)>> graph;  // launches while it is captured, with their arguments
  std::deque<std::function<bool()>> queue;               // each returns whether it is complete

  // Whether all pushed work has ended.
  bool Drain() {
    while (!queue.empty() && !IsStopped() && queue.front()()) queue.pop_front();
    if (IsStopped()) queue.clear();
    return queue.empty();
  }
  void Push(std::function<void()> work) {
    queue.push_back([work = std::move(work)] { return work(), true; });
  }
  cudaStream_t handle() { return reinterpret_cast<cudaStream_t>(this); }
};
inline Stream& Of(cudaStream_t stream) { return *reinterpret_cast<Stream*>(stream); }

// Objects that the real libraries keep until the process ends.
template <typename T>
T* Keep(std::unique_ptr<T> made) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::unique_ptr<T>>;
  std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(made));
  return kept->back().get();
}

inline cudaError_t Allocate(void** memory, size_t bytes) {
  ++num_allocated;
  *memory = std::malloc(bytes);
  std::memset(*memory, 0x5c, bytes);  // memory is not zero at first
  return cudaSuccess;
}

// NCCL functions that involve no other rank.
inline NcclLibrary FakeLibrary() {
  NcclLibrary made;
  made.version = NCCL_VERSION_CODE;
  // Nobody looks: bytes lie in windows. A call that fails leaves an address that is none.
  made.MemAlloc = [](void** memory, size_t) {
    if (Fails("ncclMemAlloc")) return *memory = reinterpret_cast<void*>(uintptr_t{1}), ncclUnhandledCudaError;
    return *memory = std::malloc(1), ncclSuccess;
  };
  made.MemFree = [](void* memory) { return std::free(memory), ncclSuccess; };
  made.GetErrorString = [](ncclResult_t) { return "failed"; };
  made.GetLastError = [](ncclComm_t) { return ""; };
  return made;
}

inline bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
inline bool Has(const Status& status, const std::string& part) { return Has(status.message(), part); }

}  // namespace fake
}  // namespace jaxcomm
