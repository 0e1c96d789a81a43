// The handlers of examples/token_dispatch on fakes of XLA, CUDA and NCCL, stage by stage as XLA calls them. Their
// kernel runs emulated.
#include "fakes/machine.h"
// Must follow CUDA's headers: see gpu_fake.h.
#include <cstring>
#include <string>
#include <vector>

#include "../../examples/token_dispatch/token_dispatch.cuh"
#include "../../ffi/cuda/xla/user_call.h"
#include "fakes/xla_fake.h"

// Defined by the example.
extern "C" {
XLA_FFI_Error* TokenDispatchInitialize(XLA_FFI_CallFrame*);
XLA_FFI_Error* TokenDispatchExecute(XLA_FFI_CallFrame*);
const char* jaxcomm_use_host_api(const jaxcomm::host::Api* api);
}

namespace token_dispatch {

cudaError_t Load() { return cudaSuccess; }

cudaError_t Launch(const Args& args, int32_t blocks, cudaStream_t stream) {
  return jaxcomm::fake::Launch(blocks, 2 * device::kWarpThreads, 0, stream, [args] { Run(args); });
}

}  // namespace token_dispatch

namespace jaxcomm {
namespace {

using namespace fake;

constexpr int kRanks = 2;
constexpr int64_t kTokens = 6, kWidth = 3;

Attributes AttributesOf() {
  Attributes all;
  AddUserCall(all, "token_dispatch", kRanks);
  return all;
}

// Rank 0 sends tokens 0, 2, 4 to itself, and rank 1 all but its first one to rank 0. All arrays of the frame are s32.
struct Operands {
  explicit Operands(int rank) : begin({0, rank == 0 ? 3 : 5}), out(kRanks * kTokens * kWidth, -1), counts(kRanks, -1) {
    for (int32_t i = 0; i < kTokens * kWidth; ++i) x.push_back(100 * (rank + 1) + i);
    order = rank == 0 ? std::vector<int32_t>{0, 2, 4, 1, 3, 5} : std::vector<int32_t>{1, 2, 3, 4, 5, 0};
  }
  std::vector<int32_t> x, order, begin, out, counts;
};

std::string Run(CallOnDevice& execution, Operands& operands, XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage,
                int64_t num_counts = kRanks) {
  return Invoke(
      handler, stage, execution, AttributesOf(), XLA_FFI_DataType_S32,
      {{operands.x.data(), {kTokens, kWidth}}, {operands.order.data(), {kTokens}}, {operands.begin.data(), {kRanks}}},
      {{operands.out.data(), {kRanks, kTokens, kWidth}}, {operands.counts.data(), {num_counts}}});
}

ALONE_TEST_CASE("the dispatch, stage by stage") {
  cuda::Communicator::Configure(20, 3);
  CallOnDevice instantiation;
  CHECK(jaxcomm_use_host_api(&cuda::HostApi()) == nullptr);
  cuda::SetUserInitialize("token_dispatch", &TokenDispatchInitialize);
  Operands none(0);
  CHECK(Run(instantiation, none, &CudaUserInstantiate, XLA_FFI_ExecutionStage_INSTANTIATE).empty());
  fake::OnRanks(kRanks, [&](int rank, void* nccl_comm) {
    CallOnDevice execution;
    execution.device = rank;
    execution.nccl_comm = nccl_comm;
    execution.stream = fake::NewStream();
    execution.state = instantiation.state;
    std::vector<Operands> calls(3, Operands(rank));
    CHECK(Run(execution, calls[0], &CudaUserPrepare, XLA_FFI_ExecutionStage_PREPARE).empty());
    CHECK(Run(execution, calls[0], &CudaUserInitialize, XLA_FFI_ExecutionStage_INITIALIZE).empty());
    for (Operands& call : calls) {
      CHECK(Run(execution, call, &TokenDispatchExecute, XLA_FFI_ExecutionStage_EXECUTE).empty());
    }
    fake::Wait(execution.stream);
    for (const Operands& call : calls) {
      for (int source = 0; source < kRanks; ++source) {
        const Operands sent(source);
        const int32_t first = sent.begin[rank], end = rank == 0 ? sent.begin[1] : static_cast<int32_t>(kTokens);
        CHECK(call.counts[source] == end - first);
        for (int64_t place = 0; place < kTokens; ++place) {
          for (int64_t i = 0; i < kWidth; ++i) {
            const int32_t value = call.out[(source * kTokens + place) * kWidth + i];
            CHECK(value == (place < end - first ? sent.x[sent.order[first + place] * kWidth + i] : 0));
          }
        }
      }
    }
    CHECK(Has(Run(execution, calls[0], &TokenDispatchExecute, XLA_FFI_ExecutionStage_EXECUTE, 3),
              "token_dispatch: x, order, begin, out and counts have shapes that do not fit"));
  });
}

}  // namespace
}  // namespace jaxcomm
