// The handlers of examples/all_gather_matmul in a group of several nodes, on fakes of XLA, CUDA and NCCL: what the
// kernel receives, and the error without GIN. test_ring_example.cc runs the kernel. Part of test_ring_calls.cc's
// program.
#include "fakes/user_call.h"
// Must follow CUDA's headers: see gpu_fake.h.
#include <string>
#include <type_traits>
#include <vector>

#include "../../examples/all_gather_matmul/node_ring.cuh"

// Defined by the example.
extern "C" {
XLA_FFI_Error* AllGatherMatmulInitializeF32(XLA_FFI_CallFrame*);
XLA_FFI_Error* AllGatherMatmulExecuteF32(XLA_FFI_CallFrame*);
}

namespace all_gather_matmul {

// The last launch on this thread.
thread_local NodeArgs<F32> launched;
thread_local int32_t launched_channels = 0;
thread_local const ncclDevComm* launched_with = nullptr;

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

// All stages of a run. Initialize reports its errors in Execute.
std::string Run(const UserSite& site, Rank& of_xla, std::vector<float>& y) {
  CallOnDevice execution = ExecutionOf(of_xla.device(), &of_xla);
  std::vector<float> x(kTokens * kHidden), w(kHidden * kColumns);
  y.resize(kNumRanks * kTokens * kColumns);
  const std::vector<Array> args = {{x.data(), {kTokens, kHidden}}, {w.data(), {kHidden, kColumns}}};
  const std::vector<Array> rets = {{y.data(), {kNumRanks * kTokens, kColumns}}};
  CHECK(site.Begin(execution, args, rets).empty());
  return site.Execute(execution, args, rets);
}

// With one SM, GIN has two channels, which one block needs.
ALONE_TEST_CASE("the ring of two nodes, also on one SM and without GIN") {
  for (const auto& [max_sms, channels, network] :
       {std::tuple{5, 3, NCCL_GIN_TYPE_PROXY}, {1, 1, NCCL_GIN_TYPE_PROXY}, {5, 0, NCCL_GIN_TYPE_NONE}}) {
    cuda::Communicator::Configure(20, max_sms);
    UserSite site("all_gather_matmul_F32", &AllGatherMatmulInitializeF32, &AllGatherMatmulExecuteF32, kNumRanks);
    CHECK(site.Instantiate().empty());
    OnRanks(NodesOf(2, 2, network), [&, channels = channels](Rank& of_xla) {
      using namespace all_gather_matmul;
      std::vector<float> y;
      const std::string problem = jaxcomm::Run(site, of_xla, y);
      if (channels == 0) CHECK(Has(problem, "GIN"));
      if (channels == 0) return;
      const int rank = of_xla.rank;
      CHECK(problem.empty() && launched.comm.world.rank == rank && launched.comm.local.size == 2);
      CHECK(launched.y == y.data() && launched.gin.comm.world.rank == rank && launched.gin.arena != nullptr);
      CHECK(launched_with == &Ok(Get(of_xla))->gin()->nccl_comm());
      CHECK(launched.half_bytes() >= SlotBytes<F32>(kHidden) && launched.tokens == kTokens);
      CHECK(launched_channels == channels && FindProblem(launched, launched_channels) == nullptr);
    });
  }
}

}  // namespace
}  // namespace jaxcomm
