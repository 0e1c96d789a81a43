// The CUDA runtime functions of gpu_fake.h.
#include "gpu_fake.h"

#include <malloc.h>

#include <type_traits>

#include "../../../ffi/cuda/kernels/launch.h"
#include "../../../ffi/cuda/program/slice_args.h"

namespace jaxcomm {
namespace cuda {

template <typename Args>
cudaError_t Load(const BulkStages& bulk) {
  fake::is_loaded<Args> = true;
  if constexpr (std::is_same_v<Args, SliceArgs>) fake::slice_shared.Load(SliceSharedBytes(kSliceThreads, bulk));
  if constexpr (!std::is_same_v<Args, RankArgs>) return cudaSuccess;
  fake::plan_shared.Load(BulkSharedBytes(bulk));
  return fake::Fails("kernels") ? cudaErrorUnknown : cudaSuccess;
}
template cudaError_t Load<RankArgs>(const BulkStages&);
template cudaError_t Load<LlArgs>(const BulkStages&);
template cudaError_t Load<MultimemArgs>(const BulkStages&);
template cudaError_t Load<RowArgs>(const BulkStages&);
template cudaError_t Load<SliceArgs>(const BulkStages&);
template cudaError_t Load<RouteAndDispatchArgs>(const BulkStages&);
template cudaError_t Load<ExchangeOffsetsArgs>(const BulkStages&);
cudaError_t FindPtxVersion(int* version) { return *version = fake::ptx_version, cudaSuccess; }

namespace gin {

cudaError_t LoadGinKernel(const BulkStages& bulk) {
  fake::gin_shared.Load(BulkSharedBytes(bulk));
  return fake::Fails("kernels of GIN") ? cudaErrorUnknown : cudaSuccess;
}
cudaError_t LoadInterNodeRowKernels() { return fake::is_loaded<InterNodeRowArgs> = true, cudaSuccess; }

}  // namespace gin

}  // namespace cuda
}  // namespace jaxcomm

using namespace jaxcomm::fake;

extern "C" {

cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = num_gpus, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  return Fails("cudaSetDevice") ? cudaErrorInvalidDevice : (current_device = device, cudaSuccess);
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "failed"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount            ? num_sms
           : attribute == cudaDevAttrComputeCapabilityMajor       ? compute_capability
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? shared_memory_bytes
                                                                  : 0;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (before_allocation) before_allocation();
  return Fails("cudaMalloc") ? cudaErrorMemoryAllocation : Allocate(memory, bytes);
}
cudaError_t cudaFree(void* memory) {
  if (memory != nullptr) std::memset(memory, 0xdd, malloc_usable_size(memory));  // what still uses it notices
  if (memory != nullptr) --num_allocated;
  return std::free(memory), cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  if (before_allocation) before_allocation();
  return Fails("cudaHostAlloc") ? cudaErrorMemoryAllocation : Allocate(memory, bytes);
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, cudaSuccess; }
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  if (Fails("cudaMemsetAsync")) return cudaErrorUnknown;
  Of(stream).Push([=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (Fails("cudaMemcpyAsync")) return cudaErrorUnknown;
  if (stream == cudaStreamPerThread) return std::memcpy(to, from, bytes), cudaSuccess;
  // CUDA has read pageable host memory when the call returns.
  auto staged = std::make_shared<std::vector<char>>();
  const char* source = static_cast<const char*>(from);
  if (kind == cudaMemcpyHostToDevice) staged->assign(source, source + bytes);
  Of(stream).Push([=] { std::memcpy(to, staged->empty() ? source : staged->data(), bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (Fails("cudaStreamCreate")) return cudaErrorUnknown;
  *stream = Keep(std::make_unique<Stream>())->handle();
  ++num_allocated;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool captures = stream != nullptr && Of(stream).captures;
  *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (Fails("cudaStreamQuery") || (stream != cudaStreamPerThread && IsStopped())) return cudaErrorLaunchFailure;
  if (stream == cudaStreamPerThread) return cudaSuccess;
  return Of(stream).Drain() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (Fails("cudaEventCreate")) return cudaErrorUnknown;
  return *event = reinterpret_cast<cudaEvent_t>(uintptr_t{1}), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t stream) { return ++Of(stream).num_records, cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
  return ++Of(stream).num_waits, cudaSuccess;
}
}
