// The launches that nvcc compiles, on a fake of the CUDA runtime: grid, block, shared memory, stream and arguments of
// each kernel, and what it is loaded for.
#include <cuda_runtime_api.h>
#include <nccl_device/comm.h>
#include <nccl_device/impl/comm__types.h>

#include <map>
#include <string>

#include "../../ffi/cuda/kernels/launch.h"
#include "../check.h"

namespace {

struct Launched {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
  std::string kernel, argument;
} launched;  // the last one
size_t argument_bytes = 0;
cudaError_t error = cudaSuccess;       // of the next calls
std::map<std::string, size_t> loaded;  // kernels, with the bytes of shared memory that a launch may have

// By kernel. The kernels register before the constructors of this file run.
auto& Names() {
  static std::map<const void*, std::string> names;
  return names;
}

}  // namespace

extern "C" {  // without arguments that they would not read
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const void* kernel, char*, const char* name) { Names()[kernel] = name; }
cudaError_t __cudaGetKernel(const void** kernel, const void* function) { return *kernel = function, cudaSuccess; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  return launched = {grid, block, shared_bytes, stream, "", ""}, 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, cudaStream_t* stream) {
  *grid = launched.grid, *block = launched.block, *shared_bytes = launched.shared_bytes, *stream = launched.stream;
  return cudaSuccess;
}
void __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t bytes, cudaStream_t on) {
  launched = {grid, block, bytes, on, Names().at(kernel), {static_cast<const char*>(args[0]), argument_bytes}};
}
cudaError_t cudaGetLastError() { return error; }
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  CHECK(attribute == cudaFuncAttributeMaxDynamicSharedMemorySize);
  return loaded[Names().at(kernel)] = static_cast<size_t>(value), error;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  attributes->ptxVersion = 90;
  return loaded.emplace(Names().at(kernel), 48 << 10), error;
}
}

namespace jaxcomm::cuda {
namespace {

const auto kStream = reinterpret_cast<cudaStream_t>(uintptr_t{0x1230});

// `launch` of a kernel that `load` has loaded: so many thread blocks of so many threads.
template <typename Args, typename Load, typename Launch>
void Check(const char* name, const Args& args, unsigned grid, unsigned block, size_t shared_bytes, const Load& load,
           const Launch& launch) {
  loaded.clear();
  argument_bytes = sizeof args;
  CHECK(load() == cudaSuccess && launch() == cudaSuccess);
  CHECK(launched.kernel.find(name) != std::string::npos && launched.stream == kStream);
  CHECK(launched.grid.x == grid && launched.grid.y == 1 && launched.grid.z == 1);
  CHECK(launched.block.x == block && launched.block.y == 1 && launched.block.z == 1);
  CHECK(launched.shared_bytes == shared_bytes && loaded.at(launched.kernel) >= shared_bytes);
  CHECK(launched.argument == std::string(reinterpret_cast<const char*>(&args), sizeof args));
  error = cudaErrorInvalidValue;
  CHECK(load() == error && launch() == error);
  error = cudaSuccess;
}

template <typename Args>
void CheckCall(const char* name, const Args& args, unsigned grid, size_t shared_bytes, const BulkStages& bulk = {}) {
  const unsigned block = grid == 1 ? 64 : 512;
  Check(name, args, grid, block, shared_bytes, [&] { return Load<Args>(bulk); }, [&] { return Launch(args, kStream); });
}

TEST_CASE("a thread block per channel, with the shared memory of its kernel") {
  LlArgs ll;
  MultimemArgs multimem;
  RowArgs rows;
  RouteAndDispatchArgs one;
  SliceArgs slices;
  ExchangeOffsetsArgs offsets;
  ll.num_channels = 3, multimem.num_channels = 4, rows.num_channels = 5, one.num_channels = 7, slices.num_channels = 8;
  rows.num_experts = one.num_experts = 9, rows.num_rows = 100;
  one.tokens = 5, one.choices = 3, one.comm.local.size = offsets.comm.local.size = 2;
  CheckCall("6LlCall", ll, 3, 0);
  CheckCall("12MultimemCall", multimem, 4, 0);
  CheckCall("11FindOffsets", offsets, 1, 0);
  CheckCall("7RowCall", rows, 5, 512 * 2 * 16 + 9 * 4);
  CheckCall("20RouteAndDispatchCall", one, 7, 16 * 2 * 4 + (10 * 2 + 27) * 4);
  const ncclDevComm comm = {};
  for (const bool bulk : {false, true}) {
    RankArgs args;
    if (bulk) args.bulk = kPlanStages, slices.bulk = kSliceStages;
    CheckCall("9SliceCall", slices, 8, BulkSharedBytes(slices.bulk) + 512 * (32 + 4), slices.bulk);
    const auto check = [&](const char* name, const auto& load, const auto& launch) {
      Check(name, args, 6, 384, BulkSharedBytes(args.bulk), [&] { return load(args.bulk); }, launch);
    };
    check("11ExecutePlanE", Load<RankArgs>, [&] { return Launch(args, 6, kStream); });
    check("14ExecutePlanGinE", gin::LoadGinKernel, [&] { return gin::LaunchGin(args, {}, comm, 6, kStream); });
    InterNodeRowArgs rails;
    rails.rows = rows;
    rails.rows.combines = bulk;
    Check(bulk ? "14CombineOnRails" : "15DispatchOnRails", rails, 5, 384, 384 * 2 * 16 + 48 + (bulk ? 0 : 2 * 12),
          gin::LoadInterNodeRowKernels, [&] { return gin::LaunchInterNodeRows(rails, comm, kStream); });
  }
  int version = 0;
  CHECK(FindPtxVersion(&version) == cudaSuccess && version == 90);
}

}  // namespace
}  // namespace jaxcomm::cuda
