// The CUDA runtime functions of gpu_fake.h.
#include "gpu_fake.h"

#include <malloc.h>

#include "../../../ffi/cuda/kernels/launch.h"
#include "../../../ffi/cuda/program/slice_args.h"

namespace jaxcomm {
namespace cuda {

template <>
cudaError_t Load<RankArgs>(const BulkStages& bulk) {
  fake::plan_shared.Load(BulkSharedBytes(bulk));
  return fake::Fails("kernels") ? cudaErrorUnknown : cudaSuccess;
}
cudaError_t FindPtxVersion(int* version) { return *version = fake::ptx_version, cudaSuccess; }
template <>
cudaError_t Load<LlArgs>(const BulkStages&) {
  return cudaSuccess;
}
template <>
cudaError_t Load<MultimemArgs>(const BulkStages&) {
  return cudaSuccess;
}
template <>
cudaError_t Load<RowArgs>(const BulkStages&) {
  fake::row_kernel_loaded = true;
  return cudaSuccess;
}
template <>
cudaError_t Load<SliceArgs>(const BulkStages& bulk) {
  fake::slice_shared.Load(SliceSharedBytes(kSliceThreads, bulk));
  fake::slice_kernel_loaded = true;
  return cudaSuccess;
}
template <>
cudaError_t Load<RouteAndDispatchArgs>(const BulkStages&) {
  fake::route_and_dispatch_kernel_loaded = true;
  return cudaSuccess;
}
template <>
cudaError_t Load<ExchangeOffsetsArgs>(const BulkStages&) {
  return cudaSuccess;
}

namespace gin {

cudaError_t LoadGinKernel(const BulkStages& bulk) {
  fake::gin_shared.Load(BulkSharedBytes(bulk));
  return fake::Fails("kernels of GIN") ? cudaErrorUnknown : cudaSuccess;
}
cudaError_t LoadInterNodeRowKernels() {
  fake::inter_node_row_kernel_loaded = true;
  return cudaSuccess;
}

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
  AnyOf(stream).Push([=] { std::memset(memory, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (Fails("cudaMemcpyAsync")) return cudaErrorUnknown;
  if (stream == cudaStreamPerThread) return std::memcpy(to, from, bytes), cudaSuccess;
  // CUDA has read pageable host memory when the call returns.
  auto staged = std::make_shared<std::vector<char>>();
  const char* source = static_cast<const char*>(from);
  if (kind == cudaMemcpyHostToDevice) staged->assign(source, source + bytes);
  AnyOf(stream).Push([=] { std::memcpy(to, staged->empty() ? source : staged->data(), bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (Fails("cudaStreamCreate")) return cudaErrorUnknown;
  *stream = Keep(MakeStream())->handle();
  ++num_allocated;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool captures = stream != nullptr && AnyOf(stream).captures;
  *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (stream == cudaStreamPerThread) return Fails("cudaStreamQuery") ? cudaErrorLaunchFailure : cudaSuccess;
  if (AnyOf(stream).HasFailed()) return cudaErrorLaunchFailure;
  return AnyOf(stream).IsOver() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (Fails("cudaEventCreate")) return cudaErrorUnknown;
  *event = reinterpret_cast<cudaEvent_t>(Keep(std::make_unique<Event>()));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  AnyOf(stream).Record(Of(event));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  AnyOf(stream).Wait(Of(event));
  return cudaSuccess;
}
}
