// The handlers of examples/all_gather_matmul in a group of several nodes, on fakes of XLA, CUDA and NCCL: what the
// kernel receives, and the error without GIN. test_ring_example.cc runs the kernel.
#include "fakes/machine.h"
// Must follow CUDA's headers: see gpu_fake.h.
#include <memory>
#include <string>
#include <vector>

#include "../../examples/all_gather_matmul/node_ring.cuh"
#include "../../ffi/cuda/xla/user_call.h"
#include "fakes/xla_fake.h"

// Defined by the example.
extern "C" {
XLA_FFI_Error* AllGatherMatmulInitializeF32(XLA_FFI_CallFrame*);
XLA_FFI_Error* AllGatherMatmulExecuteF32(XLA_FFI_CallFrame*);
const char* jaxcomm_use_host_api(const jaxcomm::host::Api* api);
}

namespace all_gather_matmul {

// The last launch on this thread.
thread_local NodeArgs<F32> launched;
thread_local int32_t launched_channels = 0;
thread_local const ncclDevComm* launched_with = nullptr;

template <typename Codec>
cudaError_t Load() {
  return cudaErrorNotSupported;  // the kernel for one node
}
template <typename Codec>
cudaError_t Launch(const Args<Codec>&, int32_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
template <typename Codec>
cudaError_t LoadOnNodes() {
  return cudaSuccess;
}
template <typename Codec>
cudaError_t LaunchOnNodes(const NodeArgs<Codec>& args, int32_t channels, const ncclDevComm& nccl_comm, cudaStream_t) {
  if constexpr (std::is_same_v<Codec, F32>) launched = args;
  launched_channels = channels;
  launched_with = &nccl_comm;
  return cudaSuccess;
}

template cudaError_t Load<F32>();
template cudaError_t Load<BF16>();
template cudaError_t Launch<F32>(const Args<F32>& args, int32_t channels, cudaStream_t stream);
template cudaError_t Launch<BF16>(const Args<BF16>& args, int32_t channels, cudaStream_t stream);
template cudaError_t LoadOnNodes<F32>();
template cudaError_t LoadOnNodes<BF16>();
template cudaError_t LaunchOnNodes<F32>(const NodeArgs<F32>&, int32_t, const ncclDevComm&, cudaStream_t);
template cudaError_t LaunchOnNodes<BF16>(const NodeArgs<BF16>&, int32_t, const ncclDevComm&, cudaStream_t);

}  // namespace all_gather_matmul

namespace jaxcomm {
namespace {

using namespace fake;

constexpr int64_t kTokens = 40, kHidden = 9, kColumns = 3;
constexpr int kNumRanks = 4;

Attributes AttributesOf() {
  Attributes all;
  AddUserCall(all, "all_gather_matmul_F32", kNumRanks);
  return all;
}

// All stages of a run. Initialize reports its errors in Execute.
std::string Run(void* state, Rank& of_xla, std::vector<float>& y) {
  Stream stream;
  CallOnDevice execution;
  execution.device = of_xla.device();
  execution.nccl_comm = &of_xla;
  execution.stream = stream.handle();
  execution.state = state;
  std::vector<float> x(kTokens * kHidden), w(kHidden * kColumns);
  std::string problem;
  const std::pair<XLA_FFI_Handler*, XLA_FFI_ExecutionStage> stages[] = {
      {&CudaUserPrepare, XLA_FFI_ExecutionStage_PREPARE},
      {&CudaUserInitialize, XLA_FFI_ExecutionStage_INITIALIZE},
      {&AllGatherMatmulExecuteF32, XLA_FFI_ExecutionStage_EXECUTE}};
  for (const auto& [handler, stage] : stages) {
    CHECK(problem.empty());
    problem = Invoke(handler, stage, execution, AttributesOf(), XLA_FFI_DataType_F32,
                     {{x.data(), {kTokens, kHidden}}, {w.data(), {kHidden, kColumns}}},
                     {{y.data(), {kNumRanks * kTokens, kColumns}}});
  }
  return problem;
}

void* Instantiate() {
  CallOnDevice instantiation;
  CHECK(jaxcomm_use_host_api(&cuda::HostApi()) == nullptr);
  cuda::SetUserInitialize("all_gather_matmul_F32", &AllGatherMatmulInitializeF32);
  CHECK(Invoke(&CudaUserInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE, instantiation, AttributesOf(),
               XLA_FFI_DataType_F32, {}, {})
            .empty());
  return instantiation.state;
}

ALONE_TEST_CASE("the ring of two nodes") {
  cuda::Communicator::Configure(20, 5);
  void* const state = Instantiate();
  OnRanks(NodesOf(2, 2), [&](Rank& of_xla) {
    const int rank = of_xla.rank;
    using namespace all_gather_matmul;
    std::vector<float> y(kNumRanks * kTokens * kColumns);
    CHECK(Run(state, of_xla, y).empty());
    CHECK(launched.comm.world.rank == rank && launched.comm.local.size == 2 && launched.y == y.data());
    CHECK(launched.gin.comm.world.rank == rank && launched.gin.arena != nullptr);
    CHECK(launched_with == &Ok(Get(of_xla))->gin()->nccl_comm());
    CHECK(launched.half_bytes() >= SlotBytes<F32>(kHidden) && launched.tokens == kTokens);
    CHECK(launched_channels == 3 && FindProblem(launched, launched_channels) == nullptr);
  });
}

// GIN then has two channels, which one block needs.
ALONE_TEST_CASE("the ring of two nodes on one SM") {
  cuda::Communicator::Configure(20, 1);
  void* const state = Instantiate();
  OnRanks(NodesOf(2, 2), [&](Rank& of_xla) {
    using namespace all_gather_matmul;
    std::vector<float> y(kNumRanks * kTokens * kColumns);
    CHECK(Run(state, of_xla, y).empty());
    CHECK(launched_channels == 1 && FindProblem(launched, launched_channels) == nullptr);
  });
}

ALONE_TEST_CASE("the ring of two nodes needs GIN") {
  cuda::Communicator::Configure(20, 5);
  void* const state = Instantiate();
  OnRanks(NodesOf(2, 2, NCCL_GIN_TYPE_NONE), [&](Rank& of_xla) {
    std::vector<float> y(kNumRanks * kTokens * kColumns);
    CHECK(Has(Run(state, of_xla, y), "GIN"));
  });
}

}  // namespace
}  // namespace jaxcomm
