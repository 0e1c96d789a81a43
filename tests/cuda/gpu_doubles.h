// Doubles of the CUDA runtime, and of what of NCCL needs no other rank, for programs in which ranks are threads and
// memory is the host's. What a stream does is up to the program. Defines functions: for one source file of a program,
// before emulation.h, which takes words for itself that are names of parameters in the standard library.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

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

#include "../../ffi/cuda/nccl_library.h"

namespace jaxcomm {

// Fails on this thread, which is a rank: one call of this name, after `skipped` others.
struct Fault {
  std::string call;
  int skipped = 0;
};
inline thread_local Fault fault;
inline bool Fails(const char* call) { return fault.call == call && fault.skipped-- == 0; }

// What happens before memory is freed.
inline thread_local std::function<void()> before_free;

struct Event {
  uint64_t recorded = 0, over = 0;
};

struct StreamDouble {
  virtual ~StreamDouble() = default;
  virtual void Push(std::function<void()> work) = 0;
  virtual bool IsOver() = 0;  // all that was pushed
  virtual void Record(Event& event) = 0;
  virtual void Wait(Event& event) = 0;

  cudaStream_t handle() { return reinterpret_cast<cudaStream_t>(this); }

  bool captures = false;
};

// Of the program.
std::unique_ptr<StreamDouble> MakeStream();

// What the real ones keep until the end of the process.
template <typename T>
T* Keep(std::unique_ptr<T> made) {
  static std::mutex mutex;
  static auto* kept = new std::vector<std::unique_ptr<T>>;
  std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(made));
  return kept->back().get();
}

inline StreamDouble& AnyOf(cudaStream_t stream) { return *reinterpret_cast<StreamDouble*>(stream); }
inline Event& Of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

inline cudaError_t Allocate(void** memory, size_t bytes) {
  *memory = std::malloc(bytes);
  std::memset(*memory, 0x5c, bytes);  // what it holds is not zero
  return cudaSuccess;
}

// Without what needs other ranks.
inline NcclLibrary LibraryDouble() {
  NcclLibrary made;
  made.version = NCCL_VERSION_CODE;
  // Nobody looks: bytes lie in windows.
  made.MemAlloc = [](void** memory, size_t) {
    return Fails("ncclMemAlloc") ? ncclUnhandledCudaError : (*memory = std::malloc(1), ncclSuccess);
  };
  made.MemFree = [](void* memory) { return std::free(memory), ncclSuccess; };
  made.GetErrorString = [](ncclResult_t) { return "failed"; };
  return made;
}

std::string NcclLibrary::WhyNot(const std::string&) const { return ""; }

inline bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

namespace cuda {

cudaError_t LoadKernel() { return Fails("kernels") ? cudaErrorUnknown : cudaSuccess; }
cudaError_t LoadFlaggedKernel() { return cudaSuccess; }
cudaError_t LoadMultimemKernel() { return cudaSuccess; }
cudaError_t LoadLocate() { return cudaSuccess; }

}  // namespace cuda
}  // namespace jaxcomm

extern "C" {

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "failed"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = jaxcomm::Fails("few SMs") ? 36 : 132, cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return jaxcomm::Fails("cudaMalloc") ? cudaErrorMemoryAllocation : jaxcomm::Allocate(memory, bytes);
}
cudaError_t cudaFree(void* memory) {
  if (jaxcomm::before_free) jaxcomm::before_free();
  return std::free(memory), cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return jaxcomm::Fails("cudaHostAlloc") ? cudaErrorMemoryAllocation : jaxcomm::Allocate(memory, bytes);
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  if (jaxcomm::Fails("cudaMemsetAsync")) return cudaErrorUnknown;
  jaxcomm::AnyOf(stream).Push([=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (stream == cudaStreamPerThread) return std::memcpy(to, from, bytes), cudaSuccess;
  // From the host's pageable memory, CUDA has read it when the call returns.
  auto staged = std::make_shared<std::vector<char>>();
  const char* source = static_cast<const char*>(from);
  if (kind == cudaMemcpyHostToDevice) staged->assign(source, source + bytes);
  jaxcomm::AnyOf(stream).Push([=] { std::memcpy(to, staged->empty() ? source : staged->data(), bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (jaxcomm::Fails("cudaStreamCreate")) return cudaErrorUnknown;
  *stream = jaxcomm::Keep(jaxcomm::MakeStream())->handle();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) { return *lowest = *highest = 0, cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool captures = stream != nullptr && jaxcomm::AnyOf(stream).captures;
  *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  while (stream != cudaStreamPerThread && !jaxcomm::AnyOf(stream).IsOver()) std::this_thread::yield();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return jaxcomm::AnyOf(stream).IsOver() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (jaxcomm::Fails("cudaEventCreate")) return cudaErrorUnknown;
  *event = reinterpret_cast<cudaEvent_t>(jaxcomm::Keep(std::make_unique<jaxcomm::Event>()));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  jaxcomm::AnyOf(stream).Record(jaxcomm::Of(event));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  jaxcomm::AnyOf(stream).Wait(jaxcomm::Of(event));
  return cudaSuccess;
}
}
