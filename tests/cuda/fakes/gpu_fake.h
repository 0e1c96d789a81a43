// Fakes of the CUDA runtime, and of what of NCCL needs no other rank, for programs in which ranks are threads and
// memory is the host's. What a stream does is up to the program: machine.h, cluster.h. Goes before emulation.h, which
// takes words for itself that are names of parameters in the headers here.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <nccl_device/core.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../../ffi/cuda/nccl/nccl_library.h"

namespace jaxcomm {
namespace fake {

// Fails on this thread, which is a rank: one call of this name, after `skipped` others.
struct Fault {
  std::string call;
  int skipped = 0;
};
inline thread_local Fault fault;
inline bool Fails(const char* call) { return fault.call == call && fault.skipped-- == 0; }

// Of this thread.
inline thread_local int current_device = 0;

// What happens before memory is freed.
inline thread_local std::function<void()> before_free;

struct Event {
  uint64_t recorded = 0, over = 0;
};

struct FakeStream {
  virtual ~FakeStream() = default;
  virtual void Push(std::function<void()> work) = 0;
  virtual bool IsOver() = 0;  // all that was pushed
  virtual void Record(Event& event) = 0;
  virtual void Wait(Event& event) = 0;

  cudaStream_t handle() { return reinterpret_cast<cudaStream_t>(this); }

  bool captures = false;
};

// Of the program.
std::unique_ptr<FakeStream> MakeStream();

// What the real ones keep until the end of the process.
template <typename T>
T* Keep(std::unique_ptr<T> made) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::unique_ptr<T>>;
  std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(made));
  return kept->back().get();
}

inline FakeStream& AnyOf(cudaStream_t stream) { return *reinterpret_cast<FakeStream*>(stream); }
inline Event& Of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

inline cudaError_t Allocate(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  std::memset(*memory, 0x5c, bytes);  // what it holds is not zero
  return cudaSuccess;
}

// Without what needs other ranks.
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
  return made;
}

inline bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace fake
}  // namespace jaxcomm
