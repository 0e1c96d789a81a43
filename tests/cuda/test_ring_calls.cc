// The handlers of examples/all_gather_matmul in a node and over nodes, on fakes of XLA, CUDA and NCCL: what the kernels
// receive, and the errors. test_ring_example.cc runs the kernels.
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
thread_local const ncclDevComm* launched_with = nullptr;  // over nodes

template <typename Codec>
cudaError_t Load() {
  return cudaSuccess;
}
template <typename Codec>
cudaError_t LoadOnNodes() {
  return cudaSuccess;
}
template <typename Codec>
cudaError_t Launch(const Args<Codec>& args, int32_t channels, cudaStream_t) {
  if constexpr (std::is_same_v<Codec, F32>) static_cast<Args<F32>&>(launched) = args;
  launched_channels = channels;
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
template cudaError_t LoadOnNodes<F32>();
template cudaError_t LoadOnNodes<BF16>();
template cudaError_t Launch<F32>(const Args<F32>&, int32_t, cudaStream_t);
template cudaError_t Launch<BF16>(const Args<BF16>&, int32_t, cudaStream_t);
template cudaError_t LaunchOnNodes<F32>(const NodeArgs<F32>&, int32_t, const ncclDevComm&, cudaStream_t);
template cudaError_t LaunchOnNodes<BF16>(const NodeArgs<BF16>&, int32_t, const ncclDevComm&, cudaStream_t);

}  // namespace all_gather_matmul

namespace jaxcomm {
namespace {

using namespace fake;

constexpr int64_t kTokens = 40, kHidden = 9, kColumns = 3;
constexpr int kNumRanks = 4;

struct Row {
  int num_nodes, max_sms, channels;
  ncclGinType_t network = NCCL_GIN_TYPE_PROXY;
};

// With one SM, GIN has two channels, which one block needs. Initialize reports its errors in Execute.
ALONE_TEST_CASE("the ring of one node and of two, also on one SM and without GIN") {
  using namespace all_gather_matmul;
  for (const Row& row : {Row{1, 2, 2}, {2, 5, 3}, {2, 1, 1}, {2, 5, 0, NCCL_GIN_TYPE_NONE}}) {
    cuda::Communicator::Configure(20, row.max_sms);
    UserSite site("all_gather_matmul_F32", &AllGatherMatmulInitializeF32, &AllGatherMatmulExecuteF32, kNumRanks);
    CHECK(site.Instantiate().empty());
    OnRanks(NodesOf(row.num_nodes, kNumRanks / row.num_nodes, row.network), [&](Rank& of_xla) {
      CallOnDevice execution = ExecutionOf(of_xla.device(), &of_xla);
      std::vector<float> x(kTokens * kHidden), w(kHidden * kColumns), y(kNumRanks * kTokens * kColumns);
      const std::vector<Array> args = {{x.data(), {kTokens, kHidden}}, {w.data(), {kHidden, kColumns}}};
      std::vector<Array> rets = {{y.data(), {kNumRanks * kTokens, kColumns}}};
      CHECK(site.Begin(execution, args, rets).empty());
      const std::string problem = site.Execute(execution, args, rets);
      if (row.channels == 0) CHECK(Has(problem, "GIN"));
      if (row.channels == 0) return;
      const int rank = of_xla.rank;
      CHECK(problem.empty() && launched.comm.world.rank == rank);
      CHECK(launched.comm.local.size == kNumRanks / row.num_nodes && launched_channels == row.channels);
      CHECK(launched.x == x.data() && launched.w == w.data() && launched.y == y.data());
      CHECK(launched.tokens == kTokens && launched.hidden == kHidden && launched.columns == kColumns);
      if (row.num_nodes > 1) {
        CHECK(launched.gin.comm.world.rank == rank && launched.gin.arena != nullptr);
        CHECK(launched_with == &ValueOf(Get(of_xla))->gin()->nccl_comm());
        CHECK(launched.half_bytes() >= SlotBytes<F32>(kHidden));
        CHECK(FindProblem(launched, launched_channels) == nullptr);
      }
      --rets[0].dims[0];
      CHECK(Has(site.Execute(execution, args, rets), "all_gather_matmul: x, w and y have shapes that do not fit"));
    });
  }
}

}  // namespace
}  // namespace jaxcomm
